"""Accept rules over spans: a span stands as a whole, or what the lossless rule takes of it does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.types import Draft
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.engine.verify.random import Random


@dataclass(frozen=True, kw_only=True)
class SpanRule(AcceptRule, ABC):
    """Base of rules over spans: a method finds a span's grade, the rule says what comes of it.

    Attributes:
        stands: whether the span that was judged last does.
    """

    stands: bool = field(default=False, repr=False)
    pure: ClassVar[bool] = False

    @abstractmethod
    def enough(self, grade: float) -> bool:
        """Whether a span of that grade stands."""

    def toss(self, random: Random, like: Tensor) -> float | None:
        """A span's grade by a coin, where that is what decides; None: the method finds one.

        Args:
            like: says dtype and device.
        """
        return None

    def judge(self, grade: float) -> Self:
        """The rule for the span at hand."""
        return replace(self, stands=self.enough(grade))

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """All of a span that stands, nothing of another."""
        return torch.full_like(tokens, self.stands, dtype=torch.bool)

    def __str__(self) -> str:
        told = (each.name for each in fields(self) if each.repr)
        return f"{self.name}({', '.join(f'{name}={getattr(self, name):g}' for name in told)})"


@dataclass(frozen=True, kw_only=True)
class RandomSpan(SpanRule):
    """The control of rules over spans: a coin decides, whatever a span says."""

    rate: float
    name: ClassVar[str] = "random"

    def toss(self, random: Random, like: Tensor) -> float:
        """1 with probability `rate`, else 0; see `SpanRule`."""
        return float(host.number(random.bernoulli(like.new_full((1,), self.rate)).sum()))

    def enough(self, grade: float) -> bool:
        """Where the coin says so."""
        return grade > 0

    @property
    def off(self) -> bool:
        """At rate 0."""
        return self.rate <= 0


def mean_log_prob(rows: Tensor, draft: Draft) -> float:
    """Mean logarithm of the probability that the target gives a span's tokens, at temperature 1
    whatever it decodes at; minus infinity where it cannot say one of them.

    Args:
        rows: [m, V] or more, the target's logits in each token's place.
    """
    said = rows[: draft.nodes].double().log_softmax(-1).gather(1, draft.tokens[:, None])
    mean = float(host.number(said.mean()))
    return -math.inf if math.isnan(mean) else mean
