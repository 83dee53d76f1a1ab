"""Tests of `compare` on made-up sides: the outcome of each row with both gates applied."""

from dataclasses import replace

import pytest

from specbench_cli.comparison import compare as module
from specbench_cli.comparison.compare import compare
from specbench_cli.comparison.compared_output import Counters, PairKey, RowKey, Times
from specbench_cli.comparison.outcome import FAIL_ON, ComparisonFinding, TimeChange
from specbench_cli.errors import UsageError
from tests.comparison.sides import make_output, make_side_of

SPS = RowKey("mini", "sps")


def output(number, label="sps", task="mini", **changes):
    times = Times(1000, 300, 600, 100, 20, 150, 1100)
    return make_output(PairKey(f"{task}/{number}", 1, label, 1, 0), **({"times": times} | changes))


def side(*outputs, name="a", **changes):
    side_outputs = outputs or [output(n, label) for label in ("vanilla", "sps") for n in range(4)]
    values = {
        "created_utc": "2026-11-21T10:24:03Z",
        "facts": {"target": "embedded-7m aa", "verify": "greedy", "temperature": "0.0"},
        "machine": "m1",
        "noisy": True,
    }
    return make_side_of(side_outputs, name=name, **(values | changes))


def rows_of(base, new, **kwargs):
    found = compare(base, new, **{"tolerance": 0.05, "fail_on": FAIL_ON, **kwargs})
    return {row.key: row for row in found.rows}


def test_equal_sides_are_the_same_in_every_row_and_pass():
    found = compare(side(), side(name="b"), tolerance=0.05, fail_on=FAIL_ON)
    assert (found.base, found.new) == ("a", "b")
    assert [row.outcome for row in found.rows] == ["same", "same"]
    assert [row.pairs for row in found.rows] == [4, 4]
    assert not found.failed_rows
    assert found.rows[1].mat == (4.0, 4.0)


def test_a_row_that_only_one_side_has_is_missing_or_new():
    vanilla = [output(n, "vanilla") for n in range(4)]
    kwargs = [*vanilla, *(output(n) for n in range(4))]
    assert rows_of(side(*kwargs), side(*vanilla))[SPS].outcome == "missing"
    row = rows_of(side(*vanilla), side(*kwargs))[SPS]
    assert (row.outcome, row.pairs, row.rule) == ("new", 0, "nothing")


def test_a_new_row_that_is_broken_is_broken():
    vanilla = [output(n, "vanilla") for n in range(4)]
    bad = output(1, verdict="mismatch")
    row = rows_of(side(*vanilla), side(*vanilla, output(0), bad))[SPS]
    assert row.outcome == "broken"
    assert [found.outcome for found in row.findings] == ["broken", "new"]
    assert row.findings[0].message == "1 of 2 outputs broken only in NEW: 1 mismatch"


def test_only_outcomes_in_fail_on_fail_the_comparison():
    new = side(
        *(output(n, label) for label in ("vanilla", "sps") for n in range(3)), output(3, ids="f")
    )
    closed = compare(side(), new, tolerance=0.05, fail_on=FAIL_ON)
    assert [row.key for row in closed.failed_rows] == [SPS]
    assert not compare(side(), new, tolerance=0.05, fail_on=("mat",)).failed_rows


def test_a_changed_parameter_is_reported_as_the_likely_cause():
    slower_outputs = [
        output(n, counters=Counters(17, 16, 5, 20, 20, 16, 11, 6, 21)) for n in range(4)
    ]
    new = side(*(output(n, "vanilla") for n in range(4)), *slower_outputs)
    facts = replace(new.rows["sps"], params={"length": 4})
    base = side()
    base = replace(base, rows={**base.rows, "sps": replace(base.rows["sps"], params={"length": 5})})
    (found,) = rows_of(base, replace(new, rows={**new.rows, "sps": facts}))[SPS].findings
    assert found.outcome == "mat"
    assert found.message.endswith("; likely cause: parameters differ: length 5 -> 4")


def test_times_of_a_noisy_run_are_not_judged(monkeypatch):
    monkeypatch.setattr(module.timing, "estimate_changes", None)
    found = compare(side(), side(name="b"), tolerance=0.05, fail_on=FAIL_ON)
    assert found.timing.startswith("skipped: ")
    assert "noisy" in found.timing
    assert all(row.changes == () for row in found.rows)


def test_runs_without_usable_times_are_listed():
    warning = "times of 3 are left out: it is labelled noisy"
    base = replace(side(noisy=False), left_out=(warning,))
    found = compare(base, side(noisy=False, name="b"), tolerance=0.05, fail_on=FAIL_ON)
    assert warning in found.not_compared


def test_times_of_quiet_runs_on_one_machine_are_judged_by_the_timing_gate(monkeypatch):
    change = TimeChange(figure="decode", ratio=1.2, low=1.1, high=1.3, significant=True)
    tolerances = []

    def changes(scope, run, tolerance):
        tolerances.append(tolerance)
        return {SPS: (change,)}

    def findings(changes, tolerance):
        return (
            (ComparisonFinding(outcome="slower", message="decode 20% slower"),) if changes else ()
        )

    monkeypatch.setattr(module.timing, "estimate_changes", changes)
    monkeypatch.setattr(module.timing, "find_significant_changes", findings)
    found = compare(side(noisy=False), side(noisy=False, name="b"), tolerance=0.03, fail_on=FAIL_ON)
    assert found.timing.startswith("applied")
    assert tolerances == [0.03]
    assert {row.key.label: row.outcome for row in found.rows} == {
        "vanilla": "same",
        "sps": "slower",
    }
    assert found.rows[1].changes == (change,)


def sampled_side(name, machine, **changes):
    outputs = (output(n, "vanilla", sampling="rejection", verdict="unchecked") for n in range(4))
    return side(*(replace(one, **changes) for one in outputs), name=name, machine=machine)


def sampled_on_another_machine(name, **changes):
    side_outputs = sampled_side(name, "m2", **changes)
    return replace(side_outputs, facts={**side_outputs.facts, "machine": "another"})


def test_a_comparison_with_nothing_to_compare_is_an_error():
    here = sampled_side("a", "m1")
    here = replace(here, facts={**here.facts, "machine": "this one"})
    with pytest.raises(UsageError) as refused:
        rows_of(here, sampled_on_another_machine("b"))
    assert "nothing of a and b can be compared" in refused.value.message
    assert "this one -> another" in refused.value.message
    failed = sampled_on_another_machine("b", error="MethodFault: no", ids=None)
    (row,) = rows_of(here, failed).values()
    assert row.outcome == "broken"
