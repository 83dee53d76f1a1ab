"""SmolLM2-135M, a real instruct model: logits and ids of transformers, lossless methods."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench_cli.app import main
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Tokens
from specbench_cli.models import describe, resolve
from specbench_cli.models.aliases import aliases
from specbench_cli.tasks import load_task, render_prompt

pytestmark = pytest.mark.real

NEAR = 1e-3
"""Logits so close together that rounding may swap them; those of this model reach 40."""

NEW = 16


@pytest.fixture(scope="module")
def checkpoint():
    found = resolve("smollm2-135m")
    assert describe("smollm2-135m")["available"] == "installed", "this is about the package's file"
    return found


@pytest.fixture(scope="module")
def transformers_model(checkpoint):
    """Return the model and tokenizer that transformers loads from the same file."""
    file = aliases()["smollm2-135m"].installed_file
    assert file is not None
    # transformers leaves open files to the garbage collector.
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True
    )
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def decoder(checkpoint):
    return load_decoder(checkpoint.path, name="target")


@pytest.fixture(scope="module")
def prompts(checkpoint):
    """Return one rendered question per family of `mini`."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    first = {question.family: question for question in reversed(load_task("mini").questions)}
    return [render_prompt(tokenizer, [("user", q.turns[0])], raw=False) for q in first.values()]


def test_logits_equal_those_of_transformers(decoder, transformers_model, prompts):
    for prompt in prompts[:3]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = transformers_model[0](ids).logits
        logits = decoder.forward(
            Tokens(ids), decoder.new_state(len(prompt)), logits_at="all"
        ).logits
        scale = max(1.0, expected.abs().max().item())
        assert (logits - expected).abs().max() <= 1e-4 * scale


def test_texts_are_encoded_and_decoded_as_by_transformers(checkpoint, transformers_model):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    texts = ("In 2024, 17 x 3 = 51.", "  def f(x):\n\treturn x**2  # é, \u4e2d\u6587 \U0001f600\n")
    for text in texts:
        assert tokenizer.encode(text) == transformers_model[1].encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == transformers_model[1].chat_template
    assert tokenizer.eos_token == "<|im_end|>"


def test_greedy_ids_equal_those_of_transformers_generate(decoder, transformers_model, prompts):
    model = transformers_model[0]
    for prompt in prompts:
        state = decoder.new_state(len(prompt) + NEW)
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        fed = prompt
        for chosen, row in zip(out.sequences[0, len(prompt) :], out.logits, strict=True):
            logits = decoder.forward(Tokens(torch.tensor([fed])), state).logits
            token = int(logits.argmax())
            if token != chosen:
                assert row[0, chosen] - row[0, token] < NEAR, "another token, and no near-tie"
                break
            fed = [token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_forward_over_several_tokens_has_the_logits_of_single_tokens(dtype, checkpoint, decoder):
    if dtype != torch.float32:
        decoder = load_decoder(checkpoint.path, name="target", dtype=dtype)
    ids = torch.arange(500, 564)[None]
    state = decoder.new_state(64)
    rows = [decoder.forward(Tokens(one), state).logits[0] for one in ids.split(1, 1)]
    single = torch.cat(rows).float()
    allowed = (1e-4 if dtype == torch.float32 else 0.06) * single.abs().max()
    for height in (2, 3, 6, 16, 17, 32, 64):
        state.clear()
        parts = [
            decoder.forward(Tokens(part), state, logits_at="all").logits[0]
            for part in ids.split(height, 1)
        ]
        assert (torch.cat(parts).float() - single).abs().max() <= allowed, height


def run_methods(tmp_path, monkeypatch, capsys, *words):
    """Return the records of a short run, with Spec-Bench's questions if they are available."""
    monkeypatch.chdir(tmp_path)
    task = "spec_bench" if os.environ.get("SPECBENCH_DATA") else "mini"
    size = ["--task", task, "--category", "qa", "--max-new-tokens", "16"]
    with pytest.raises(SystemExit) as ended:
        main(["run", *words, *size, "--allow-noise", "--out", "here"])
    assert ended.value.code in (0, None), capsys.readouterr().err
    records = [json.loads(line) for line in Path("here/records.jsonl").read_text().splitlines()]
    kinds = {record["verdict"]["kind"] for record in records}
    assert kinds <= {"reference", "identical", "near-tie"}
    return records


def test_the_methods_of_profile_laptop_are_lossless(tmp_path, monkeypatch, capsys):
    records = run_methods(tmp_path, monkeypatch, capsys, "--profile", "laptop", "--limit", "1")
    labels = {"vanilla", "eagle3", "suffix", "sam", "pld", "hf:vanilla"}
    assert {record["label"] for record in records} == labels


def test_its_draft_and_heads_get_tokens_accepted_and_change_no_output(
    tmp_path, monkeypatch, capsys
):
    drafting = ("sps", "specdec++", "eagle2", "mtp")
    words = ("--target", "smollm2-135m", "-m", ",".join(drafting), "--limit", "1")
    records = run_methods(tmp_path, monkeypatch, capsys, *words)
    assert {record["label"] for record in records} == {"vanilla", *drafting}
    for label in drafting:
        own = [record["steps"] for record in records if record["label"] == label]
        accepted = sum(sum(steps["accepted"]) for steps in own)
        assert accepted >= sum(len(steps["accepted"]) for steps in own) / 4, label
