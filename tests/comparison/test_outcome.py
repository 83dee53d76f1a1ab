"""Tests of row outcomes and of `--fail-on`: which outcomes fail a comparison."""

import pytest

from specbench_cli.comparison.compared_output import RowKey
from specbench_cli.comparison.outcome import (
    FAIL_ON,
    OUTCOMES,
    Comparison,
    ComparisonFinding,
    RowOutcome,
    parse_fail_on,
    worst_outcome,
)
from specbench_cli.errors import UsageError


def found(*outcomes):
    return tuple(ComparisonFinding(outcome=outcome, message=outcome) for outcome in outcomes)


def row(*outcomes):
    findings = found(*outcomes)
    key = RowKey("mini", "sps")
    return RowOutcome(
        key=key,
        outcome=worst_outcome(findings),
        rule="exact",
        rule_reason="",
        pairs=1,
        findings=findings,
    )


def failed(fail_on, *outcomes):
    rows = (row(*outcomes),)
    return bool(Comparison(base="a", new="b", rows=rows, fail_on=fail_on).failed_rows)


def test_a_row_without_findings_has_the_outcome_same():
    assert worst_outcome(()) == "same"


def test_a_row_has_its_worst_outcome():
    assert worst_outcome(found("faster", "mat", "slower")) == "mat"
    assert worst_outcome(found(*reversed(OUTCOMES))) == "broken"


def test_any_finding_can_fail_a_row():
    assert failed(("slower",), "mat", "slower")
    assert not failed(("faster",), "mat", "slower")


def test_fail_on_none_never_fails():
    assert not failed(parse_fail_on("none"), "broken")


def test_by_default_only_worse_outcomes_fail():
    assert failed(FAIL_ON, "slower")
    assert not any(failed(FAIL_ON, outcome) for outcome in ("missing", "faster", "new"))


def test_fail_on_is_sorted_from_worst_to_best():
    assert parse_fail_on("slower, broken,") == ("broken", "slower")
    assert parse_fail_on(",".join(OUTCOMES[:-1])) == OUTCOMES[:-1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("slow", "did you mean 'slower'?"),
        ("same", "--fail-on 'same' must be some of broken, changed-output, mat"),
        ("none,broken", "--fail-on 'none' must be some of"),
        (" , ", "--fail-on is empty"),
    ],
)
def test_an_unknown_outcome_is_rejected_with_the_valid_ones(value, message):
    with pytest.raises(UsageError) as refused:
        parse_fail_on(value)
    assert message in refused.value.message
    assert refused.value.hint == "--fail-on broken,changed-output,mat,slower"
