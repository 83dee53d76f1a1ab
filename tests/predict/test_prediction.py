"""Replays of synthetic traces, compared with sums by hand."""

import pytest

from specbench_cli.measure.costs import Costs
from specbench_cli.predict.prediction import ALL, predict, predict_output
from specbench_cli.predict.settings import ModelledSetting, break_even
from specbench_cli.report.terminal.prediction import print_settings
from specbench_cli.store.schema import ForwardKind, Ns, Params, Steps, Trace
from tests.records import record_of

PREFILL, DRAFT, VERIFY = range(3)
KINDS = [
    ForwardKind("target", "prefill", 0, 1, (0, 8)),
    ForwardKind("draft", "draft", 0, 1, (0, 2)),
    ForwardKind("target", "verify", 0, 1, (0, 8)),
]
PLAIN = Steps([0], [0], [0], [0], [1])


TREE = 500
"""Additional cost of a tree forward over a chain."""


def make_costs(factor=1.0, hosts=None, **roles):
    """Return costs with round numbers.

    A forward takes `base` per token and 1 per context row. A prefill takes 10 per token. A step
    takes 100, plus 10 per draft forward and 1 per drafted token.
    """
    point = {"spread": 0.0, "samples": 1}

    def curve(base):
        return {
            "forwards": [
                {"n_tokens": n, "context": c, "ns": factor * (base * n + c), **point}
                for n in (1, 8)
                for c in (16, 1024)
            ],
            "prefills": [
                {"n_tokens": n, "context": 0, "ns": factor * 10 * n, **point} for n in (16, 1024)
            ],
            "trees": [
                {"n_tokens": n, "context": c, "ns": factor * (base * n + c + TREE), **point}
                for n in (2, 8)
                for c in (16, 1024)
            ],
        }

    return Costs.model_validate(
        {
            "schema": 1,
            "version": "0.1.0",
            "created_utc": "2026-11-21T12:00:00+00:00",
            "machine": {"id": "abc"},
            "models": {role: {"label": role, "sha256": role, "n_layers": n} for role, n in
                       (("target", 8), ("draft", 2), ("eagle3", 1))},
            "setup": {"device": "cpu", "dtype": "float32", "threads": 2},
            "seed": 0,
            "quietness": {"rounds": 1, "void": 0, "other_cpu": None, "noisy": False},
            "curves": {role: curve(base) for role, base in
                       (roles or {"target": 1000, "draft": 50}).items()},
            "host": {"step": 100 * factor, "draft": 10 * factor, "node": factor},
            "hosts": hosts or {},
        }
    )  # fmt: skip


def trace(*forwards, kinds=KINDS, unused=()):
    """Return a trace of forwards (kind, new tokens)."""
    kind, n = ([forward[i] for forward in forwards] for i in (0, 1))
    zeros = [0] * len(kind)
    return Trace(list(kinds), kind, n, zeros, zeros, list(unused))


def record(label, done, counted, decode, *, task="mini", at=0, **changes):
    n = 1 + sum(counted.committed)
    values = {
        "origin": ["prefill"] + ["plain"] * (n - 1),
        "steps": counted,
        "target_forwards": 1,
        "draft_forwards": 0,
        "forwards": done,
        "ns": Ns(decode + 10, 10, decode, 0, decode, 0),
    }
    return record_of(label, f"{task}/{at}", n, **(values | changes))


def test_vanilla_steps_cost_more_as_the_context_grows():
    forwards = trace((PREFILL, 20), (VERIFY, 1), (VERIFY, 1))
    steps = Steps([0, 0], [0, 0], [0, 0], [0, 0], [1, 1])
    found = predict_output(forwards, steps, make_costs())
    assert found.decode == pytest.approx((1000 + 20) + (1000 + 21) + 2 * 100)
    assert found.prefill == pytest.approx(200 + 100)
    assert (found.forwards, found.extrapolated) == (3, 0)


def test_rejected_tokens_leave_the_context_of_every_model():
    kinds = [*KINDS, ForwardKind("draft", "prefill", 0, 1, (0, 2))]
    forwards = trace(
        (3, 20), (PREFILL, 20),
        # 2 drafted and accepted, a bonus: the draft has not seen its own last token and the bonus
        (DRAFT, 1), (DRAFT, 1), (VERIFY, 3),
        # 2 drafted, none accepted: both models drop both
        (DRAFT, 2), (DRAFT, 1), (VERIFY, 3),
        (VERIFY, 1),
        kinds=kinds,
    )  # fmt: skip
    steps = Steps([2, 2, 0], [2, 2, 0], [2, 1, 0], [2, 0, 0], [3, 1, 1])
    draft = (50 + 20) + (50 + 21) + (100 + 22) + (50 + 24)
    target = (3000 + 20) + (3000 + 23) + (1000 + 24)
    host = 3 * 100 + 4 * 10 + 4
    found = predict_output(forwards, steps, make_costs())
    assert found.decode == pytest.approx(draft + target + host)
    assert found.prefill == pytest.approx(200 + 200 + 100)


