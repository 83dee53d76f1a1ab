"""Tests of batches and of `--load`: records equal those of single prompts and share a time."""

from __future__ import annotations

import pytest

from specbench_cli.errors import UsageError
from specbench_cli.measure.view import PromptProgress
from specbench_cli.plan import plan
from specbench_cli.report.outputs import write_outputs
from specbench_cli.report.report_data import read_runs
from specbench_cli.report.terminal.table import load_lines
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.load import load_rows, saturation_notes
from specbench_cli.summary.pairing import process_number

pytestmark = pytest.mark.usefixtures("small_pair")


def test_prompts_join_a_full_batch_when_others_finish(specbench):
    outcome = specbench("eqspec", batch=2, limit=5, max_new_tokens=8)
    assert outcome.exit_code == 0
    for label in ("vanilla", "eqspec"):
        records = outcome.by_label(label)
        assert sorted(record.batch.place for record in records) == list(range(5))
        assert {(record.batch.size, record.batch.at_once) for record in records} == {(5, 2)}
        assert {record.verdict.kind for record in records} <= {"reference", "identical"}
        assert sum(record.ns.total for record in records) <= records[0].batch.total
        for record in records:  # a prefill, then one forward per step
            assert record.target_forwards == 1 + len(record.steps.levels)
        finish_times = [record.batch.finished for record in records]
        assert len(set(finish_times)) == 5 and max(finish_times) <= records[0].batch.total
    extras = [record.extra for record in outcome.by_label("eqspec")]
    assert all(extra.keys() == {"realigned_rows"} for extra in extras)


def test_a_prompt_that_joins_has_a_chunked_prefill(specbench):
    whole = specbench("eqspec", batch=2, limit=5, max_new_tokens=12)
    parts = specbench("eqspec", batch=2, limit=5, max_new_tokens=12, prefill_chunk=16)
    assert parts.exit_code == 0
    lengths = {(p.prompt_id, p.turn): len(p.ids) for p in RunDir.open(parts.path).prompts()}
    several = 0
    for label in ("vanilla", "eqspec"):
        for record, whole_record in zip(parts.by_label(label), whole.by_label(label), strict=True):
            assert (record.output_ids, record.steps) == (
                whole_record.output_ids,
                whole_record.steps,
            )
            kinds = [(kind.model, kind.role) for kind in record.forwards.kinds]
            prompt_forwards = zip(
                map(kinds.__getitem__, record.forwards.kind), record.forwards.n_tokens, strict=True
            )
            read = [n for kind, n in prompt_forwards if kind == ("target", "prefill")]
            assert sum(read) == lengths[record.prompt_id, record.turn]
            assert record.target_forwards == len(read) + len(record.steps.levels)
            assert 0 < record.ns.prefill < record.ns.total
            several += len(read) > 1
            assert (
                max(read[:-1], default=0) <= 16
            )  # the last part is whole if the other prompt has ended
    assert several


def test_prompts_are_measured_in_groups_of_a_few_batches(specbench, monkeypatch):
    monkeypatch.setattr(plan, "PROMPTS_PER_SLOT", 2)
    outcome = specbench(batch=2, limit=6, max_new_tokens=2)
    sizes = [record.batch.size for record in outcome.by_label("vanilla")]
    assert sorted(sizes) == [1, 2, 2, 4, 4, 4, 4]  # one question has a second turn


def test_requests_join_only_after_they_arrive(specbench):
    outcome = specbench("eqspec", batch=2, limit=4, max_new_tokens=6, load="burst:2:0.4")
    assert outcome.exit_code == 0
    for label in ("vanilla", "eqspec"):
        records = sorted(outcome.by_label(label), key=lambda record: record.batch.place)
        batches = [record.batch for record in records]
        assert [batch.arrived for batch in batches] == [0, 0, 400_000_000, 400_000_000]
        assert all(batch.arrived < batch.first <= batch.finished for batch in batches)
        assert {record.verdict.kind for record in records} <= {"reference", "identical"}
        assert {record.turn for record in records} == {1}
    plain, _ = load_rows(outcome.records)
    assert (plain.label, plain.requests, plain.offered_rate) == ("vanilla", 4, 3 / 0.4)
    counts = [r.n_tokens for r in outcome.by_label("vanilla")]
    assert (plain.load, plain.tokens[0].tolist()) == ("burst:2:0.4", counts)
    text = "\n".join(line.plain for line in load_lines(load_rows(outcome.records)))
    assert "    7.5 " in text and "eqspec" in text


