"""Prompts that are decoded together: records as of each alone, and a time that they share."""

from __future__ import annotations

import pytest

from specbench_cli.errors import UsageError
from specbench_cli.execute.planning import plan
from specbench_cli.execute.view import Progress
from specbench_cli.report.load import load_lines, load_rows
from specbench_cli.report.numbers.pairing import process
from specbench_cli.report.outputs import write_outputs
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")


def test_more_prompts_than_a_batch_holds_join_as_others_leave(specbench):
    outcome = specbench("eqspec", batch=2, limit=5, max_new_tokens=8)
    assert outcome.exit_code == 0
    for label in ("vanilla", "eqspec"):
        records = outcome.by_label(label)
        assert sorted(record.batch.place for record in records) == list(range(5))
        assert {(record.batch.size, record.batch.at_once) for record in records} == {(5, 2)}
        assert {record.verdict.kind for record in records} <= {"reference", "identical"}
        assert sum(record.ns.total for record in records) <= records[0].batch.total
        for record in records:  # its own forwards: a prefill, then one a step
            assert record.target_forwards == 1 + len(record.steps.levels)
        ended = [record.batch.finished for record in records]
        assert len(set(ended)) == 5 and max(ended) <= records[0].batch.total
    counted = [record.extra for record in outcome.by_label("eqspec")]
    assert all(extra.keys() == {"realigned_rows"} for extra in counted)


def test_a_run_deals_its_prompts_in_groups_of_a_few_batches(specbench, monkeypatch):
    monkeypatch.setattr(plan, "WAVES", 2)
    outcome = specbench(batch=2, limit=6, max_new_tokens=2)
    sizes = [record.batch.size for record in outcome.by_label("vanilla")]
    assert sorted(sizes) == [1, 2, 2, 4, 4, 4, 4]  # one question has a second turn


def test_requests_join_no_sooner_than_they_arrive(specbench):
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
    assert (plain.label, plain.requests, plain.offered) == ("vanilla", 4, 3 / 0.4)
    counts = [r.n_tokens for r in outcome.by_label("vanilla")]
    assert (plain.load, plain.tokens[0].tolist()) == ("burst:2:0.4", counts)
    text = "\n".join(load_lines(outcome.records))
    assert "    7.5 " in text and "eqspec" in text


def test_several_rates_are_a_pass_each_of_one_process(specbench):
    outcome = specbench(batch=2, limit=3, max_new_tokens=3, load="poisson:40,80")
    assert outcome.exit_code == 0
    assert (outcome.log.total, len(outcome.records)) == (6, 6)
    by_load = {record.batch.load: record.pass_ for record in outcome.records}
    assert by_load == {"poisson:40": 1, "poisson:80": 1001}
    assert {process(number) for number in by_load.values()} == {1}
    slow, fast = load_rows(outcome.records)
    assert fast.offered == pytest.approx(2 * slow.offered)
    parts = [each.part for each in outcome.log.said if isinstance(each, Progress)]
    assert dict.fromkeys(parts) == dict.fromkeys(["load poisson:40", "load poisson:80"])
    reading = write_outputs(RunDir.open(outcome.path))
    assert reading.summary.passes == 1
    assert "poisson:80" in (outcome.path / "figures" / "load.csv").read_text()


@pytest.mark.parametrize(("load", "why"), [("poisson:x", "RATE must be"), ("trace:a", "read")])
def test_a_load_that_makes_no_sense_is_refused(specbench, load, why):
    with pytest.raises(ValueError, match=why):
        specbench(load=load)


def test_a_method_that_decodes_alone_has_no_load(specbench):
    with pytest.raises(UsageError, match="pearl decodes one prompt at a time, and --load"):
        specbench("pearl", load="poisson:1")
