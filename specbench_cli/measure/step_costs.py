"""What forwards cost relative to each other, for methods that choose a draft's size by it.

The unit is a target forward over one row; times are those after a middling context. A run that
needs them keeps what it went by in its manifest, and goes on with that when it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Self

from pydantic import BaseModel, ConfigDict

from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import Costs, Curve, Line, along
from specbench_cli.measure.probe import Windows, curves, measure
from specbench_cli.measure.rounds import Grid

MIDDLING = 256
"""Rows before the forwards, or as many as the models have room for."""

ROUNDS, SECONDS = 32, 2.0
"""Of a quick probe: so many rounds at most, in about that time."""


class StepCosts(BaseModel):
    """Relative times of forwards, by model and by rows.

    Attributes:
        source: where they are from.
        context: rows before the forwards.
        target_ns: the unit.
        noisy: whether other programs were running.
        relative: model -> rows of a forward -> time, which never falls.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    context: int
    target_ns: float
    noisy: bool
    relative: dict[str, dict[int, float]]

    def __call__(self, model: str, rows: int) -> float:
        """Time of a forward; linear between the sizes measured and beyond the last one.

        Raises:
            KeyError: the model was not measured.
        """
        return along(self._lines[model], rows)

    @cached_property
    def _lines(self) -> dict[str, Line]:
        return {model: sorted(line.items()) for model, line in self.relative.items()}

    @classmethod
    def of(
        cls, found: Mapping[str, Curve], context: int, *, source: str, noisy: bool = False
    ) -> Self:
        """From times by model; the target's are those over trees."""
        times = {}
        for model, curve in found.items():
            tree = model == "target"
            lines = curve.trees_by_context if tree else curve.by_context
            sizes = sorted({int(n) for _, line in lines for n, _ in line})
            ns = _rising([curve.ns(n, context, tree=tree) for n in sizes])
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
        )


def _rising(times: Sequence[float]) -> list[float]:
    """Times that do not fall with work: halfway between the largest so far and the least to come,
    so that a single odd one moves its neighbours little."""
    largest = accumulate(times, max)
    least = reversed(list(accumulate(reversed(times), min)))
    return [(low + high) / 2 for low, high in zip(least, largest, strict=True)]


def of_kept(costs: Costs) -> StepCosts:
    """What a kept probe says."""
    longest = costs.curves["target"].by_context[-1][0]
    return StepCosts.of(
        costs.curves,
        min(MIDDLING, longest),
        source=f"the probe of {costs.created_utc}",
        noisy=costs.quietness.noisy,
    )


def quick(workspace: Workspace, windows: Windows, positions: int) -> StepCosts:
    """Measure all decoders and heads of a workspace, in about two seconds.

    Args:
        windows: who watches the machine; it has to keep noisy times.
        positions: rows that all models are made for.

    Raises:
        UsageError: the models' context is too short.
    """
    grid = Grid(contexts=(1,), chains=(1,))
    context = min(MIDDLING, positions - grid.spare)
    if context < 1:
        raise UsageError(
            f"what forwards cost cannot be measured on models with {positions} positions: it takes"
            f" {grid.spare + 1}",
            "give a number in place of auto",
        )
    grid = Grid(contexts=(context,), chains=(1,))
    found = measure(workspace, windows, {}, grid, seed=0, rounds=ROUNDS, seconds=SECONDS)
    assert found is not None, "noisy times are kept"
    return StepCosts.of(
        curves(found.samples, workspace),
        context,
        source="measured as the run began",
        noisy=found.quietness.noisy,
    )