def test_each_of_several_rates_is_a_pass_of_one_process(specbench):
    outcome = specbench(batch=2, limit=3, max_new_tokens=3, load="poisson:40,80")
    assert outcome.exit_code == 0
    assert (outcome.log.total, len(outcome.records)) == (6, 6)
    by_load = {record.batch.load: record.pass_ for record in outcome.records}
    assert by_load == {"poisson:40": 1, "poisson:80": 1001}
    assert {process_number(number) for number in by_load.values()} == {1}
    slow, fast = load_rows(outcome.records)
    assert fast.offered_rate == pytest.approx(2 * slow.offered_rate)
    parts = [each.part for each in outcome.log.events if isinstance(each, PromptProgress)]
    assert dict.fromkeys(parts) == dict.fromkeys(["load poisson:40", "load poisson:80"])
    reading = write_outputs(RunDir.open(outcome.path))
    assert reading.summary.passes == 1
    assert "poisson:80" in (outcome.path / "figures" / "load.csv").read_text()


def test_missing_outputs_are_measured_under_the_whole_load_after_resuming(specbench):
    settings = {"batch": 2, "limit": 4, "max_new_tokens": 6, "load": "burst:2:0.2"}
    with pytest.raises(KeyboardInterrupt):
        specbench("eqspec", log=specbench.log(interrupt_after=3), **settings)
    before = list(RunDir.open(specbench.path(1)).records())
    assert 0 < len(before) < 8
    outcome = specbench(resume=specbench.path(1))
    assert outcome.exit_code == 0
    assert {record.key: record.batch for record in before}.items() <= {
        record.key: record.batch for record in outcome.records
    }.items()
    for label in ("vanilla", "eqspec"):
        batches = [record.batch for record in outcome.by_label(label)]
        loads_seen = sorted((batch.place, batch.size, batch.arrived) for batch in batches)
        assert loads_seen == [(0, 4, 0), (1, 4, 0), (2, 4, 200_000_000), (3, 4, 200_000_000)]


def test_a_load_sweep_and_other_runs_are_combined(specbench):
    settings = {"batch": 2, "limit": 3, "max_new_tokens": 3}
    loads = ("poisson:40,80", "poisson:20", "poisson:80")
    runs = [RunDir.open(specbench(load=load, **settings).path) for load in loads]
    found = read_runs(runs)
    rows = load_rows(found.records)
    loads_seen = [(row.label, row.load, row.requests, len(row.ttft)) for row in rows]
    assert loads_seen == [
        ("vanilla", "poisson:20", 3, 1),
        ("vanilla", "poisson:40", 3, 1),
        ("vanilla", "poisson:80", 6, 2),  # of two runs, each with its own queue
    ]
    alone = load_rows(list(runs[1].records()))[0]
    assert rows[0].figures == alone.figures
    assert found.facts.runs == 3 and not found.facts.forced
    assert found.facts.load == "poisson:40,80 | poisson:20 | poisson:80"
    assert len(saturation_notes(rows)) == 1


@pytest.mark.parametrize(("load", "why"), [("poisson:x", "RATE must be"), ("trace:a", "read")])
def test_an_invalid_load_is_rejected(specbench, load, why):
    with pytest.raises(ValueError, match=why):
        specbench(load=load)


def test_load_is_rejected_for_a_method_without_batches(specbench):
    with pytest.raises(UsageError, match="pearl decodes one prompt at a time, and --load"):
        specbench("pearl", load="poisson:1")
