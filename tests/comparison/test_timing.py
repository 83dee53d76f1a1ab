"""The timing gate on made-up times: which figure names what became slower."""

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
from tests.comparison.sides import cell_of, side_of

LABELS = ("vanilla", "sps", "pld", "hf:vanilla")
PROMPTS = 12
TOLERANCE = 0.05


def cell(label, number, rng, slower, pass_=1):
    """An output; `slower`: factors by part ("draft", "verify", "host") and by label."""
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
    return cell_of(
        PairKey(f"mini/qa-{number}", 1, label, pass_, 0),
        peer=peer,
        counters=Counters(64, 63, steps, 48, 48, 40, 32, steps + 1, None),
        times=times,
    )


def side(seed, *, processes=1, labels=LABELS, prompts=PROMPTS, **slower):
    rng = np.random.default_rng(seed)
    passes = tuple(
        tuple(cell(label, n, rng, slower, p + 1) for n in range(prompts) for label in labels)
        for p in range(processes)
    )
    return of(passes)


def of(processes):
    cells = [c for process in processes for c in process]
    return side_of(cells, processes=tuple(processes))


def scope(base, new):
    pairs = {}
    for key, was in base.outputs.items():
        if key in new.outputs:
            pairs.setdefault(was.row, []).append((was, new.outputs[key]))
    return Scope(
        pairs={row: tuple(own) for row, own in pairs.items()},
        missing=(),
        new=(),
        rules={},
        timing=None,
        not_compared=(),
        causes={},
    )


def judged(base, new):
    return estimate_changes(scope(base, new), collect_processes(base, new), TOLERANCE)


def unjudged(base, new):
    """What is said of rows whose times are not judged."""
    return list(explain_unjudged(scope(base, new), collect_processes(base, new)))


def turns(base, new):
    return collect_processes(base, new).pairs


def slower(base, new):
    """By label, what its finding says."""
    return {
        row.label: found.message
        for row, own in judged(base, new).items()
        for found in find_significant_changes(own, TOLERANCE)
        if found.outcome == "slower"
    }


def edited(given, edit):
    return of([tuple(edit(c) for c in process) for process in given.processes])


BASE = side(1)


def test_same_program_is_neither_slower_nor_faster():
    found = judged(BASE, side(2))
    assert set(found) == {RowKey("mini", label) for label in ("vanilla", "sps", "pld")}
    assert not any(find_significant_changes(own, TOLERANCE) for own in found.values())
    assert [c.figure for c in found[RowKey("mini", "sps")]] == [DECODE, VERIFY, DRAFT, HOST]
    assert all(c.low < c.ratio < c.high and c.detects > 1.05 for own in found.values() for c in own)


def test_run_compared_with_itself_is_the_same():
    for own in judged(BASE, BASE).values():
        assert [c.ratio for c in own] == pytest.approx([1.0] * len(own))


def test_slower_draft_is_named_in_the_row_that_drafts_and_nowhere_else():
    found = slower(BASE, side(2, draft=1.1))
    assert list(found) == ["sps"]
    assert found["sps"].startswith("draft forward +")
    assert "allowed +5%" in found["sps"]


def test_slower_method_is_named_by_the_whole():
    found = slower(BASE, side(2, pld=1.15))
    assert list(found) == ["pld"]
    assert "decode +" in found["pld"]
    assert "verify forward +" in found["pld"]
    assert "host" not in found["pld"]


def test_target_slower_for_everybody_is_named_by_vanilla_alone():
    everybody = dict.fromkeys(("vanilla", "sps", "pld"), 1.2)
    found = slower(BASE, side(2, **everybody))
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

    new = edited(side(2), faster)
    (found,) = find_significant_changes(judged(BASE, new)[RowKey("mini", "sps")], TOLERANCE)
    assert found.outcome == "faster"
    assert found.message.startswith("decode -")


def test_vanilla_without_hf_vanilla_is_not_judged_and_this_is_said():
    base, new = (side(seed, labels=LABELS[:-1]) for seed in (1, 2))
    assert RowKey("mini", "vanilla") not in judged(base, new)
    assert unjudged(base, new) == ["times of mini vanilla: BASE has no hf:vanilla to compare with"]


