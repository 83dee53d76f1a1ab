"""Heads for a target of any family: chat template, self-generated questions, cached rows."""

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from methods._heads.files import HeadShape
from methods._heads.module import get_head_classes
from methods._heads.slots import HeadInput, PastKeyValues
from methods.chimera.head import ChimeraHead
from methods.eagle.head import EagleHead
from methods.eagle3.head import Eagle3Head
from methods.falcon.head import FalconHead
from methods.mtp.head import MtpHead
from recipes.embedded.tokenizer import tokenizer_texts
from specbench_cli.app import with_all_options
from specbench_cli.commands.training.app import app as train
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Tokens
from specbench_cli.errors import UsageError
from specbench_cli.tasks import render_prompt
from specbench_cli.training.align import Aligner, make_alignment
from specbench_cli.training.corpus import Encoder, TemplateEncoder
from specbench_cli.training.heads import losses as head_losses
from specbench_cli.training.heads import trainer as head_trainer
from specbench_cli.training.heads.build import RIDGE, HeadSchedule, init_from_least_squares
from specbench_cli.training.heads.losses import CachedTargetOutput, predict_target, run_target
from specbench_cli.training.heads.trainer import HeadTrainer
from specbench_cli.training.loop import WORK, TrainingPoint
from specbench_cli.training.replies import (
    OPENINGS,
    HiddenStateFiles,
    ReplyPrompt,
    TrainingReply,
    load_replies,
    make_magpie_prompts,
    sample_replies,
)

app = with_all_options(train)


END, BEGIN = 0, 1
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROBLEMS = [[(f"What is {n} plus {n}?", str(2 * n))] for n in range(120)]
CPU = torch.device("cpu")
CAPTURED_LAYERS = (1, 4, 7)


class Killed(Exception):
    """Exception in place of a signal during a run."""


@pytest.fixture(scope="module", autouse=True)
def _lengths() -> Iterator[None]:
    """Limit answers and questions, since an untrained target seldom ends them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbench_cli.training.replies.MAX_ANSWER", 12)
        patch.setattr("specbench_cli.training.replies.MAX_QUESTION", 120)
        yield


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose chats and turns begin with the same token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    named = ["<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=named,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(islice(tokenizer_texts([], 0, 20), 40), trainer)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=named[0], bos_token=named[1], pad_token=named[0]
    )
    fast_tokenizer.chat_template = TEMPLATE
    return fast_tokenizer


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a target with eight layers, GQA and a list of EOS tokens."""
    path = tmp_path_factory.mktemp("targets") / "tiny"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=1024,
        bos_token_id=BEGIN,
        eos_token_id=[END],
        pad_token_id=END,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [END]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def encode(tokenizer: PreTrainedTokenizerFast) -> TemplateEncoder:
    return TemplateEncoder(tokenizer, frozenset({END}))


def sample(
    folder: Path, prompts: list[ReplyPrompt], file: Path, rows: HiddenStateFiles | None = None
) -> dict[int, TrainingReply]:
    def target() -> Decoder:
        return load_decoder(folder, name="target")

    return sample_replies(target, prompts, {END}, file, 0, rows=rows)


def find_rows(folder: Path) -> list[tuple[int, int]]:
    """Return the first row of each reply, by its text, and the number of rows."""
    found = sorted(
        load_replies(folder / "replies.jsonl"), key=lambda reply: (*reply.prompt, -1, *reply.answer)
    )
    return [(reply.first_row, reply.size - 1) for reply in found]


@pytest.fixture(scope="module")
def prompts(encode: TemplateEncoder) -> list[ReplyPrompt]:
    return make_magpie_prompts(encode, PROBLEMS, 0, 40)


@pytest.fixture(scope="module")
def replies_file(
    folder: Path, prompts: list[ReplyPrompt], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    file = tmp_path_factory.mktemp("replies") / "replies.jsonl"
    assert sample(folder, prompts, file)
    return file


def read_replies(file: Path) -> list[TrainingReply]:
    rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["chat"])
    return [TrainingReply(row["prompt"], row["answer"]) for row in rows]