def test_a_cancelled_forward_costs_time_but_is_not_a_step():
    steps = Steps([0, 0], [0, 0], [0, 0], [0, 0], [1, 1])
    forwards = trace((PREFILL, 20), (VERIFY, 1), (VERIFY, 4), (VERIFY, 1), unused=[2])
    found = predict_output(forwards, steps, make_costs())
    assert found.decode == pytest.approx(1020 + 4021 + 1021 + 2 * 100)


def test_a_forward_through_some_layers_costs_their_share():
    kinds = [*KINDS, ForwardKind("target", "draft", 0, 1, (0, 2))]
    forwards = trace((PREFILL, 20), (3, 1), (VERIFY, 1), kinds=kinds)
    found = predict_output(forwards, PLAIN, make_costs())
    # its drafted row is dropped when the target verifies
    assert found.decode == pytest.approx(1020 / 4 + 1020 + 100 + 10)


def test_drafting_layers_leave_no_kv_rows_and_cost_their_share():
    part = ForwardKind("target", "draft", 0, 1, (0, 2), 0.3)
    past = ForwardKind("target", "draft", 0, 1, (0, 8), 0.6)
    on = ForwardKind("target", "verify", 0, 1, (2, 8), 0.8)
    kinds = [*KINDS, part, past, on]
    steps = Steps([2, 1], [2, 1], [2, 1], [1, 0], [2, 1])
    forwards = trace(
        (PREFILL, 20),
        (3, 1), (3, 1), (VERIFY, 3),  # one of two accepted: 22 rows of text
        (4, 1), (5, 2),
        kinds=kinds,
    )  # fmt: skip
    found = predict_output(forwards, steps, make_costs())
    drafts = 0.3 * (1020 + 1021) + 0.6 * 1022
    target = 3020 + 0.8 * 2022
    assert found.decode == pytest.approx(drafts + target + 2 * 100 + 3 * 10 + 3)


def test_a_partial_prefill_costs_its_share_and_a_draft_prefill_the_probed_time():
    own = ForwardKind("target", "prefill", 0, 1, (0, 4), 0.5)
    draft = ForwardKind("draft", "prefill", 0, 1, (0, 2), 0.8)
    forwards = trace((3, 20), (4, 20), (PREFILL, 20), (VERIFY, 1), kinds=[*KINDS, own, draft])
    found = predict_output(forwards, PLAIN, make_costs())
    assert found.prefill == pytest.approx((0.5 + 1 + 1) * 200 + 100)
    assert found.decode == pytest.approx(1020 + 100)


def test_two_halves_of_a_verification_are_one_step():
    first = ForwardKind("target", "verify", 0, 1, (0, 4), 0.6)
    rest = ForwardKind("target", "verify", 0, 1, (4, 8), 0.5)
    steps = Steps([1, 0], [1, 0], [1, 0], [1, 0], [2, 1])
    forwards = trace((PREFILL, 20), (3, 2), (4, 2), (VERIFY, 1), kinds=[*KINDS, first, rest])
    found = predict_output(forwards, steps, make_costs())
    assert found.decode == pytest.approx(1.1 * 2020 + 1022 + 2 * 100 + 1)


def test_a_tree_has_tree_costs_and_its_own_host_costs():
    hosts = {"draft": {"step": 300, "draft": 0, "node": 2}}
    steps = Steps([2, 2], [6, 2], [2, 1], [2, 0], [3, 1])
    kinds = [*KINDS, ForwardKind("draft", "prefill", 0, 1, (0, 2))]
    forwards = trace((3, 20), (PREFILL, 20), (DRAFT, 1), (VERIFY, 7), (VERIFY, 3), kinds=kinds)
    found = predict_output(forwards, steps, make_costs(hosts=hosts))
    draft, tree, chain = 50 + 20, 7000 + 20 + TREE, 3000 + 23
    assert found.decode == pytest.approx(draft + tree + chain + 2 * 300 + 8 * 2)
    chains = Steps([2], [2], [2], [2], [3])
    found = predict_output(trace((PREFILL, 20), (VERIFY, 3)), chains, make_costs(hosts=hosts))
    assert found.decode == pytest.approx(3020 + 100 + 2)


