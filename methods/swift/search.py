"""Search for the subset with the best score, among subsets of a fixed size.

SWIFT searches for the sublayers that drafting skips (Xia et al., ICLR 2025, arXiv:2410.06916).
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
    """Parameters of a method that searches for the best subset."""

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
    """Search for the best subset of some items. Each step proposes a set, and records its score.

    Sets are proposed at random, or by Bayesian optimisation: a Gaussian process with an upper
    confidence bound assigns a number to each item, and the items with the largest numbers are the
    set.

    Attributes:
        items: All items, in a fixed order.
        best: Best set so far. The caller passes the first set. All sets have the same size.
        params: Parameters of the search.
        tried: Tried sets, as (set, score, whether the set was the best so far).
    """

    items: Sequence[T]
    best: list[T]
    params: SearchParams
    tried: list[tuple[list[T], float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.is_finished:
            importlib.import_module("bayes_opt")  # takes seconds, so import it before decoding

    @property
    def is_finished(self) -> bool:
        """True if enough sets were tried."""
        lately = [better for *_, better in self.tried[-self.params.patience :]]
        worse = len(lately) == self.params.patience and not any(lately)
        return not self.best or len(self.tried) >= self.params.tries or worse

    def propose(self, key: int) -> list[T]:
        """Return the set to try next. `key` is the random seed."""
        if self.tried and len(self.tried) % self.params.every == 0:
            return self.suggest()
        return self._select(random.Random(key).sample(range(len(self.items)), len(self.best)))

    def record_score(self, chosen: list[T], score: float, best_score: float) -> bool:
        """Record the score of a set. Return True if the set is now the best one.

        Args:
            chosen: The tried set.
            score: Score of the tried set.
            best_score: Score of the best set so far, on the same text.
        """
        self.tried.append((chosen, score, score > best_score))
        if score > best_score:
            self.best = chosen
        return score > best_score

    def suggest(self) -> list[T]:
        """Return the set that Bayesian optimisation proposes next."""
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
        with redirect_stdout(None):  # the library prints duplicates even with verbose=0
            for chosen, score, _ in self.tried:
                held = (float(thing in chosen) for thing in self.items)
                optimiser.register(dict(zip(names, held, strict=True)), score)
        point = optimiser.suggest()
        order = sorted(range(len(self.items)), key=lambda at: -point[names[at]])
        return self._select(order[: len(self.best)])

    def _select(self, numbers: Iterable[int]) -> list[T]:
        return [self.items[at] for at in sorted(numbers)]
