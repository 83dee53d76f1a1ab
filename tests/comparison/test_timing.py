"""Tests of the timing gate on made-up times: which figure explains a slowdown."""

import math
from dataclasses import replace

import numpy as np
import pytest

from specbench_cli.comparison import timing
from specbench_cli.comparison.compared_output import Counters, PairKey, RowKey, Times
from specbench_cli.comparison.outcome import TimeChange
from specbench_cli.comparison.processes import collect_processes
from specbench_cli.comparison.scope import Scope
from specbench_cli.comparison.timing import (
    DECODE,
    DRAFT,
    HOST,
    VANILLA,
    VERIFY,
    estimate_changes,
    explain_unjudged,
    find_significant_changes,
)
from tests.comparison.sides import make_output, make_side_of

LABELS = ("vanilla", "sps", "pld", "hf:vanilla")
PROMPTS = 12
TOLERANCE = 0.05


def output(label, number, rng, slower, pass_=1):
    """Return an output with random times.

    `slower` maps a part ("draft", "verify", "host") or a label to a factor on its time.
    """
    speed = math.exp(rng.normal(0, 0.01)) * slower.get(label, 1.0) * 1e6
    part = {
        name: speed * slower.get(name, 1.0) * math.exp(rng.normal(0, 0.005))
        for name in ("draft", "verify", "host")
    }
    steps = 63 if label == "vanilla" else 16
    draft = 0.2 * part["draft"] if label == "sps" else None
    decode = steps * (part["verify"] + 5 * (draft or 0) + 0.1 * part["host"])
    peer = label == "hf:vanilla"
    times = Times(
        decode=None if peer else round(decode),
        draft=None,
        verify=None if peer else round(steps * part["verify"]),
        host=None if peer else round(steps * 0.1 * part["host"]),
        draft_forward=None if draft is None else round(draft),
        verify_forward=None if peer else round(part["verify"]),
        total=round(speed * 100 if peer else 1.1 * decode),
    )
    return make_output(
        PairKey(f"mini/qa-{number}", 1, label, pass_, 0),
        peer=peer,
        counters=Counters(64, 63, steps, 48, 48, 40, 32, steps + 1, None),
        times=times,
    )


def side(seed, *, processes=1, labels=LABELS, prompts=PROMPTS, **slower):
    rng = np.random.default_rng(seed)
    passes = tuple(
        tuple(output(label, n, rng, slower, p + 1) for n in range(prompts) for label in labels)
        for p in range(processes)
    )
    return side_from_processes(passes)


def side_from_processes(processes):
    outputs = [c for process in processes for c in process]
    return make_side_of(outputs, processes=tuple(processes))


def scope(base, new):
    pairs = {}
    for key, base_output in base.outputs.items():
        if key in new.outputs:
            pairs.setdefault(base_output.row, []).append((base_output, new.outputs[key]))
    return Scope(
        pairs={row: tuple(own) for row, own in pairs.items()},
        missing=(),
        new=(),
        rules={},
        timing=None,
        not_compared=(),
        causes={},
    )


def find_changes(base, new):
    return estimate_changes(scope(base, new), collect_processes(base, new), TOLERANCE)


def find_unjudged(base, new):
    """Return the messages about rows whose times are not judged."""
    return list(explain_unjudged(scope(base, new), collect_processes(base, new)))


def count_pairs(base, new):
    return collect_processes(base, new).pairs


def slower(base, new):
    """Return the message of each row that is slower, by label."""
    return {
        row.label: found.message
        for row, own in find_changes(base, new).items()
        for found in find_significant_changes(own, TOLERANCE)
        if found.outcome == "slower"
    }


def edit_outputs(side, edit):
    return side_from_processes([tuple(edit(c) for c in process) for process in side.processes])


BASE = side(1)


def test_equal_programs_have_no_significant_change():
    found = find_changes(BASE, side(2))
    assert set(found) == {RowKey("mini", label) for label in ("vanilla", "sps", "pld")}
    assert not any(find_significant_changes(own, TOLERANCE) for own in found.values())
    assert [c.figure for c in found[RowKey("mini", "sps")]] == [DECODE, VERIFY, DRAFT, HOST]
    assert all(c.low < c.ratio < c.high and c.detects > 1.05 for own in found.values() for c in own)


