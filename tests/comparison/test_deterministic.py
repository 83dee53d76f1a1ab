"""The deterministic gate on made-up cells: which change is found under which rule."""

from dataclasses import replace

import pytest

from specbench_cli.comparison.compared_output import Counters, PairKey, RowKey
from specbench_cli.comparison.deterministic import compare_outputs, mean_accepted_tokens
from specbench_cli.comparison.scope import Scope
from tests.comparison.sides import cell_of

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


def cell(number=0, turn=1, pass_=1, *, counters=None, **changes):
    key = PairKey(f"mini/qa-{number}", turn, "sps", pass_, 0)
    return cell_of(key, counters=replace(COUNTERS, **(counters or {})), **changes)


def failed(number=0, error="MethodFault: too many tokens"):
    nothing = Counters(*[None] * 9)
    made = cell(number, ids=None, verdict=None, error=error, finish="error")
    return replace(made, counters=nothing)


def scope(pairs, rule, *, same_machine=True):
    """A row's pairs under a rule."""
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


def judged(pairs, rule="exact", **how):
    return compare_outputs(scope(pairs, rule, **how))[SPS]


def outcomes(pairs, rule="exact", **how):
    return [found.outcome for found in judged(pairs, rule, **how)]


RULES = ("exact", "verdict", "ids only", "nothing")


@pytest.mark.parametrize("rule", RULES)
def test_equal_outputs_with_equal_counters_are_no_finding(rule):
    assert outcomes([(cell(n), cell(n)) for n in range(3)], rule) == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("new", [failed(), cell(verdict="mismatch", ids="f" * 16)])
def test_what_fails_in_new_alone_is_broken_under_every_rule(rule, new):
    assert outcomes([(cell(), new)], rule, same_machine=rule == "exact") == ["broken"]
    bad_before = [(new, new)]
    assert outcomes(bad_before, rule) == []


def test_broken_outputs_are_counted_by_what_they_are_and_named():
    pairs = [(cell(n), failed(n)) for n in range(2)]
    pairs += [(cell(2), cell(2, verdict="mismatch")), (cell(3), cell(3))]
    (found,) = judged(pairs)
    assert found.message == (
        "3 of 4 outputs broken only in NEW: 2 error: MethodFault: too many tokens; 1 mismatch"
    )
    assert found.locations == ("mini/qa-0 turn 1", "mini/qa-1 turn 1", "mini/qa-2 turn 1")


def test_other_ids_are_a_changed_output_however_good_both_verdicts():
    pairs = [(cell(0), cell(0)), (cell(1, turn=2), cell(1, turn=2, ids="f" * 16))]
    (found,) = judged(pairs)
    assert (found.outcome, found.message) == ("changed-output", "1 of 2 outputs changed")
    assert found.locations == ("mini/qa-1 turn 2",)


def test_an_output_that_ends_by_another_rule_is_changed():
    assert outcomes([(cell(), cell(finish="stop"))]) == ["changed-output"]


@pytest.mark.parametrize("old", [failed(), cell(verdict="mismatch", ids="f" * 16)])
def test_a_mended_output_is_a_change_to_accept(old):
    (found,) = judged([(old, cell())])
    assert found.outcome == "changed-output"
    assert "1 of them errors or mismatches in BASE" in found.message


def test_counters_of_a_changed_output_say_nothing_more():
    other = cell(ids="f" * 16, counters={"steps": 5, "accepted": 11})
    assert outcomes([(cell(), other)]) == ["changed-output"]


def test_both_kinds_of_change_in_one_row_are_both_found():
    pairs = [(cell(0), failed(0)), (cell(1), cell(1, ids="f" * 16))]
    pairs += [(cell(2), cell(2, counters={"nodes": 15}))]
    assert outcomes(pairs) == ["broken", "changed-output", "mat"]


@pytest.mark.parametrize("name", list(COUNTERS.__dataclass_fields__))
def test_every_counter_must_be_exact_on_the_same_machine(name):
    for by in (1, -1):
        other = cell(counters={name: getattr(COUNTERS, name) + by})
        assert outcomes([(cell(), other)]) == ["mat"]
    assert outcomes([(cell(), cell(counters={name: None}))]) == ["mat"]


