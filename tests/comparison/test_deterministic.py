"""Tests of the deterministic gate on made-up outputs: which change each rule finds."""

from dataclasses import replace

import pytest

from specbench_cli.comparison.compared_output import Counters, PairKey, RowKey
from specbench_cli.comparison.deterministic import compare_outputs, mean_accepted_tokens
from specbench_cli.comparison.scope import Scope
from tests.comparison.sides import make_output

SPS = RowKey("mini", "sps")
COUNTERS = Counters(
    n_tokens=17,
    committed=16,
    steps=4,
    levels=16,
    nodes=16,
    tested=15,
    accepted=12,
    target_forwards=5,
    draft_forwards=17,
)


def output(number=0, turn=1, pass_=1, *, counters=None, **changes):
    key = PairKey(f"mini/qa-{number}", turn, "sps", pass_, 0)
    return make_output(key, counters=replace(COUNTERS, **(counters or {})), **changes)


def failed(number=0, error="MethodFault: too many tokens"):
    no_counters = Counters(*[None] * 9)
    output_without_error = output(number, ids=None, verdict=None, error=error, finish="error")
    return replace(output_without_error, counters=no_counters)


def scope(pairs, rule, *, same_machine=True):
    """Return a scope in which the row `sps` has these pairs and this rule."""
    return Scope(
        pairs={SPS: tuple(pairs)},
        missing=(),
        new=(),
        rules={SPS: (rule, "why")},
        timing="not asked",
        not_compared=(),
        causes={},
        rounding_difference=None if same_machine else "machine a -> b",
    )


def find_changes(pairs, rule="exact", **kwargs):
    return compare_outputs(scope(pairs, rule, **kwargs))[SPS]


def outcomes(pairs, rule="exact", **kwargs):
    return [found.outcome for found in find_changes(pairs, rule, **kwargs)]


RULES = ("exact", "verdict", "ids only", "nothing")


@pytest.mark.parametrize("rule", RULES)
def test_equal_outputs_with_equal_counters_have_no_findings(rule):
    assert outcomes([(output(n), output(n)) for n in range(3)], rule) == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("new", [failed(), output(verdict="mismatch", ids="f" * 16)])
def test_output_that_fails_only_in_new_is_broken_under_every_rule(rule, new):
    assert outcomes([(output(), new)], rule, same_machine=rule == "exact") == ["broken"]
    bad_before = [(new, new)]
    assert outcomes(bad_before, rule) == []


def test_broken_outputs_are_counted_by_kind_and_located():
    pairs = [(output(n), failed(n)) for n in range(2)]
    pairs += [(output(2), output(2, verdict="mismatch")), (output(3), output(3))]
    (found,) = find_changes(pairs)
    assert found.message == (
        "3 of 4 outputs broken only in NEW: 2 error: MethodFault: too many tokens; 1 mismatch"
    )
    assert found.locations == ("mini/qa-0 turn 1", "mini/qa-1 turn 1", "mini/qa-2 turn 1")


def test_different_ids_are_a_changed_output_even_if_both_verdicts_are_good():
    pairs = [(output(0), output(0)), (output(1, turn=2), output(1, turn=2, ids="f" * 16))]
    (found,) = find_changes(pairs)
    assert (found.outcome, found.message) == ("changed-output", "1 of 2 outputs changed")
    assert found.locations == ("mini/qa-1 turn 2",)


def test_an_output_with_another_finish_reason_is_changed():
    assert outcomes([(output(), output(finish="stop"))]) == ["changed-output"]


@pytest.mark.parametrize("old", [failed(), output(verdict="mismatch", ids="f" * 16)])
def test_an_output_that_failed_only_in_base_is_a_changed_output(old):
    (found,) = find_changes([(old, output())])
    assert found.outcome == "changed-output"
    assert "1 of them errors or mismatches in BASE" in found.message


def test_counters_of_a_changed_output_add_no_finding():
    other = output(ids="f" * 16, counters={"steps": 5, "accepted": 11})
    assert outcomes([(output(), other)]) == ["changed-output"]


def test_several_kinds_of_change_in_one_row_are_all_found():
    pairs = [(output(0), failed(0)), (output(1), output(1, ids="f" * 16))]
    pairs += [(output(2), output(2, counters={"nodes": 15}))]
    assert outcomes(pairs) == ["broken", "changed-output", "mat"]