def test_run_compared_with_itself_is_the_same():
    for own in find_changes(BASE, BASE).values():
        assert [c.ratio for c in own] == pytest.approx([1.0] * len(own))


def test_slower_draft_is_reported_only_for_the_method_that_drafts():
    found = slower(BASE, side(2, draft=1.1))
    assert list(found) == ["sps"]
    assert found["sps"].startswith("draft forward +")
    assert "allowed +5%" in found["sps"]


def test_slower_method_is_reported_by_its_decode_time():
    found = slower(BASE, side(2, pld=1.15))
    assert list(found) == ["pld"]
    assert "decode +" in found["pld"]
    assert "verify forward +" in found["pld"]
    assert "host" not in found["pld"]


def test_slower_target_is_reported_only_for_vanilla():
    slower_target = dict.fromkeys(("vanilla", "sps", "pld"), 1.2)
    found = slower(BASE, side(2, **slower_target))
    assert list(found) == ["vanilla"]
    assert found["vanilla"].startswith(f"{VANILLA} +")


def test_faster_verification_does_not_make_draft_and_host_look_slower():
    def faster(c):
        if c.key.label != "sps":
            return c
        t = c.times
        less = round(0.25 * t.verify)
        return replace(
            c,
            times=replace(t, decode=t.decode - less, verify_forward=round(0.75 * t.verify_forward)),
        )

    new = edit_outputs(side(2), faster)
    (found,) = find_significant_changes(find_changes(BASE, new)[RowKey("mini", "sps")], TOLERANCE)
    assert found.outcome == "faster"
    assert found.message.startswith("decode -")


def test_vanilla_without_hf_vanilla_is_reported_as_not_judged():
    base, new = (side(seed, labels=LABELS[:-1]) for seed in (1, 2))
    assert RowKey("mini", "vanilla") not in find_changes(base, new)
    assert find_unjudged(base, new) == [
        "times of mini vanilla: BASE has no hf:vanilla to compare with"
    ]


def test_method_without_a_tenth_of_its_times_is_reported_as_not_judged():
    new = edit_outputs(
        side(2),
        lambda c: (
            replace(c, times=None)
            if c.key.label == "pld" and c.key.prompt_id in ("mini/qa-0", "mini/qa-1")
            else c
        ),
    )
    assert RowKey("mini", "pld") not in find_changes(BASE, new)
    assert RowKey("mini", "sps") in find_changes(BASE, new)
    (message,) = find_unjudged(BASE, new)
    assert (
        message == "times of mini pld: 2 of 12 outputs of pld in NEW have no time (noisy or failed)"
    )


def test_two_prompts_are_too_few():
    base, new = side(1, prompts=2), side(2, prompts=2)
    assert find_changes(base, new) == {}
    assert "fewer than 3 prompts" in find_unjudged(base, new)[0]


def test_parts_are_not_compared_if_the_work_differs():
    new = edit_outputs(side(2), lambda c: replace(c, counters=replace(c.counters, nodes=47)))
    assert [c.figure for c in find_changes(BASE, new)[RowKey("mini", "sps")]] == [DECODE]


def side_of_eight_runs(hours, **kwargs):
    """Return a side of one run per hour in `hours`, each with its fastest draft forward.

    `phase` returns the slowdown of the whole machine at an hour.
    """
    phase = kwargs.pop("phase", lambda hour: 1.0)
    made = []
    for hour in hours:
        one = side(100 + hour, **kwargs)
        made.append(
            tuple(
                replace(
                    c,
                    times=replace(
                        c.times,
                        draft_fastest=c.times.draft_forward
                        and round(c.times.draft_forward * phase(hour)),
                    ),
                )
                for c in one.processes[0]
            )
        )
    return replace(side_from_processes(made), start_times=tuple(f"{hour:02}:00" for hour in hours))


ODD, EVEN = range(1, 17, 2), range(2, 18, 2)


def test_runs_in_pairs_are_compared_by_absolute_times():
    base, new = side_of_eight_runs(ODD), side_of_eight_runs(EVEN, draft=1.08)
    (change,) = (c for c in find_changes(base, new)[RowKey("mini", "sps")] if c.figure == DRAFT)
    assert count_pairs(base, new) == 8 and not change.relative
    assert change.ratio == pytest.approx(1.08, abs=0.01)
    assert slower(base, new).keys() == {"sps"}
    assert not slower(base, side_of_eight_runs(EVEN))


