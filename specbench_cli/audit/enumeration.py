"""Chance that walks every outcome: the exact distribution of whatever a piece of code returns.

A method sees chance through two primitives only, `categorical` and `bernoulli`. The oracle answers
both from a script of choices; running the code once for every script, depth first, gives every
outcome with its probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.verify.random import Random

Distribution = Mapping[Hashable, float]
"""The probability of each outcome."""

T = TypeVar("T")


class InvalidDistribution(Exception):
    """A draw from weights that are no distribution: none is above 0, or one is not a number."""


class ScriptedRandom:
    """Chance that follows a script of choices, and the first possible one where the script ends.

    made: (choice, number of possible ones) of every choice made; weight: their probability.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.choices: list[tuple[int, int]] = []
        self.weight = 1.0

    def categorical(self, p: Tensor) -> Tensor:
        """See `Random`."""
        rows = p.reshape(-1, p.shape[-1]).tolist()
        return host.ids([self._choose(row) for row in rows], p.device).view(p.shape[:-1])

    def bernoulli(self, a: Tensor) -> Tensor:
        """See `Random`."""
        runs, sure = [], 1.0
        for chance in a.tolist():
            runs.append(sure * (1.0 - chance))
            sure *= chance
        successes = self._choose([*runs, sure])
        return torch.from_numpy(np.arange(len(runs)) < successes)

    def _choose(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0.0]
        if not possible or any(weight != weight for weight in weights):
            raise InvalidDistribution
        choice = self.script[len(self.choices)] if len(self.choices) < len(self.script) else 0
        self.choices.append((choice, len(possible)))
        self.weight *= weights[possible[choice]]
        return possible[choice]


class TooManyOutcomes(Exception):
    """More outcomes than are walked."""


ESTIMATE_EVERY, ESTIMATE_MARGIN = 10, 4
"""Outcomes after which their number is guessed, from how much of the tree of choices they took; and
by how much the guess must exceed what is walked for the walk to be given up."""


def enumerate_outcomes(
    run: Callable[[Random], T], limit: int | None = None
) -> Iterator[tuple[T, float]]:
    """Every outcome of what `run` draws, depth first, with its probability.

    Args:
        most: how many are walked; default: all.
    Raises:
        TooMany: there are more, or will be by far.
    """
    script: list[int] = []
    n = 0
    while True:
        oracle = ScriptedRandom(script)
        value = run(oracle)
        made, n = oracle.choices, n + 1
        if limit is not None and (
            n > limit
            or (n % ESTIMATE_EVERY == 0 and n > ESTIMATE_MARGIN * limit * _explored_share(made))
        ):
            raise TooManyOutcomes
        yield value, oracle.weight
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return
        script = [choice for choice, _ in made]
        script[-1] += 1


def _explored_share(made: Sequence[tuple[int, int]]) -> float:
    """How much of the tree of choices lies up to here, all branches of a node being alike."""
    share, width = 0.0, 1.0
    for choice, possible in made:
        width /= possible
        share += choice * width
    return share + width


def sum_weights(weighted: Iterable[tuple[Hashable, float]]) -> Distribution:
    """The distribution that weighted outcomes make."""
    distribution: dict[Hashable, float] = defaultdict(float)
    for value, weight in weighted:
        distribution[value] += weight
    return distribution


def compute_distribution(run: Callable[[Random], Hashable]) -> Distribution:
    """The exact distribution of what `run` returns."""
    return sum_weights(enumerate_outcomes(run))


def total_variation(a: Distribution, b: Distribution) -> float:
    """Total variation between two distributions; a distribution that does not sum to 1 is that much
    further off."""
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in {*a, *b}) / 2