def test_a_head_s_prefill_is_in_the_decode_time_and_it_has_its_own_host_costs():
    kinds = [*KINDS, ForwardKind("eagle3", "draft", 0, 1, (0, 1))]
    hosts = {"eagle3": {"step": 400, "draft": 3, "node": 0}}
    costs = make_costs(hosts=hosts, target=1000, eagle3=30)
    forwards = trace((PREFILL, 20), (3, 20), (3, 1), (VERIFY, 3), (3, 2), (VERIFY, 1), kinds=kinds)
    steps = Steps([2, 0], [2, 0], [1, 0], [1, 0], [2, 1])
    found = predict_output(forwards, steps, costs)
    # A prefill of the whole prompt, then forwards after 20 rows and one drafted row. The text
    # has 22 rows.
    head = 200 + (30 + 20) + (60 + 21)
    assert found.decode == pytest.approx(head + 3020 + 1022 + 2 * 400 + 3 * 3)
    assert found.prefill == pytest.approx(200 + 400)


HOST = ("step", "draft", "node")


def test_a_probed_method_has_its_own_host_costs():
    hosts = {
        "sps": {"step": 400, "draft": 0, "node": 0},
        "draft": {"step": 9, "draft": 9, "node": 9},
    }
    forwards = trace((PREFILL, 20), (VERIFY, 1))
    own, other = (
        predict_output(forwards, PLAIN, make_costs(hosts=hosts), method)
        for method in ("sps", "pld")
    )
    assert own.decode - other.decode == pytest.approx(300)


def test_consecutive_target_forwards_use_the_warm_cache_cost():
    costs = make_costs()
    curve = costs.curves["target"]
    half = tuple(point.model_copy(update={"ns": point.ns / 2}) for point in curve.forwards)
    warm = curve.model_copy(update={"lone": half})
    costs = costs.model_copy(update={"curves": {**costs.curves, "target": warm}})
    steps = Steps([0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1])
    forwards = trace((PREFILL, 20), (VERIFY, 1), (DRAFT, 2), (VERIFY, 2), (VERIFY, 1))
    target = 1020 / 2 + (2000 + 21) + 1022 / 2
    assert predict_output(forwards, steps, costs).decode == pytest.approx(
        target + 160 + 300 + 10 + 1
    )


def test_several_probes_of_a_machine_are_averaged():
    records = [vanilla_record("sps", 1120)]
    (row,) = predict(records, MANIFEST, make_costs(), None, [make_costs(0.5)]).rows
    (only_row,) = predict(records, MANIFEST, make_costs(), None).rows
    assert row.predicted == pytest.approx(0.75 * only_row.predicted)


def test_the_busiest_of_several_workers_counts():
    kinds = [*KINDS, ForwardKind("draft", "draft", 1, 1, (0, 2))]
    forwards = trace((PREFILL, 20), (3, 1), (3, 1), (VERIFY, 1), kinds=kinds)
    assert predict_output(forwards, PLAIN, make_costs()).decode == pytest.approx(
        1020 + 100 + 2 * 10
    )


def test_a_forward_beyond_the_probed_points_is_counted_as_extrapolated():
    found = predict_output(trace((PREFILL, 20), (VERIFY, 9)), PLAIN, make_costs())
    assert (found.forwards, found.extrapolated) == (2, 1)


def test_an_output_of_one_token_has_no_decode_time():
    found = predict_output(trace((PREFILL, 20)), Steps(), make_costs())
    assert found.decode == 0


def vanilla_record(label, decode, **changes):
    return record(label, trace((PREFILL, 20), (VERIFY, 1)), PLAIN, decode, **changes)


MANIFEST = {
    "config": {"effective": {"methods": [{"label": "vanilla"}, {"label": "sps"}]}},
    "tasks": [{"name": "mini"}, {"name": "gsm8k"}],
}


