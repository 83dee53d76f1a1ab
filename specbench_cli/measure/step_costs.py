"""Relative costs of forwards, for methods that choose a draft's size by them.

The unit is a target forward over one row. Forward times are those at a medium context. Policies
that use the cost of a whole step need timed steps of several sequences: two rows of each of four
sequences do not cost the same as eight rows of one. A forward also does not include the host's
work, which grows with vocabulary and drafted tokens. A run that needs costs stores them in its
manifest and uses the same ones after a resumption.
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
"""Maximum rounds of a quick probe, and its approximate time in seconds."""

MIN_ROUNDS = 3
"""Minimum number of rounds."""

STEP_MIN_ROUNDS, STEPS_SECONDS = 6, 6.0
"""Minimum rounds and time in seconds if whole steps are timed. The time of a step varies by a
tenth, more than one draft length gains over another."""


class StepCosts(BaseModel):
    """Relative times of forwards, by model and rows.

    Attributes:
        source: Origin of the costs.
        context: Context length of the forwards.
        target_ns: The unit in ns.
        noisy: True if other programs were running.
        relative: Model -> rows of a forward -> time, which never decreases.
        steps: Sequences of a step -> draft tokens of each -> time without drafting.
        drafting: Sequences of a step -> time per draft token of each.
        uneven: Sequences of a step -> additional time if draft lengths differ.
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
        """Return the time of a forward, linear between measured sizes and beyond the last one.

        Args:
            sequences: Number of sequences, whose step's other work is included. 0 for the forward
                alone. The forward alone is the fallback if steps were not timed.
            even: True if all sequences have the same number of rows.

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
        """Create costs from the times of models and of whole steps. The target's times are those of
        trees."""
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
    """Return the median times of steps in the form of `StepCosts`."""
    rest: dict[int, dict[int, list[int]]] = {}
    drafting: dict[int, list[float]] = {}
    unlike: dict[int, list[StepSample]] = {}
    for sample in sorted(found):
        n, length, drafted, others, even = sample
        if not even:
            unlike.setdefault(n, []).append(sample)
            continue
        rest.setdefault(n, {}).setdefault(int(length), []).append(others)
        if length and drafted:
            drafting.setdefault(n, []).append(drafted / length)
    steps = {n: {k: median(times) for k, times in line.items()} for n, line in rest.items()}
    tokens = {n: median(times) for n, times in drafting.items()}
    uneven = {}
    for n, samples in unlike.items():
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
    """Return non-decreasing times: the mean of the running maximum and the running minimum from the
    end.

    A single outlier then changes its neighbours little.
    """
    largest = accumulate(times, max)
    least = reversed(list(accumulate(reversed(times), min)))
    return [(low + high) / 2 for low, high in zip(least, largest, strict=True)]


def step_costs_from_probe(costs: Costs) -> StepCosts:
    """Return the step costs of a stored probe."""
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
    """Measure all decoders and heads of a workspace.

    It takes about two seconds, six with whole steps, and a few rounds if forwards are slow.

    Args:
        windows: Measurement windows. They must keep noisy times.
        positions: Maximum number of positions of all models.
        most: Maximum number of sequences in a timed step. 0 times no steps.
        sampling: Sampling settings of these steps.

    Raises:
        UsageError: the context of the models is too short.
    """
    grid = ProbeGrid(contexts=(1,), chains=(1,), lone=())
    context = min(PROBE_CONTEXT, positions - grid.spare)
    if context < 1:
        raise UsageError(
            f"what forwards cost cannot be measured on models with {positions} positions: it takes"
            f" {grid.spare + 1}",
            "give a number in place of auto",
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
        source="measured as the run began",
        noisy=found.quietness.noisy,
        steps=found.samples.steps,
    )
