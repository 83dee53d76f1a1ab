"""What forwards cost relative to each other, for methods that choose a draft's size by it.

The unit is a target forward over one row; times of forwards are those after a middling context. For
policies that weigh up all that a step takes, steps of several sequences are timed as a whole: two
rows of each of four sequences are not what eight rows of one are, and the host's work, which grows
with the vocabulary and the drafted tokens, is in no forward. A run that needs costs keeps what it
went by in its manifest, and goes on with that when it is resumed.
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
from specbench_cli.measure.costs import Costs, Curve, PointLine, interpolate
from specbench_cli.measure.probe import ProbeSeries, build_curves
from specbench_cli.measure.probe_rounds import ProbeGrid
from specbench_cli.measure.quiet import MeasurementWindows
from specbench_cli.measure.step_timing import StepSample

PROBE_CONTEXT = 256
"""Rows before the forwards, or as many as the models have room for."""

ROUNDS, SECONDS = 32, 2.0
"""Of a quick probe: so many rounds at most, in about that time."""

MIN_ROUNDS = 3
"""Rounds, however long they take."""

STEP_MIN_ROUNDS, STEPS_SECONDS = 6, 6.0
"""Rounds at least, and the time, where whole steps are timed: one step's time swings by a tenth,
and one length's gain over another is less."""


class StepCosts(BaseModel):
    """Relative times of forwards, by model and by rows.

    Attributes:
        source: where they are from.
        context: rows before the forwards.
        target_ns: the unit.
        noisy: whether other programs were running.
        relative: model -> rows of a forward -> time, which never falls.
        steps: sequences of a step -> draft tokens of each -> time of all but the drafting.
        drafting: sequences of a step -> time of a draft token of each.
        uneven: sequences of a step -> what it takes more where lengths differ.
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
        """Time of a forward; linear between the sizes measured and beyond the last one.

        Args:
            sequences: 0 for the forward alone; else of so many, with what their step takes beside
                it. What was not timed so is taken for the forward alone.
            even: whether the sequences have as many rows each.
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
    def of(
        cls,
        found: Mapping[str, Curve],
        context: int,
        *,
        source: str,
        noisy: bool = False,
        steps: Sequence[StepSample] = (),
    ) -> Self:
        """From times by model, the target's those over trees; and from those of steps."""
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
            **_steps(steps, unit),
        )


def _steps(found: Sequence[StepSample], unit: float) -> dict[str, dict[int, Any]]:
    """The medians of steps' times, as `StepCosts` has them."""
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
    """Times that do not fall with work: halfway between the largest so far and the least to come,
    so that a single odd one moves its neighbours little."""
    largest = accumulate(times, max)
    least = reversed(list(accumulate(reversed(times), min)))
    return [(low + high) / 2 for low, high in zip(least, largest, strict=True)]


def step_costs_from_probe(costs: Costs) -> StepCosts:
    """What a kept probe says."""
    longest = costs.curves["target"].by_context[-1][0]
    return StepCosts.of(
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
    """Measure all decoders and heads of a workspace, in about two seconds, in six where whole
    steps are timed too; where forwards take long, in a few rounds.

    Args:
        windows: who watches the machine; it has to keep noisy times.
        positions: rows that all models are made for.
        most: sequences that take part in a step, where steps are timed as a whole; 0: they are not.
        sampling: of these steps.

    Raises:
        UsageError: the models' context is too short.
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
    return StepCosts.of(
        build_curves(found.samples, workspace),
        context,
        source="measured as the run began",
        noisy=found.quietness.noisy,
        steps=found.samples.steps,
    )
