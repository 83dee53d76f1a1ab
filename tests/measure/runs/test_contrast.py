"""Tests of `--contrast`: all methods give the outputs of contrastive decoding."""

from __future__ import annotations

import pytest
import torch

from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.verify.uscd import Contrast
from specbench_cli.errors import ExitCode, UsageError
from specbench_cli.models import resolve
from specbench_cli.report.report_data import read_report_data
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

CONTRAST = {"beta": 3.0, "keep": 0.1, "below": 1.0}
OFF = {"beta": 0.0, "floor": 0.0}


@pytest.mark.parametrize("rule", [{}, {"temperature": 0.8, "verify": "coupled"}])
def test_methods_give_the_ids_of_contrastive_vanilla(specbench, rule):
    plain = specbench(**rule)
    outcome = specbench("sps", "pld", contrast=CONTRAST, **rule)
    assert outcome.exit_code == ExitCode.OK
    assert {r.verdict.kind for r in outcome.records} == {"reference", "identical"}
    assert [r.output_ids for r in outcome.by_label("vanilla")] != [
        r.output_ids for r in plain.by_label("vanilla")
    ]


@pytest.mark.usefixtures("shipped_pair")
def test_trees_give_the_ids_of_contrastive_vanilla(specbench):
    outcome = specbench("eagle2", contrast=CONTRAST, limit=1)
    assert {r.verdict.kind for r in outcome.by_label("eagle2")} == {"identical"}


def test_vanilla_equals_contrastive_decoding_with_transformers(specbench):
    outcome = specbench(contrast=CONTRAST)
    checkpoint, contrast = resolve("embedded-7m"), Contrast(**CONTRAST)
    module = get_module(load_decoder(checkpoint.path, name="target"))
    prompt_ids = {prompt.prompt_id: prompt.ids for prompt in outcome.prompts}
    for record in outcome.by_label("vanilla"):
        prompt, found = list(prompt_ids[record.prompt_id]), []
        keep = max(1, round(CONTRAST["keep"] * (len(prompt) - 1)))
        for token in record.output_ids:
            with torch.no_grad():
                rows = [
                    module(input_ids=torch.tensor([[*start, *found]])).logits[:, -1]
                    for start in (prompt, [prompt[0], *prompt[-keep:]])
                ]
            found.append(int(contrast.apply(*rows).argmax()))
            assert found[-1] == token
        assert len(found) == 12 or record.finish == "eos"


def test_zero_contrast_doubles_the_forwards_and_changes_no_output(specbench):
    plain, off = specbench("sps"), specbench("sps", contrast=OFF)
    for plain_record, off_record in zip(plain.records, off.records, strict=True):
        assert off_record.output_ids == plain_record.output_ids
        assert off_record.steps == plain_record.steps
        assert off_record.target_forwards == 2 * plain_record.target_forwards
        assert off_record.draft_forwards == plain_record.draft_forwards


def test_a_batch_gives_the_same_contrastive_outputs(specbench):
    alone = specbench(contrast=CONTRAST, limit=3)
    batched = specbench("sps", contrast=CONTRAST, limit=3, batch=2)
    expected = {r.prompt_id: r.output_ids for r in alone.records}
    assert all(r.output_ids == expected[r.prompt_id] for r in batched.records)


def test_sampled_outputs_are_checked_by_the_contrastive_distribution(specbench):
    outcome = specbench("sps", temperature=1.0, contrast=CONTRAST)
    assert outcome.exit_code == ExitCode.OK
    assert all(r.likelihood is not None for r in outcome.records)


def test_manifest_and_header_have_the_contrast_settings(specbench):
    outcome = specbench(contrast=CONTRAST, limit=1)
    contrast = {**CONTRAST, "floor": 0.1}
    assert outcome.manifest["config"]["effective"]["contrast"] == contrast
    reading = read_report_data(RunDir.open(outcome.path))
    header = " ".join(reading.facts.header({"mini": 1}, 100))
    assert "contrast beta=3,keep=0.1,below=1,floor=0.1" in header


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("hf:vanilla", "hf:vanilla is a method of another program"),
        (
            {"name": "medusa", "label": "lossy", "params": {"accept": "typical"}},
            "lossy is lossy, and may accept tokens",
        ),
    ],
)
def test_a_method_that_cannot_be_contrasted_is_rejected(specbench, row, message):
    with pytest.raises(UsageError, match=message) as caught:
        specbench(row, contrast=CONTRAST)
    assert "omit --contrast" in caught.value.hint
