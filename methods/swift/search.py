"""Search for the best of all sets of one size, where a score is told for one set after another.

SWIFT searches so for the sublayers that drafting can do without (Xia et al., ICLR 2025,
arXiv:2410.06916).
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

    every: int = Field(25, ge=1, description="so often the optimiser proposes, else chance")
    tries: int = Field(1000, ge=1, description="sets that are scored in a run, at most")
    patience: int = Field(300, ge=1, description="sets in a row that are no better end the search")
    enough: float = Field(0.93, ge=0, le=1, description="a score that ends the search")


@dataclass
class SetSearch(Generic[T]):
    """The best set of some of several things, as far as sets were tried.

    Attributes:
        things: in an order.
        best: the best set; at first the one to begin with. All sets are as large.
        params: when it ends, and how often Bayesian optimisation proposes (Gaussian process, upper
            confidence bound, over a number for each thing of which the largest are the set).
        tried: each set with its score, and whether it was better than the best before.
    """

    things: Sequence[T]
    best: list[T]
    params: SearchParams
    tried: list[tuple[list[T], float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.over:
            importlib.import_module("bayes_opt")  # takes seconds, which no step is to pay

    @property
    def over(self) -> bool:
        """Whether enough sets were tried."""
        lately = [better for *_, better in self.tried[-self.params.patience :]]
        worse = len(lately) == self.params.patience and not any(lately)
        return not self.best or len(self.tried) >= self.params.tries or worse

    def propose(self, key: int) -> list[T]:
        """The set to try next; `key` decides where chance does."""
        if self.tried and len(self.tried) % self.params.every == 0:
            return self.suggest()
        return self._of(random.Random(key).sample(range(len(self.things)), len(self.best)))

    def tell(self, chosen: list[T], score: float, beside: float) -> bool:
        """Note a set's score; returns whether it is the best now.

        Args:
            beside: the score that the best one has where this one was scored.
        """
        self.tried.append((chosen, score, score > beside))
        if score > beside:
            self.best = chosen
        return score > beside

    def suggest(self) -> list[T]:
        """The set that the optimiser would try next."""
        from bayes_opt import BayesianOptimization, acquisition

        names = [f"{at:04}" for at in range(len(self.things))]
        optimiser = BayesianOptimization(
            None,
            dict.fromkeys(names, (0.0, 1.0)),
            acquisition.UpperConfidenceBound(kappa=2.5),
            random_state=1,
            verbose=0,
            allow_duplicate_points=True,
        )
        optimiser.set_gp_params(alpha=1e-2)
        with redirect_stdout(None):  # it tells of every duplicate, whatever `verbose` says
            for chosen, score, _ in self.tried:
                held = (float(thing in chosen) for thing in self.things)
                optimiser.register(dict(zip(names, held, strict=True)), score)
        point = optimiser.suggest()
        order = sorted(range(len(self.things)), key=lambda at: -point[names[at]])
        return self._of(order[: len(self.best)])

    def _of(self, numbers: Iterable[int]) -> list[T]:
        return [self.things[at] for at in sorted(numbers)]
