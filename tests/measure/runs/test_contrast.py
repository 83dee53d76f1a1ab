"""`--contrast`: outputs of the contrasted target, the same for all methods, and counted."""

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

ASKED = {"beta": 3.0, "keep": 0.1, "below": 1.0}
OFF = {"beta": 0.0, "floor": 0.0}


@pytest.mark.parametrize("rule", [{}, {"temperature": 0.8, "verify": "coupled"}])
def test_methods_give_contrasted_vanillas_ids(specbench, rule):
    plain = specbench(**rule)
    outcome = specbench("sps", "pld", contrast=ASKED, **rule)
    assert outcome.exit_code == ExitCode.OK
    assert {r.verdict.kind for r in outcome.records} == {"reference", "identical"}
    assert [r.output_ids for r in outcome.by_label("vanilla")] != [
        r.output_ids for r in plain.by_label("vanilla")
    ]


@pytest.mark.usefixtures("shipped_pair")
def test_trees_too(specbench):
    outcome = specbench("eagle2", contrast=ASKED, limit=1)
    assert {r.verdict.kind for r in outcome.by_label("eagle2")} == {"identical"}


def test_vanilla_is_the_contrast_in_a_loop_of_transformers(specbench):
    outcome = specbench(contrast=ASKED)
    checkpoint, contrast = resolve("embedded-7m"), Contrast(**ASKED)
    module = get_module(load_decoder(checkpoint.path, name="target"))
    asked = {prompt.prompt_id: prompt.ids for prompt in outcome.prompts}
    for record in outcome.by_label("vanilla"):
        prompt, found = list(asked[record.prompt_id]), []
        keep = max(1, round(ASKED["keep"] * (len(prompt) - 1)))
        for token in record.output_ids:
            with torch.no_grad():
                rows = [
                    module(input_ids=torch.tensor([[*start, *found]])).logits[:, -1]
                    for start in (prompt, [prompt[0], *prompt[-keep:]])
                ]
            found.append(int(contrast.apply(*rows).argmax()))
            assert found[-1] == token
        assert len(found) == 12 or record.finish == "eos"


def test_it_reads_twice_and_switched_off_it_says_what_plain_decoding_says(specbench):
    plain, off = specbench("sps"), specbench("sps", contrast=OFF)
    for was, now in zip(plain.records, off.records, strict=True):
        assert now.output_ids == was.output_ids
        assert now.steps == was.steps
        assert now.target_forwards == 2 * was.target_forwards
        assert now.draft_forwards == was.draft_forwards


def test_a_batch_is_contrasted_as_vanilla_alone_is(specbench):
    alone = specbench(contrast=ASKED, limit=3)
    together = specbench("sps", contrast=ASKED, limit=3, batch=2)
    due = {r.prompt_id: r.output_ids for r in alone.records}
    assert all(r.output_ids == due[r.prompt_id] for r in together.records)


def test_drawn_outputs_are_judged_by_the_contrasted_distribution(specbench):
    outcome = specbench("sps", temperature=1.0, contrast=ASKED)
    assert outcome.exit_code == ExitCode.OK
    assert all(r.likelihood is not None for r in outcome.records)


def test_the_manifest_has_all_of_it_and_the_header_says_so(specbench):
    outcome = specbench(contrast=ASKED, limit=1)
    held = {**ASKED, "floor": 0.1}
    assert outcome.manifest["config"]["effective"]["contrast"] == held
    reading = read_report_data(RunDir.open(outcome.path))
    header = " ".join(reading.facts.header({"mini": 1}, 100))
    assert "contrast beta=3,keep=0.1,below=1,floor=0.1" in header


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("hf:vanilla", "hf:vanilla is a method of another program"),
        (
            {"name": "medusa", "label": "lossy", "params": {"accept": "typical"}},
            "lossy is lossy, and lets tokens stand",
        ),
    ],
)
def test_a_row_that_nothing_holds_to_it_is_refused_before_the_run(specbench, row, says):
    with pytest.raises(UsageError, match=says) as caught:
        specbench(row, contrast=ASKED)
    assert "omit --contrast" in caught.value.hint