@pytest.mark.parametrize("name", list(COUNTERS.__dataclass_fields__))
def test_every_counter_must_be_exact_on_the_same_machine(name):
    for by in (1, -1):
        other = output(counters={name: getattr(COUNTERS, name) + by})
        assert outcomes([(output(), other)]) == ["mat"]
    assert outcomes([(output(), output(counters={name: None}))]) == ["mat"]


def test_changed_counters_are_reported_as_sums_with_mat_first():
    pairs = [(output(n), output(n)) for n in range(300)]
    pairs[7] = (output(7), output(7, counters={"steps": 5, "nodes": 14, "draft_forwards": None}))
    (found,) = find_changes(pairs)
    assert found.message == (
        "counters of 1 of 300 outputs differ: MAT 4.000 -> 3.997; steps 1,200 -> 1,201;"
        " nodes 4,800 -> 4,798; draft forwards 5,100 -> none"
    )
    assert found.locations == ("mini/qa-7 turn 1",)


def test_counters_with_equal_sums_are_reported_for_the_first_output():
    more, fewer = output(0, counters={"nodes": 17}), output(1, counters={"nodes": 15})
    (found,) = find_changes([(output(0), more), (output(1), fewer)])
    assert found.message == (
        "counters of 2 of 2 outputs differ: their sums do not, at mini/qa-0 turn 1 nodes 16 -> 17"
    )


def test_on_another_machine_other_ids_with_a_good_verdict_are_no_finding():
    for verdict in ("identical", "near-tie", "reference", "unchecked"):
        new = output(ids="f" * 16, verdict=verdict)
        assert outcomes([(output(), new)], "verdict", same_machine=False) == []
        assert outcomes([(output(), new)], "ids only", same_machine=False) == []


def pairs_with_other_steps(n, total, turns=1):
    """Return pairs of `total` prompts. The counters of the first `n` prompts differ."""
    return [
        (output(i, turn), output(i, turn, counters={"steps": 5 if i < n else 4}))
        for i in range(total)
        for turn in range(1, turns + 1)
    ]


@pytest.mark.parametrize(("allowed", "total"), [(1, 1), (1, 99), (1, 199), (2, 200), (3, 399)])
def test_on_another_machine_counters_may_differ_at_1_percent_of_prompts_or_at_one(allowed, total):
    assert outcomes(pairs_with_other_steps(allowed, total), "verdict", same_machine=False) == []
    if allowed < total:
        assert outcomes(
            pairs_with_other_steps(allowed + 1, total), "verdict", same_machine=False
        ) == ["mat"]


def test_a_prompt_with_several_turns_counts_once():
    assert outcomes(pairs_with_other_steps(1, 10, turns=2), "verdict", same_machine=False) == []
    (found,) = find_changes(pairs_with_other_steps(2, 10, turns=2), "verdict", same_machine=False)
    assert found.message.startswith("counters at 2 of 10 prompts differ, 1 may: MAT 4.00 -> 3.81")
    assert len(found.locations) == 4


def test_steps_that_depend_on_timing_may_differ_but_the_ids_may_not():
    pairs = [(output(), output(counters={"steps": 9, "draft_forwards": 40}))]
    assert outcomes(pairs, "ids only") == []
    assert outcomes([(output(), output(ids="f" * 16))], "ids only") == ["changed-output"]


def test_a_near_tie_of_a_method_whose_steps_depend_on_timing_is_no_change():
    for pair in ((output(), output(ids="f" * 16, verdict="near-tie")),):
        assert outcomes([pair], "ids only") == []
        assert outcomes([pair[::-1]], "ids only") == []
        assert outcomes([pair], "exact") == ["changed-output"]


def test_mat_uses_only_outputs_that_succeeded_on_both_sides():
    pairs = [(output(0), output(0, counters={"steps": 8})), (output(1), failed(1))]
    assert mean_accepted_tokens(pairs) == (4.0, 2.0)
    assert mean_accepted_tokens([(output(), failed())]) == (None, None)


def test_a_location_is_listed_once_even_if_several_passes_differ():
    pairs = [(output(pass_=n), output(pass_=n, counters={"nodes": 15})) for n in (1, 2)]
    (found,) = find_changes(pairs)
    assert found.locations == ("mini/qa-0 turn 1",)
