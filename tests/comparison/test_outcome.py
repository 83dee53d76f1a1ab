"""What became of a row, and whether that closes the gate."""

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


def test_a_row_without_findings_is_the_same():
    assert worst_outcome(()) == "same"


def test_a_row_has_its_worst_outcome():
    assert worst_outcome(found("faster", "mat", "slower")) == "mat"
    assert worst_outcome(found(*reversed(OUTCOMES))) == "broken"


def test_a_row_fails_by_any_of_its_findings_not_by_its_worst_alone():
    assert failed(("slower",), "mat", "slower")
    assert not failed(("faster",), "mat", "slower")


def test_nothing_closes_a_gate_of_none():
    assert not failed(parse_fail_on("none"), "broken")


def test_by_default_what_got_worse_closes_the_gate():
    assert failed(FAIL_ON, "slower")
    assert not any(failed(FAIL_ON, outcome) for outcome in ("missing", "faster", "new"))


def test_a_gate_is_named_by_its_outcomes_worst_first():
    assert parse_fail_on("slower, broken,") == ("broken", "slower")
    assert parse_fail_on(",".join(OUTCOMES[:-1])) == OUTCOMES[:-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("slow", "did you mean 'slower'?"),
        ("same", "--fail-on 'same' must be some of broken, changed-output, mat"),
        ("none,broken", "--fail-on 'none' must be some of"),
        (" , ", "--fail-on is empty"),
    ],
)
def test_a_word_that_is_no_outcome_is_refused_with_those_there_are(words, says):
    with pytest.raises(UsageError) as refused:
        parse_fail_on(words)
    assert says in refused.value.message
    assert refused.value.hint == "--fail-on broken,changed-output,mat,slower"
