"""Exact distribution of the result of random code, by enumeration of all outcomes.

Methods draw random numbers through two primitives only, `categorical` and `bernoulli`. Here both
follow a script of choices. Running the code once for every script, depth first, gives every outcome
with its probability.
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
"""Probability of each outcome."""

T = TypeVar("T")


class InvalidDistribution(Exception):
    """A draw from weights that are all 0, or contain NaN."""


class ScriptedRandom:
    """Random numbers that follow a script of choices. After the script's end, each draw takes
    option 0.

    Attributes:
        choices: (index of the chosen option, number of options) of each draw.
        weight: probability of all choices together.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.choices: list[tuple[int, int]] = []
        self.weight = 1.0

    def categorical(self, p: Tensor) -> Tensor:
        """Return the token that the script chooses for each distribution in `p`."""
        rows = p.reshape(-1, p.shape[-1]).tolist()
        return host.ids([self._choose(row) for row in rows], p.device).view(p.shape[:-1])

    def bernoulli(self, a: Tensor) -> Tensor:
        """Return for each probability in `a` whether its test succeeds, as the script chooses."""
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
    """There are more outcomes than the limit."""


ESTIMATE_EVERY, ESTIMATE_MARGIN = 10, 4
"""Number of outcomes between two estimates of the total, and the factor by which an estimate must
exceed the limit to stop."""


def enumerate_outcomes(
    run: Callable[[Random], T], limit: int | None = None
) -> Iterator[tuple[T, float]]:
    """Yield every outcome of random code and its probability, depth first.

    Args:
        run: function that draws from the given random numbers and returns the outcome.
        limit: maximum number of outcomes; default: no limit.

    Raises:
        TooManyOutcomes: there are more, or by an estimate there will be many more.
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
    """Estimate the explored share of the tree of choices, as if all branches had equal size."""
    share, width = 0.0, 1.0
    for choice, possible in made:
        width /= possible
        share += choice * width
    return share + width


def sum_weights(weighted: Iterable[tuple[Hashable, float]]) -> Distribution:
    """Sum the weights of equal outcomes."""
    distribution: dict[Hashable, float] = defaultdict(float)
    for value, weight in weighted:
        distribution[value] += weight
    return distribution


def compute_distribution(run: Callable[[Random], Hashable]) -> Distribution:
    """Return the exact distribution of the outcome of `run`."""
    return sum_weights(enumerate_outcomes(run))


def total_variation(a: Distribution, b: Distribution) -> float:
    """Return the total variation distance of two distributions, which need not sum to 1."""
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in {*a, *b}) / 2
