"""Search for the best set of a fixed size, from the scores of sets tried one after another.

SWIFT uses it to choose the sublayers that drafting skips (Xia et al., ICLR 2025, arXiv:2410.06916).
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from specbench_cli.api import Field, MethodParams

T = TypeVar("T")


class SearchParams(MethodParams):
    """Parameters of a method that searches for a set."""

    every: int = Field(
        25,
        ge=1,
        description="Bayesian optimisation proposes every n-th set; the others are chosen at"
        " random (authors' code: 25)",
    )
    tries: int = Field(
        1000,
        ge=1,
        description="maximum number of sets that are scored in a run (authors' code: 1000)",
    )
    patience: int = Field(
        300,
        ge=1,
        description="number of sets in a row without improvement after which the search ends"
        " (authors' code: 300)",
    )
    enough: float = Field(
        0.93, ge=0, le=1, description="score at which the search ends (authors' code: 0.93)"
    )


@dataclass
class SetSearch(Generic[T]):
    """Search for the best subset of some things.

    Attributes:
        things: The things, in a fixed order.
        best: The best set so far, initially the given one. All sets have its size.
        params: Parameters: when the search ends, and how often Bayesian optimisation proposes a
            set. It uses a Gaussian process with an upper confidence bound over one number per
            thing. The things with the largest numbers are the set.
        tried: Each set with its score, and whether it was better than the best before.
    """

    items: Sequence[T]
    best: list[T]
    params: SearchParams
    tried: list[tuple[list[T], float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.is_finished:
            importlib.import_module("bayes_opt")  # import now: it takes seconds

    @property
    def is_finished(self) -> bool:
        """Return True if enough sets were tried."""
        lately = [better for *_, better in self.tried[-self.params.patience :]]
        worse = len(lately) == self.params.patience and not any(lately)
        return not self.best or len(self.tried) >= self.params.tries or worse

    def propose(self, key: int) -> list[T]:
        """Return the set to try next. `key` seeds random choices."""
        if self.tried and len(self.tried) % self.params.every == 0:
            return self.suggest()
        return self._select(random.Random(key).sample(range(len(self.items)), len(self.best)))

    def record_score(self, chosen: list[T], score: float, best_score: float) -> bool:
        """Record a set's score. Return True if it is the best now.

        Args:
            beside: Score of the best set on the same text.
        """
        self.tried.append((chosen, score, score > best_score))
        if score > best_score:
            self.best = chosen
        return score > best_score

    def suggest(self) -> list[T]:
        """Return the set that the optimiser would try next."""
        from bayes_opt import BayesianOptimization, acquisition

        names = [f"{at:04}" for at in range(len(self.items))]
        optimiser = BayesianOptimization(
            None,
            dict.fromkeys(names, (0.0, 1.0)),
            acquisition.UpperConfidenceBound(kappa=2.5),
            random_state=1,
            verbose=0,
            allow_duplicate_points=True,
        )
        optimiser.set_gp_params(alpha=1e-2)
        with redirect_stdout(None):  # it prints every duplicate, whatever `verbose` is
            for chosen, score, _ in self.tried:
                held = (float(thing in chosen) for thing in self.items)
                optimiser.register(dict(zip(names, held, strict=True)), score)
        point = optimiser.suggest()
        order = sorted(range(len(self.items)), key=lambda at: -point[names[at]])
        return self._select(order[: len(self.best)])

    def _select(self, numbers: Iterable[int]) -> list[T]:
        return [self.items[at] for at in sorted(numbers)]