# ---- prompts and replies ------------------------------------------------------------------------


def test_a_training_prompt_equals_the_rendered_prompt(
    encode: TemplateEncoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    question = "How far is it?"
    assert encode.encode_prompt(question) == render_prompt(
        tokenizer, [("user", question)], raw=False
    )
    expected = [*encode.question_prefix, *encode.encode_text(question), *encode.answer_prefix]
    assert tokenizer.decode(expected) == tokenizer.decode(encode.encode_prompt(question))
    assert encode.answer_prefix[0] == END


def test_a_tokenizer_without_a_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UsageError, match="chat template"):
        TemplateEncoder(bare, frozenset({END}))


def test_a_longer_list_of_questions_begins_with_the_shorter_one(
    encode: TemplateEncoder, prompts: list[ReplyPrompt]
) -> None:
    assert make_magpie_prompts(encode, PROBLEMS, 0, 60)[:40] == prompts
    assert sum(not ask.question_end for ask in prompts) == 10
    own = [ask for ask in prompts if ask.question_end]
    assert {ask.greedy for ask in own} == {True, False}
    starts = {tuple(ask.ids[len(encode.question_prefix) :]) for ask in own}
    openings = {tuple(encode.encode_text(text)) for text in OPENINGS}
    assert () in starts
    assert 5 < len(starts - {()}) == len(starts & openings)


