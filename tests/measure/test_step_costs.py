"""Tests of relative step costs, from a probe's curves or measured quickly."""

import pytest

from specbench_cli.engine.drafting.growth import best_size
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError
from specbench_cli.measure import step_costs as module
from specbench_cli.measure.costs import CostCurve
from specbench_cli.measure.quiet import MeasurementWindows
from specbench_cli.measure.step_costs import StepCosts, measure_step_costs
from specbench_cli.measure.step_timing import StepSample

SURE = [-0.05 * n for n in range(63)]
"""Log probabilities of the paths of a tree, in descending order."""


def curve(ns, sizes, trees=()):
    """Return a model's cost curve with `ns(n, context)` per forward, and 1 us more for a tree."""
    point = {"spread": 0.0, "samples": 3}
    return CostCurve.model_validate(
        {
            "forwards": [
                {"n_tokens": n, "context": c, "ns": ns(n, c), **point}
                for n in sizes
                for c in (16, 1024)
            ],
            "trees": [
                {"n_tokens": n, "context": c, "ns": ns(n, c) + 1000, **point}
                for n in trees
                for c in (16, 1024)
            ],
            "prefills": [{"n_tokens": 16, "context": 0, "ns": 1.0, **point}],
        }
    )


def costs(slope):
    """Return step costs: a target of 10 us and `slope` ns per further row, and a draft of 1 us."""
    found = {
        "target": curve(lambda n, c: 10_000 + slope * (n - 1), (1, 2, 64)),
        "draft": curve(lambda n, c: 1_000, (1, 4)),
    }
    return StepCosts.from_curves(found, 256, source="test")


def test_unit_is_a_target_forward_of_one_row():
    found = costs(100)
    assert found("target", 1) == 1.0
    assert found("target", 33) == pytest.approx(1 + 32 * 0.01)
    assert found("draft", 1) == found("draft", 64) == pytest.approx(0.1)
    assert found.target_ns == 10_000


def test_target_costs_are_those_of_trees_if_measured():
    target = curve(lambda n, c: 10_000 + c, (1, 64), trees=(8, 64))
    found = StepCosts.from_curves({"target": target}, 256, source="test")
    assert found("target", 8) == pytest.approx(11_256 / 10_256, abs=1e-4)
    assert found("target", 1) == 1.0


def test_costs_never_fall_with_rows():
    dip = {1: 10.0, 2: 30.0, 64: 20.0, 80: 40.0}
    found = StepCosts.from_curves({"target": curve(lambda n, c: dip[n], dip)}, 256, source="test")
    assert [found("target", n) for n in (1, 2, 33, 64, 80)] == pytest.approx([1, 2.5, 2.5, 2.5, 4])


def test_costs_are_read_back_from_the_manifest():
    found = costs(100)
    assert StepCosts.model_validate_json(found.model_dump_json()) == found


def test_tree_is_small_on_a_steep_curve_and_large_on_a_flat_one():
    def size(slope):
        found = costs(slope)
        return best_size(SURE, lambda rows: found("target", rows), fixed=found("draft", 1))

    sizes = [size(slope) for slope in (0, 200, 1_000, 50_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (63, 0)
    assert len(set(sizes)) == 4


class SilentMeter:
    """A noise meter without any noise."""

    def open(self):
        """Do nothing."""

    def is_full(self):
        return True

    def close(self):
        return 0.0


def test_quick_probe_measures_models_within_its_time(tiny_checkpoint, monkeypatch):
    folder = tiny_checkpoint("llama")
    monkeypatch.setattr(module, "SECONDS", 0.0)
    decoders = {role: load_decoder(folder, name=role) for role in ("target", "draft")}
    found = measure_step_costs(
        Workspace(decoders, 0), MeasurementWindows(SilentMeter(), allow_noise=True), 256
    )
    assert (found.context, found.noisy) == (256 - 65, False)
    assert list(found.relative["target"]) == [1, 2, 4, 8, 16, 32, 64]
    assert found("target", 1) == 1.0
    assert found("draft", 1) > 0


def test_batched_steps_have_their_measured_cost():
    steps = [
        StepSample(n, length, drafting=2_000 * n * length, rest=own * 1_000)
        for n, line in {1: (12, 14), 4: (20, 60)}.items()
        for length, own in enumerate(line)
    ]
    found = StepCosts.from_curves(
        {"target": curve(lambda n, c: 10_000, (1, 64))}, 256, source="", steps=steps
    )
    assert (found("target", 1, 1), found("target", 2, 1), found("target", 1)) == (1.2, 1.4, 1.0)
    assert (found("target", 4, 4), found("target", 8, 4)) == (2.0, 6.0)
    assert found("target", 6, 2) == pytest.approx(
        1.6 + (10.0 - 1.6) / 3
    )  # interpolated at one third
    assert found("target", 3, 1) == pytest.approx(1.6)  # extrapolated with the last slope
    assert (found("draft", 1, 1), found("draft", 2, 2)) == (0.2, pytest.approx(0.4))


def test_uneven_draft_lengths_add_their_measured_cost():
    even = [StepSample(2, k, drafting=1_000 * k, rest=20_000 + 2_000 * k) for k in (0, 2)]
    unlike = StepSample(2, 1.0, drafting=2_000, rest=26_000, even=False)
    found = StepCosts.from_curves(
        {"target": curve(lambda n, c: 10_000, (1, 64))}, 256, source="", steps=[*even, unlike]
    )
    assert found.uneven == {2: pytest.approx((28_000 - 22_000 - 1_000) / 10_000)}
    assert found("target", 4, 2, False) - found("target", 4, 2) == pytest.approx(0.5)
    assert found("target", 4, 2, True) == pytest.approx(2.2)


def test_outlier_of_a_step_time_is_ignored():
    steps = [StepSample(1, 0, 0, ns) for ns in (10_000, 10_000, 90_000)]
    found = StepCosts.from_curves(
        {"target": curve(lambda n, c: 10_000, (1, 64))}, 256, source="", steps=steps
    )
    assert found("target", 1, 1) == 1.0


def test_steps_of_all_sizes_up_to_the_batch_are_timed(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(module, "STEPS_SECONDS", 0.0)
    monkeypatch.setattr(module, "STEP_MIN_ROUNDS", 1)
    folder = tiny_checkpoint("llama")
    decoders = {role: load_decoder(folder, name=role) for role in ("target", "draft")}
    workspace = Workspace(decoders, 0)
    found = measure_step_costs(
        workspace, MeasurementWindows(SilentMeter(), allow_noise=True), 256, most=3
    )
    assert list(found.steps) == [1, 2, 3]
    assert all(list(line) == [0, 1, 2, 4, 6] for line in found.steps.values())
    assert list(found.drafting) == [1, 2, 3]
    assert list(found.uneven) == [2, 3]
    assert all(ns > 0 for ns in found.drafting.values())
    without = measure_step_costs(
        Workspace({"target": decoders["target"]}, 0),
        MeasurementWindows(SilentMeter(), allow_noise=True),
        256,
        most=1,
    )
    assert (list(without.steps), without.drafting) == ([1], {})


def test_models_with_too_few_positions_are_rejected():
    with pytest.raises(UsageError, match="models with 64 positions") as caught:
        measure_step_costs(
            Workspace({}, 0), MeasurementWindows(SilentMeter(), allow_noise=True), 64
        )
    assert caught.value.hint == "set a number instead of auto"