def test_predictions_are_summed_by_method_and_task_and_over_all_tasks():
    """A plain step after 20 tokens is predicted to take 1120 ns."""
    records = [
        vanilla_record("sps", 2240, task="gsm8k"),
        vanilla_record("vanilla", 1400),
        vanilla_record("vanilla", 1120, at=1),
        vanilla_record("vanilla", 1120, task="gsm8k"),
    ]
    found = predict(records, MANIFEST, make_costs(), None)
    rows = {(row.label, row.task): row for row in found.rows}
    assert list(rows) == [
        ("vanilla", "mini"), ("vanilla", "gsm8k"), ("vanilla", ALL), ("sps", "gsm8k"), (ALL, ALL),
    ]  # fmt: skip
    mini = rows["vanilla", "mini"]
    assert (mini.outputs, mini.measured, mini.predicted) == (2, 2520, pytest.approx(2240))
    assert mini.efficiency == pytest.approx(2240 / 2520)
    assert mini.error == pytest.approx(2240 / 2520 - 1)
    assert mini.cell_error == pytest.approx((0.2 + 0) / 2)
    assert rows["sps", "gsm8k"].efficiency == pytest.approx(0.5)
    assert rows[ALL, ALL].measured == 2240 + 1400 + 1120 + 1120
    assert {row.elsewhere for row in found.rows} == {None}
    assert found.missing == {}


def test_a_noisy_output_is_predicted_but_has_no_error():
    noisy_fields = {"void": True, "ns": Ns()}
    (row,) = predict([vanilla_record("sps", 0, **noisy_fields)], MANIFEST, make_costs(), None).rows
    assert (row.outputs, row.void, row.measured, row.error) == (1, 1, None, None)
    assert row.predicted_void == pytest.approx(1120)
    both = [vanilla_record("sps", 1120, at=1), vanilla_record("sps", 0, **noisy_fields)]
    (row,) = predict(both, MANIFEST, make_costs(), None).rows
    assert (row.measured, row.error) == (1120, pytest.approx(0))


def test_costs_of_another_machine_are_an_additional_prediction():
    (row,) = predict([vanilla_record("sps", 1120)], MANIFEST, make_costs(), make_costs(0.5)).rows
    assert (row.predicted, row.elsewhere) == (pytest.approx(1120), pytest.approx(560))
    assert row.error == pytest.approx(0)


def test_a_method_that_cannot_be_replayed_has_a_reason():
    head, other = (
        [*KINDS, ForwardKind(name, "draft", 0, 1, (0, 1))] for name in ("eagle", "eagle3")
    )
    costs = make_costs(target=1000, draft=50, eagle3=30)
    manifest = MANIFEST | {
        "models": {"target": {"label": "big"}},
        "heads": {"eagle a": {"sha256": "aa"}, "eagle3 b": {"sha256": "bb"}},
    }
    records = [
        vanilla_record("vanilla", 1120),
        vanilla_record("hf:vanilla", 0, forwards=None, peer=True),
        vanilla_record("eagle", 0, forwards=trace((PREFILL, 20), (3, 1), (VERIFY, 1), kinds=head)),
        vanilla_record(
            "eagle3",
            0,
            forwards=trace((PREFILL, 20), (3, 1), (VERIFY, 1), kinds=other),
            params=Params({"head": "mine"}),
        ),
        vanilla_record("sps", 0, error="broke", finish="error", forwards=None, steps=None),
    ]
    found = predict(records, manifest, costs, None)
    assert [row.label for row in found.rows] == ["vanilla"]
    probe = "specbench predict --probe --target big --method"
    assert found.missing == {
        "hf:vanilla": "its forwards are not metered",
        "eagle": f"the probe has no costs of its eagle; {probe} eagle",
        "eagle3": f"the probe measured another eagle3; {probe} eagle3 --set eagle3.head=mine",
        "sps": "failed",
    }


def test_break_even_is_the_acceptance_at_which_a_draft_pays_for_its_step():
    assert break_even(1.0, 5) == pytest.approx(0.0, abs=1e-5)
    assert break_even(1.5, 1) == pytest.approx(0.5, abs=1e-5)
    assert break_even(6.0, 5) == pytest.approx(1.0, abs=1e-5)
    assert break_even(6.1, 5) is None


def test_the_best_setting_is_named_for_modelled_and_measured_times(capsys):
    rows = [
        ModelledSetting(f"sps length={k}", "sps", 3, 2.0, modelled, 9e9, measured, 0.7, 0.4)
        for k, modelled, measured in ((1, 5e9, 5.5e9), (2, 4e9, 4.4e9), (3, 4.2e9, 4.0e9))
    ]
    print_settings(rows, ["modelled"])
    printed = capsys.readouterr().err
    assert (
        "best of sps: modelled sps length=2, measured sps length=3; the modelled one took"
        " 1.100 times as long" in printed
    )
    print_settings(rows[:1], ["modelled"])
    assert "best of" not in capsys.readouterr().err