def test_a_template_without_turn_tokens_gets_only_problems(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    plain.chat_template = "USER: {{ messages[0]['content'] }} ASSISTANT:"
    encode = TemplateEncoder(plain, frozenset({END}))
    assert not any(ask.question_end for ask in make_magpie_prompts(encode, PROBLEMS, 0, 9))
    with pytest.raises(UsageError, match="cannot generate questions"):
        make_magpie_prompts(encode, [], 0, 9)


def test_a_failing_template_or_foreign_tokenizer_is_a_usage_error(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    plain = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    plain.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(UsageError, match="the chat template of the target rejects"):
        TemplateEncoder(plain, frozenset({END}))
    with pytest.raises(UsageError, match=r"is not the embedded family's: it has no token <\|"):
        Encoder(plain)


def test_greedy_answers_equal_those_of_transformers(
    replies_file: Path, prompts: list[ReplyPrompt], target: LlamaForCausalLM
) -> None:
    replies = [
        r
        for r, ask in zip(read_replies(replies_file), prompts, strict=True)
        if ask.greedy and r.answer
    ]
    assert len(replies) > 9
    for prompt, answer, _ in replies:
        ids = torch.tensor([prompt])
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=END,
        )
        assert output[0, len(prompt) :].tolist() == answer


def test_a_self_generated_question_takes_the_place_of_the_user_message(
    replies_file: Path, prompts: list[ReplyPrompt], encode: TemplateEncoder
) -> None:
    own = [
        reply
        for reply, ask in zip(read_replies(replies_file), prompts, strict=True)
        if ask.question_end
    ]
    own_prompts = [reply.prompt for reply in own if reply.answer]
    assert 0 < len(own_prompts) < len(own)  # an unfinished question gets no answer
    assert len({tuple(prompt) for prompt in own_prompts}) == len(own_prompts)
    first, last = len(encode.question_prefix), len(encode.answer_prefix)
    for prompt in own_prompts:
        assert (prompt[:first], prompt[-last:]) == (encode.question_prefix, encode.answer_prefix)
        assert END not in prompt[first:-last]


def test_answers_follow_the_target_distribution(
    folder: Path, target: LlamaForCausalLM, encode: TemplateEncoder, tmp_path: Path
) -> None:
    prompt, n = encode.encode_prompt("And?"), 1500
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbench_cli.training.replies.MAX_ANSWER", 1)
        found = sample(folder, [ReplyPrompt(prompt)] * n, tmp_path / "replies.jsonl")
    counts = torch.bincount(torch.tensor([r.answer[0] for r in found.values()]), minlength=280)
    chances = target(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    frequent = chances * n > 8
    z_scores = (counts - chances * n)[frequent] / (chances * n * (1 - chances))[frequent].sqrt()
    assert frequent.sum() > 5
    assert z_scores.abs().max() < 4.5


def test_a_resumed_run_keeps_its_replies_and_completes_them(
    replies_file: Path, folder: Path, prompts: list[ReplyPrompt], tmp_path: Path
) -> None:
    file, content = tmp_path / "replies.jsonl", replies_file.read_bytes()
    file.write_bytes(content[: len(content) // 2])  # cut in the middle of a line
    sample(folder, prompts, file)
    assert read_replies(file) == read_replies(replies_file)


def test_two_processes_do_not_write_the_same_replies(
    replies_file: Path, folder: Path, prompts: list[ReplyPrompt], tmp_path: Path
) -> None:
    file = tmp_path / "replies.jsonl"
    file.write_bytes(replies_file.read_bytes())
    with FileLock(f"{file}.lock"):
        assert sample(folder, prompts, file)  # all replies exist, so nothing is written
        with pytest.raises(UsageError, match="another process"):
            sample(folder, [*prompts, prompts[0]], file)


# ---- stored hidden states -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(
    folder: Path, prompts: list[ReplyPrompt], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Generate replies and store the hidden states of three layers."""
    out = tmp_path_factory.mktemp("seen")
    sample(folder, prompts, out / "replies.jsonl", HiddenStateFiles(out, CAPTURED_LAYERS, 16))
    return out


def test_hidden_states_stored_with_replies_are_the_target_s(
    stored: Path, replies_file: Path, target: LlamaForCausalLM
) -> None:
    replies = load_replies(stored / "replies.jsonl")
    assert read_replies(stored / "replies.jsonl") == read_replies(replies_file)
    rows, best = HiddenStateFiles(stored, CAPTURED_LAYERS, 16).open_arrays()
    assert len(rows) == len(best) == sum(reply.size for reply in replies)
    for reply in replies:
        ids = torch.tensor([[*reply.prompt, *reply.answer]])
        read = run_target(target, ids, CAPTURED_LAYERS)
        true = torch.cat([read.features, read.normed], -1)[0, :-1]
        span = slice(
            reply.first_row, reply.first_row + reply.size - 1
        )  # the target does not process the last token
        torch.testing.assert_close(torch.tensor(rows[span]).float(), true, atol=1e-4, rtol=1e-3)
        two = target.lm_head(read.normed)[0, :-1].topk(2)
        clear = two.values[:, 0] - two.values[:, 1] > 1e-4
        assert torch.equal(torch.tensor(best[span])[clear], two.indices[:, 0].int()[clear])


@pytest.mark.parametrize("cut", [1, 2])
def test_resumed_replies_keep_their_hidden_states(
    cut: int, stored: Path, folder: Path, prompts: list[ReplyPrompt], tmp_path: Path
) -> None:
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    file, rows = tmp_path / "replies.jsonl", next(tmp_path.glob("*.f16"))
    file.write_bytes(file.read_bytes()[:-9])  # the last line is incomplete, its rows exist
    if cut == 2:  # rows are missing too
        rows.write_bytes(rows.read_bytes()[:5000])
    sample(folder, prompts, file, HiddenStateFiles(tmp_path, CAPTURED_LAYERS, 16))
    resumed_rows, stored_rows = (
        HiddenStateFiles(where, CAPTURED_LAYERS, 16).open_arrays()[0]
        for where in (tmp_path, stored)
    )
    pairs = zip(find_rows(tmp_path), find_rows(stored), strict=True)
    for (at, n), (stored_at, _) in pairs:
        row, stored_row = resumed_rows[at : at + n], stored_rows[stored_at : stored_at + n]
        torch.testing.assert_close(
            torch.tensor(row), torch.tensor(stored_row), atol=2e-3, rtol=2e-3
        )


@pytest.mark.parametrize("captured_layers", [(-1,), (1, 4, 7)])
def test_cached_hidden_states_give_the_target_output(
    captured_layers: tuple[int, ...],
    replies_file: Path,
    target: LlamaForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compute in fp32, so that only the file's rounding to fp16 differs."""
    monkeypatch.setattr(head_losses, "autocast", lambda _: nullcontext())
    replies, files = load_replies(replies_file), HiddenStateFiles(tmp_path, captured_layers, 16)
    CachedTargetOutput(files, target, captured_layers, replies[:3])
    file = next(tmp_path.glob("*.f16"))
    file.write_bytes(file.read_bytes()[:-7])  # as a killed run leaves it
    with files.lock(), pytest.raises(UsageError, match="another process"):
        CachedTargetOutput(
            HiddenStateFiles(tmp_path, captured_layers, 16), target, captured_layers, replies
        )
    cached, draft_ids = (
        CachedTargetOutput(files, target, captured_layers, replies),
        torch.arange(0, 280, 3),
    )
    source = head_trainer.Replies(END, lambda: [reply.encode() for reply in replies])
    batch = source.batch(2, 128)
    true = run_target(target, batch.inputs, captured_layers, batch.starts)
    read, real = cached.get_output(batch), batch.weights > 0
    torch.testing.assert_close(read.features[real], true.features[real], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(read.normed[real], true.normed[real], atol=2e-3, rtol=2e-3)
    cached_prediction, prediction = (
        cached.predict(batch, read.normed, draft_ids),
        predict_target(target, true.normed, draft_ids),
    )
    torch.testing.assert_close(
        cached_prediction.logits[real], prediction.logits[real], atol=5e-3, rtol=5e-3
    )
    assert torch.equal(cached_prediction.draftable[real], prediction.draftable[real])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_head_starts_as_the_linear_regression_of_the_next_hidden_state(
    kind: str, replies_file: Path, target: LlamaForCausalLM
) -> None:
    torch.manual_seed(0)
    target, norm = deepcopy(target), torch.rand(16) + 0.5
    target.model.norm.weight.copy_(norm)
    texts = []
    for reply in load_replies(replies_file):
        ids = torch.tensor([*reply.prompt, *reply.answer])
        rows = run_target(target, ids[None], (-1,)).normed[0]
        texts.append((ids, rows, rows))
    shape = HeadShape(16, 24, 2, 2, 8)
    head = get_head_classes()[kind](shape, {}, ("fc.bias",) if kind == "eagle" else ())
    head.init_weights(0.2)
    init_from_least_squares(head, target, texts)
    reads, next_rows = [], []
    for ids, rows, _ in texts:
        embedded = target.model.embed_tokens(ids[1:-1])
        reads.append(head.linear_input(embedded, rows[:-2]).double())
        next_rows.append(rows[1:-1].double())
    x, y = torch.cat(reads).numpy(), torch.cat(next_rows).numpy()
    ridge = numpy.sqrt(RIDGE * numpy.mean(numpy.diagonal(x.T @ x))) * numpy.eye(x.shape[1])
    none = numpy.zeros((x.shape[1], 16))
    found = numpy.linalg.lstsq(numpy.vstack([x, ridge]), numpy.vstack([y, none]))[0]
    foreseen = torch.tensor(x @ found).float()
    if kind == "mtp":  # an MTP head ends in a norm, so its rows have the norm of the target's
        inner = foreseen / norm
        foreseen = norm * inner * (inner.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    ids, rows, _ = texts[0]
    n = len(ids) - 2
    past = PastKeyValues(torch.ones(1, 1, n, n, dtype=torch.bool).tril())
    places = torch.arange(n)[None]
    embedded = target.model.embed_tokens(ids[None, 1:-1])
    out = head(HeadInput(embedded, rows[None, :-2], places, past, places))
    torch.testing.assert_close(out.normed[0], foreseen[:n], atol=2e-3, rtol=2e-3)


# ---- training -----------------------------------------------------------------------------------


def trainer(out: Path, folder: Path, kill_after: int | None = None) -> HeadTrainer:
    def report(_name: str, point: TrainingPoint) -> None:
        if point.step == kill_after:
            raise Killed

    return HeadTrainer(out, folder, PROBLEMS, 0, CPU, 16, n_held_out=4, report=report)


@pytest.fixture(scope="module")
def replies_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generate the replies that all of these trainings share."""
    out = tmp_path_factory.mktemp("answered")
    own_trainer = trainer(out, folder)
    assert own_trainer.make_replies()
    assert own_trainer.held_out
    return out


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "falcon", "chimera"])
def test_a_resumed_head_with_a_cut_vocabulary_equals_an_uninterrupted_one(
    kind: str, folder: Path, replies_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_trainer, "MEASURE_INTERVAL", 2)
    straight_dir, resumed_dir = tmp_path / "whole", tmp_path / "parts"
    for out in (straight_dir, resumed_dir):
        shutil.copytree(replies_folder, out)
    plan = trainer(straight_dir, folder).get_schedule(get_head_classes()[kind])
    stages = tuple(replace(stage, steps=4, sequences=1, length=400) for stage in plan.stages)
    assert isinstance(plan, HeadSchedule)
    plan = replace(plan, stages=stages, warmup_steps=1, draft_vocab_size=100)
    straight = trainer(straight_dir, folder).train(plan, "ttt")
    with pytest.raises(Killed):
        trainer(resumed_dir, folder, kill_after=3).train(plan, "ttt")
    resumed = trainer(resumed_dir, folder).train(plan, "ttt")
    assert (resumed.curve, resumed.mat) == (straight.curve, straight.mat)
    straight_weights, resumed_weights = (
        load_file(out / plan.name / "model.safetensors") for out in (straight_dir, resumed_dir)
    )
    assert all(
        torch.equal(straight_weights[name], resumed_weights[name]) for name in straight_weights
    )
    assert plan.name == f"tiny-{kind}"
    decoder = load_decoder(folder, name="target")
    decoding = (EagleHead, Eagle3Head, MtpHead, FalconHead, ChimeraHead)
    loads: Any = next(each for each in decoding if each.kind == kind)
    logits = loads.load(straight_dir / plan.name, {"target": decoder}).unembed(torch.ones(1, 16))
    assert logits.isfinite().sum() == len(straight_weights["d2t"]) == 100


def aligner(out: Path, folder: Path, kill_after: int | None = None) -> Aligner:
    base = trainer(out, folder, kill_after)
    settings = {each.name: getattr(base, each.name) for each in fields(base)}
    return Aligner(**settings, layers=3, begin="ends", vocabulary=100)


def test_a_resumed_layer_draft_with_a_cut_vocabulary_equals_an_uninterrupted_one(
    folder: Path, target: LlamaForCausalLM, replies_folder: Path, tmp_path: Path
) -> None:
    straight_dir, resumed_dir = tmp_path / "whole", tmp_path / "parts"
    for out in (straight_dir, resumed_dir):
        shutil.copytree(replies_folder, out)
    plan = make_alignment("kl", "kl", "target", 1.0, 4, aligner(straight_dir, folder).length)
    plan = replace(plan, stages=(replace(plan.stages[0], sequences=1, length=400),))
    straight = aligner(straight_dir, folder).align(plan)
    with pytest.raises(Killed):
        aligner(resumed_dir, folder, kill_after=3).align(plan)
    resumed = aligner(resumed_dir, folder).align(plan)
    assert (resumed.curve, resumed.mat) == (straight.curve, straight.mat)
    straight_weights, resumed_weights = (
        load_file(out / "kl" / "model.safetensors") for out in (straight_dir, resumed_dir)
    )
    assert all(
        torch.equal(straight_weights[name], resumed_weights[name]) for name in straight_weights
    )
    facts = json.loads((straight_dir / "kl" / "alignment.json").read_text())
    assert (facts["start"], facts["vocabulary"]) == ("layers 0, 1, 7 of the target", "100")
    # Embeddings and output rows of the target do not change. The layers are trained.
    target_weights, output_ids = target.state_dict(), torch.arange(100) + straight_weights["d2t"]
    assert torch.equal(
        straight_weights["model.embed_tokens.weight"],
        target_weights["model.embed_tokens.weight"].half(),
    )
    assert torch.equal(
        straight_weights["lm_head.weight"], target_weights["lm_head.weight"].half()[output_ids]
    )
    learnt, began = (
        each[f"model.layers.{at}.mlp.up_proj.weight"]
        for each, at in ((straight_weights, 2), (target_weights, 7))
    )
    assert 0 < (learnt - began).abs().max() < 0.1
    draft = load_decoder(straight_dir / "kl", name="draft")
    logits = draft.forward(Tokens(torch.tensor([[5, 6]])), draft.new_state(2)).logits
    assert logits is not None and logits.shape[-1] == target.config.vocab_size
    assert torch.equal(logits[0, 0].isfinite().nonzero()[:, 0], output_ids)
    assert draft.n_layers == 3
    # Further training freezes embeddings and output. Training from random weights freezes
    # nothing.
    assert facts["frozen"] == ["embeddings", "output"]
    further = replace(
        aligner(tmp_path / "further", folder),
        layers=0,
        vocabulary=None,
        draft=lambda: straight_dir / "kl",
    )
    stays = {
        name
        for name, each in further._make_initial_model().named_parameters()
        if not each.requires_grad
    }
    assert stays == {"model.embed_tokens.weight", "lm_head.weight"}
    assert further._freezes_embeddings and not replace(further, pretrain=1)._freezes_embeddings


def test_a_draft_of_all_layers_and_tokens_equals_the_target(
    folder: Path, replies_folder: Path
) -> None:
    whole_aligner = replace(aligner(replies_folder, folder), layers=8, vocabulary=None)
    estimate = whole_aligner._estimate(whole_aligner._make_initial_model(), 0)
    assert estimate.alpha == pytest.approx(1.0, abs=1e-4)
    cut = replace(whole_aligner, vocabulary=100)
    assert 0 < cut._estimate(cut._make_initial_model(), 0).alpha < estimate.alpha


def test_more_layers_than_the_target_has_are_refused(folder: Path, replies_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"a draft with 9 layers cannot be made from tiny.* has 8"):
        replace(aligner(replies_folder, folder), layers=9)._make_initial_model()


def test_a_target_without_a_draft_names_the_command_that_makes_one(
    folder: Path, replies_folder: Path
) -> None:
    with pytest.raises(UsageError, match="has no default draft model") as caught:
        replace(aligner(replies_folder, folder), layers=0)._make_initial_model()
    assert "--layers 2" in (caught.value.hint or "")


def test_a_target_of_another_kind_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "phi3"}))
    with pytest.raises(UsageError, match="this target is a phi3"):
        trainer(tmp_path / "out", other).get_schedule(get_head_classes()["eagle"])


def test_the_commands_train_heads_and_drafts_for_the_target(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbench_cli.training.replies.MAX_ANSWER", 4)
    options = ["--target", str(folder), "--out", str(tmp_path), "--smoke", "--device", "cpu"]
    cut = ["--layers", "2", "--begin", "last", "--vocabulary", "90"]
    for command in (["replies"], ["eagle"], ["draft", *cut]):
        done = CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert len(load_file(tmp_path / "seed-0" / "kl" / "model.safetensors")["d2t"]) == 90
    assert (tmp_path / "tiny-eagle" / "model.safetensors").is_file()
    assert (tmp_path / WORK / "replies.jsonl").is_file()
    assert "tiny-eagle" in json.loads((tmp_path / "training_curve.json").read_text())