def test_a_slow_phase_of_the_machine_does_not_hide_a_slower_draft_in_paired_runs():
    def phase(hour):
        return 1 + (hour + 1) // 4  # up to five times as slow

    base, new = (
        side_of_eight_runs(ODD, phase=phase),
        side_of_eight_runs(EVEN, draft=1.08, phase=phase),
    )
    assert slower(base, new).keys() == {"sps"}
    assert not slower(base, side_of_eight_runs(EVEN, phase=phase))


def test_faster_verification_does_not_hide_a_slower_draft_in_paired_runs():
    base, new = side_of_eight_runs(ODD), side_of_eight_runs(EVEN, draft=1.08 / 0.9, label=0.9)
    quicker = edit_outputs(
        new,
        lambda c: replace(
            c,
            times=replace(
                c.times,
                verify_forward=c.times.verify_forward and round(0.9 * c.times.verify_forward),
            ),
        ),
    )
    assert "draft forward" in slower(base, replace(quicker, start_times=new.start_times))["sps"]


def test_sides_that_ran_one_after_the_other_have_no_pairs():
    assert count_pairs(side_of_eight_runs(range(8)), side_of_eight_runs(range(8, 16))) == 0
    assert count_pairs(BASE, BASE) == 0


def test_runs_without_enough_times_are_left_out_and_the_others_judged():
    base, new = side_of_eight_runs(ODD), side_of_eight_runs(EVEN, draft=1.08)
    first = set(new.processes[0])

    def lost(c):
        return replace(c, times=None) if c in first and c.key.label == "sps" else c

    hurt = replace(edit_outputs(new, lost), start_times=new.start_times)
    assert slower(base, hurt).keys() == {"sps"}
    assert find_unjudged(base, hurt) == [
        "times of mini sps: 1 of 16 runs are left out (noisy or failed outputs)"
    ]


def test_too_few_complete_pairs_are_reported_as_not_judged():
    base, new = side_of_eight_runs(ODD[:5]), side_of_eight_runs(EVEN[:5], draft=1.5)
    first = set(new.processes[0])
    hurt = replace(
        edit_outputs(new, lambda c: replace(c, times=None) if c in first else c),
        start_times=new.start_times,
    )
    assert find_changes(base, hurt) == {}
    assert "only 4 of 5 pairs of runs have enough times" in find_unjudged(base, hurt)[0]


def test_more_processes_detect_smaller_changes():
    several = side(3, processes=3)
    one = find_changes(BASE, side(2))[RowKey("mini", "sps")][0]
    kwargs = find_changes(several, side(4, processes=3))[RowKey("mini", "sps")][0]
    mixed = find_changes(several, side(2))[RowKey("mini", "sps")][0]
    assert kwargs.detects < mixed.detects < one.detects


def change(figure, ratio, *, significant=True):
    spread = 0.01 if significant else 0.5
    return TimeChange(
        figure=figure,
        ratio=ratio,
        low=ratio * (1 - spread),
        high=ratio * (1 + spread),
        significant=significant,
    )


@pytest.mark.parametrize(
    ("given", "outcomes"),
    [
        (change(DECODE, 1.2, significant=False), []),
        (change(DECODE, 1.04), []),
        (change(DECODE, 1.06), ["slower"]),
        (change(DECODE, 0.97), []),
        (change(DECODE, 0.9), ["faster"]),
        (change(DRAFT, 0.5), []),
    ],
)
def test_slower_needs_both_significance_and_more_than_the_tolerance(given, outcomes):
    assert [found.outcome for found in find_significant_changes((given,), TOLERANCE)] == outcomes


@pytest.mark.parametrize(("low", "high"), [(-0.4, 109.8), (-1e9, 1e9), (-math.inf, math.inf)])
def test_an_interval_with_meaningless_bounds_is_not_printed(low, high):
    ends = timing._interval_bounds(low, high)
    bounds = {"low": ends[0], "high": ends[1], "significant": False}
    found = TimeChange(figure=DECODE, ratio=1.25, **bounds)
    assert ends == (None, None)
    assert str(found) == "decode +25.0%"
    assert found.percent == "+25.0%"
    assert timing._interval_bounds(-0.1, 0.1) == (math.exp(-0.1), math.exp(0.1))