def test_row_that_lost_more_than_a_tenth_is_not_judged_and_this_is_said():
    new = edited(
        side(2),
        lambda c: (
            replace(c, times=None)
            if c.key.label == "pld" and c.key.prompt_id in ("mini/qa-0", "mini/qa-1")
            else c
        ),
    )
    assert RowKey("mini", "pld") not in judged(BASE, new)
    assert RowKey("mini", "sps") in judged(BASE, new)
    (said,) = unjudged(BASE, new)
    assert said == "times of mini pld: 2 of 12 outputs of pld in NEW have no time (noisy or failed)"


def test_two_prompts_are_too_few():
    base, new = side(1, prompts=2), side(2, prompts=2)
    assert judged(base, new) == {}
    assert "fewer than 3 prompts" in unjudged(base, new)[0]


def test_components_of_other_work_are_not_compared():
    new = edited(side(2), lambda c: replace(c, counters=replace(c.counters, nodes=47)))
    assert [c.figure for c in judged(BASE, new)[RowKey("mini", "sps")]] == [DECODE]


def in_turn(began, **more):
    """A side of eight runs that began at these hours, each with draft forwards as fast as it says;
    `phase`: what slowed the whole machine, by hour."""
    phase = more.pop("phase", lambda hour: 1.0)
    made = []
    for hour in began:
        one = side(100 + hour, **more)
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
    return replace(of(made), start_times=tuple(f"{hour:02}:00" for hour in began))


ODD, EVEN = range(1, 17, 2), range(2, 18, 2)


def test_runs_that_took_turns_are_compared_as_they_are():
    base, new = in_turn(ODD), in_turn(EVEN, draft=1.08)
    (change,) = (c for c in judged(base, new)[RowKey("mini", "sps")] if c.figure == DRAFT)
    assert turns(base, new) == 8 and not change.relative
    assert change.ratio == pytest.approx(1.08, abs=0.01)
    assert slower(base, new).keys() == {"sps"}
    assert not slower(base, in_turn(EVEN))


def test_phases_of_the_machine_do_not_hide_a_slower_draft_from_runs_that_took_turns():
    def phase(hour):
        return 1 + (hour + 1) // 4  # up to five times as slow

    base, new = in_turn(ODD, phase=phase), in_turn(EVEN, draft=1.08, phase=phase)
    assert slower(base, new).keys() == {"sps"}
    assert not slower(base, in_turn(EVEN, phase=phase))


def test_faster_verification_explains_no_draft_that_is_compared_as_it_is():
    base, new = in_turn(ODD), in_turn(EVEN, draft=1.08 / 0.9, label=0.9)
    quicker = edited(
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


def test_runs_one_side_after_the_other_took_no_turns():
    assert turns(in_turn(range(8)), in_turn(range(8, 16))) == 0
    assert turns(BASE, BASE) == 0


def test_runs_that_lost_too_much_are_left_out_and_the_others_judged():
    base, new = in_turn(ODD), in_turn(EVEN, draft=1.08)
    first = set(new.processes[0])

    def lost(c):
        return replace(c, times=None) if c in first and c.key.label == "sps" else c

    hurt = replace(edited(new, lost), start_times=new.start_times)
    assert slower(base, hurt).keys() == {"sps"}
    assert unjudged(base, hurt) == [
        "times of mini sps: 1 of 16 runs are left out (noisy or failed outputs)"
    ]


def test_too_few_whole_pairs_are_not_judged_and_this_is_said():
    base, new = in_turn(ODD[:5]), in_turn(EVEN[:5], draft=1.5)
    first = set(new.processes[0])
    hurt = replace(
        edited(new, lambda c: replace(c, times=None) if c in first else c),
        start_times=new.start_times,
    )
    assert judged(base, hurt) == {}
    assert "only 4 of 5 pairs of runs have enough times" in unjudged(base, hurt)[0]


def test_every_process_counts_though_only_the_first_are_pairs():
    several = side(3, processes=3)
    one = judged(BASE, side(2))[RowKey("mini", "sps")][0]
    more = judged(several, side(4, processes=3))[RowKey("mini", "sps")][0]
    mixed = judged(several, side(2))[RowKey("mini", "sps")][0]
    assert more.detects < mixed.detects < one.detects


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
def test_an_interval_whose_ends_are_no_figures_is_not_printed(low, high):
    ends = timing._interval_bounds(low, high)
    told = {"low": ends[0], "high": ends[1], "significant": False}
    found = TimeChange(figure=DECODE, ratio=1.25, **told)
    assert ends == (None, None)
    assert str(found) == "decode +25.0%"
    assert found.percent == "+25.0%"
    assert timing._interval_bounds(-0.1, 0.1) == (math.exp(-0.1), math.exp(0.1))
