"""Relative costs of forwards, for methods that choose the size of a draft by its cost.

The unit is the time of a target forward over one token. Forward times are measured at one medium
context length. A run stores the costs in its manifest, so a resumed run uses the same costs.

Methods that adapt to the number of sequences in a batch also need the times of whole steps. These
times do not follow from forward times alone. For example, four sequences with two tokens each take
longer than one sequence with eight tokens. A step also contains host work, which grows with the
vocabulary size and the number of drafted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import CostCurve, Costs, PointLine, interpolate
from specbench_cli.measure.probe import ProbeSeries, build_curves
from specbench_cli.measure.probe_rounds import ProbeGrid
from specbench_cli.measure.quiet import MeasurementWindows
from specbench_cli.measure.step_timing import StepSample

PROBE_CONTEXT = 256
"""Context length of the forwards, if the models support it."""

ROUNDS, SECONDS = 32, 2.0
"""Maximum number of rounds of a quick probe, and its approximate duration in seconds."""

MIN_ROUNDS = 3
"""Minimum number of rounds of a quick probe."""

STEP_MIN_ROUNDS, STEPS_SECONDS = 6, 6.0
"""Minimum number of rounds, and approximate duration in seconds, if whole steps are timed. The time
of a step varies by 10%, which is more than the difference between two draft lengths."""


class StepCosts(BaseModel):
    """Relative times of forwards, and of whole steps with several sequences.

    The unit is the time of a target forward over one token.

    Attributes:
        source: Origin of the costs, as text for display.
        context: Context length at which the forwards were measured.
        target_ns: The unit of time in ns: a target forward over one token.
        noisy: True if other programs disturbed the measurement.
        relative: Model -> number of tokens in a forward -> time of the forward. The time never
            decreases with the number of tokens.
        steps: Number of sequences -> draft tokens per sequence -> time of a step without drafting.
        drafting: Number of sequences -> drafting time per draft token of each sequence.
        uneven: Number of sequences -> additional time of a step if draft lengths differ.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    context: int
    target_ns: float
    noisy: bool
    relative: dict[str, dict[int, float]]
    steps: dict[int, dict[int, float]] = {}
    drafting: dict[int, float] = {}
    uneven: dict[int, float] = {}

    def __call__(self, model: str, rows: int, sequences: int = 0, even: bool = True) -> float:
        """Return the interpolated time of a forward, or of the part of a step that uses a model.

        Args:
            model: "target", "draft", or the kind of a head.
            rows: Number of tokens in the forward.
            sequences: Number of sequences in the step. If it is above 0 and steps were timed, the
                result includes the other work of the step. Otherwise it is the time of the forward
                alone.
            even: True if all sequences have the same number of tokens.

        Raises:
            KeyError: the model was not measured.
        """
        if sequences and model == "target" and self.steps:
            each = rows / sequences - 1
            more = (
                0.0
                if even or not self.uneven
                else interpolate(sorted(self.uneven.items()), sequences)
            )
            return more + interpolate(
                [(n, interpolate(line, each)) for n, line in self._steps], sequences
            )
        if sequences and model == "draft" and self.drafting:
            return interpolate(sorted(self.drafting.items()), sequences)
        return interpolate(self._lines[model], rows)

    @cached_property
    def _steps(self) -> list[tuple[int, PointLine]]:
        return [(n, sorted(line.items())) for n, line in sorted(self.steps.items())]

    @cached_property
    def _lines(self) -> dict[str, PointLine]:
        return {model: sorted(line.items()) for model, line in self.relative.items()}

    @classmethod
    def from_curves(
        cls,
        found: Mapping[str, CostCurve],
        context: int,
        *,
        source: str,
        noisy: bool = False,
        steps: Sequence[StepSample] = (),
    ) -> Self:
        """Create costs from measured times.

        Args:
            found: Forward times by model. For the target, the times of trees are used.
            context: Context length for which the times are interpolated.
            source: Origin of the costs, as text for display.
            noisy: True if other programs disturbed the measurement.
            steps: Times of whole steps.
        """
        times = {}
        for model, curve in found.items():
            tree = model == "target"
            lines = curve.trees_by_context if tree else curve.by_context
            sizes = sorted({int(n) for _, line in lines for n, _ in line})
            ns = _smooth_increasing([curve.ns(n, context, tree=tree) for n in sizes])
            times[model] = dict(zip(sizes, ns, strict=True))
        unit = times["target"][1]
        return cls(
            source=source,
            context=context,
            target_ns=unit,
            noisy=noisy,
            relative={
                model: {n: round(ns / unit, 4) for n, ns in line.items()}
                for model, line in times.items()
            },
            **_relative_steps(steps, unit),
        )