def test_changed_counters_are_told_as_sums_from_and_to_with_mat_first():
    pairs = [(cell(n), cell(n)) for n in range(300)]
    pairs[7] = (cell(7), cell(7, counters={"steps": 5, "nodes": 14, "draft_forwards": None}))
    (found,) = judged(pairs)
    assert found.message == (
        "counters of 1 of 300 outputs differ: MAT 4.000 -> 3.997; steps 1,200 -> 1,201;"
        " nodes 4,800 -> 4,798; draft forwards 5,100 -> none"
    )
    assert found.locations == ("mini/qa-7 turn 1",)


def test_counters_that_differ_with_equal_sums_are_told_of_the_first_output():
    more, fewer = cell(0, counters={"nodes": 17}), cell(1, counters={"nodes": 15})
    (found,) = judged([(cell(0), more), (cell(1), fewer)])
    assert found.message == (
        "counters of 2 of 2 outputs differ: their sums do not, at mini/qa-0 turn 1 nodes 16 -> 17"
    )


def test_elsewhere_other_ids_are_no_finding_while_new_s_own_verdict_holds():
    for verdict in ("identical", "near-tie", "reference", "unchecked"):
        new = cell(ids="f" * 16, verdict=verdict)
        assert outcomes([(cell(), new)], "verdict", same_machine=False) == []
        assert outcomes([(cell(), new)], "ids only", same_machine=False) == []


def strayed(n, of, turns=1):
    """Pairs of `of` prompts, the first `n` of which have other counters."""
    return [
        (cell(i, turn), cell(i, turn, counters={"steps": 5 if i < n else 4}))
        for i in range(of)
        for turn in range(1, turns + 1)
    ]


@pytest.mark.parametrize(("allowed", "of"), [(1, 1), (1, 99), (1, 199), (2, 200), (3, 399)])
def test_elsewhere_counters_may_differ_at_a_hundredth_of_the_prompts_and_at_one_always(allowed, of):
    assert outcomes(strayed(allowed, of), "verdict", same_machine=False) == []
    if allowed < of:
        assert outcomes(strayed(allowed + 1, of), "verdict", same_machine=False) == ["mat"]


def test_prompts_are_counted_once_whatever_their_turns_and_passes():
    assert outcomes(strayed(1, 10, turns=2), "verdict", same_machine=False) == []
    (found,) = judged(strayed(2, 10, turns=2), "verdict", same_machine=False)
    assert found.message.startswith("counters at 2 of 10 prompts differ, 1 may: MAT 4.00 -> 3.81")
    assert len(found.locations) == 4


def test_steps_that_depend_on_timing_may_be_others_and_the_ids_may_not():
    pairs = [(cell(), cell(counters={"steps": 9, "draft_forwards": 40}))]
    assert outcomes(pairs, "ids only") == []
    assert outcomes([(cell(), cell(ids="f" * 16))], "ids only") == ["changed-output"]


def test_a_near_tie_of_a_row_whose_steps_depend_on_timing_is_no_change():
    for pair in ((cell(), cell(ids="f" * 16, verdict="near-tie")),):
        assert outcomes([pair], "ids only") == []
        assert outcomes([pair[::-1]], "ids only") == []
        assert outcomes([pair], "exact") == ["changed-output"]


def test_a_mat_is_of_the_outputs_that_neither_side_failed_at():
    pairs = [(cell(0), cell(0, counters={"steps": 8})), (cell(1), failed(1))]
    assert mean_accepted_tokens(pairs) == (4.0, 2.0)
    assert mean_accepted_tokens([(cell(), failed())]) == (None, None)


def test_a_place_is_named_once_however_many_passes_differ_there():
    pairs = [(cell(pass_=n), cell(pass_=n, counters={"nodes": 15})) for n in (1, 2)]
    (found,) = judged(pairs)
    assert found.locations == ("mini/qa-0 turn 1",)
