"""Prompts that are decoded together: records as of each alone, and a time that they share."""

from __future__ import annotations

from specbench_cli.execute import passes


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
    monkeypatch.setattr(passes, "WAVES", 2)
    outcome = specbench(batch=2, limit=6, max_new_tokens=2)
    sizes = [record.batch.size for record in outcome.by_label("vanilla")]
    assert sorted(sizes) == [1, 2, 2, 4, 4, 4, 4]  # one question has a second turn