def _relative_steps(found: Sequence[StepSample], unit: float) -> dict[str, dict[int, Any]]:
    """Return the median times of steps as the fields `steps`, `drafting` and `uneven`.

    Args:
        found: Measured times of steps.
        unit: Time in ns that is 1 in the result.
    """
    rest: dict[int, dict[int, list[int]]] = {}
    drafting: dict[int, list[float]] = {}
    uneven_samples: dict[int, list[StepSample]] = {}
    for sample in sorted(found):
        n, length, drafted, others, even = sample
        if not even:
            uneven_samples.setdefault(n, []).append(sample)
            continue
        rest.setdefault(n, {}).setdefault(int(length), []).append(others)
        if length and drafted:
            drafting.setdefault(n, []).append(drafted / length)
    steps = {n: {k: median(times) for k, times in line.items()} for n, line in rest.items()}
    tokens = {n: median(times) for n, times in drafting.items()}
    uneven = {}
    for n, samples in uneven_samples.items():
        taken = median(each.drafting + each.rest for each in samples)
        length = samples[0].length
        due = interpolate(sorted(steps[n].items()), length) + length * tokens.get(n, 0.0)
        uneven[n] = max(0.0, taken - due)

    def relative(times: Mapping[int, float]) -> dict[int, float]:
        return {at: round(ns / unit, 4) for at, ns in times.items()}

    return {
        "steps": {n: relative(line) for n, line in steps.items()},
        "drafting": relative(tokens),
        "uneven": relative(uneven),
    }


def _smooth_increasing(times: Sequence[float]) -> list[float]:
    """Return times that never decrease and are close to the measured times.

    Each returned time is a mean of two numbers: the largest measured time up to its position, and
    the smallest measured time from its position on. So a single outlier has little effect on the
    times next to it.
    """
    largest = accumulate(times, max)
    least = reversed(list(accumulate(reversed(times), min)))
    return [(low + high) / 2 for low, high in zip(least, largest, strict=True)]


def step_costs_from_probe(costs: Costs) -> StepCosts:
    """Return the relative step costs that follow from the result of a stored probe."""
    longest = costs.curves["target"].by_context[-1][0]
    return StepCosts.from_curves(
        costs.curves,
        min(PROBE_CONTEXT, longest),
        source=f"the probe of {costs.created_utc}",
        noisy=costs.quietness.noisy,
    )


def measure_step_costs(
    workspace: Workspace,
    windows: MeasurementWindows,
    positions: int,
    *,
    most: int = 0,
    sampling: Sampling | None = None,
) -> StepCosts:
    """Measure the costs of all models and heads of a workspace with a quick probe.

    The probe takes about two seconds, or six if whole steps are timed. It takes longer if forwards
    are slow, because it measures a minimum number of rounds.

    Args:
        workspace: Decoders, draft heads and model states.
        windows: Measurement windows. They must be configured to keep noisy times.
        positions: Maximum number of positions that all models support.
        most: Maximum number of sequences in timed steps. 0 does not time steps.
        sampling: Sampling settings of the timed steps.

    Raises:
        UsageError: the context of the models is too short.
    """
    grid = ProbeGrid(contexts=(1,), chains=(1,), lone=())
    context = min(PROBE_CONTEXT, positions - grid.spare)
    if context < 1:
        raise UsageError(
            f"the costs of forwards cannot be measured for models with {positions} positions:"
            f" {grid.spare + 1} are needed",
            "set a number instead of auto",
        )
    sizes = {min(1 << power, most) for power in range(most.bit_length() + 1)} if most else ()
    grid = ProbeGrid(contexts=(context,), chains=(1,), lone=(), steps=tuple(sorted(sizes)))
    series = ProbeSeries(workspace, windows, {}, grid, seed=0, sampling=sampling)
    least, seconds = (STEP_MIN_ROUNDS, STEPS_SECONDS) if most else (MIN_ROUNDS, SECONDS)
    for _ in range(max(least, min(ROUNDS, int(seconds / series.warm_up_s)))):
        series.measure_round()
    found = series.quiet_samples()
    assert found is not None, "noisy times are kept"
    return StepCosts.from_curves(
        build_curves(found.samples, workspace),
        context,
        source="measured at the start of the run",
        noisy=found.quietness.noisy,
        steps=found.samples.steps,
    )
