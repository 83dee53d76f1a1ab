"""Accept rules over spans: a span stands as a whole, or what the lossless rule takes of it does.

Plans read the rules and their parameters, so this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field

from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.verify.accept import AcceptRule

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_cli.engine.verify.random import Random


@dataclass(frozen=True, kw_only=True)
class SegmentRule(AcceptRule, ABC):
    """Base of rules over spans: a method finds a span's grade, the rule says what comes of it.

    Attributes:
        stands: whether the span that was judged last does.
    """

    accepted: bool = field(default=False, repr=False)
    pure: ClassVar[bool] = False

    @abstractmethod
    def accepts(self, grade: float) -> bool:
        """Whether a span of that grade stands."""

    def random_grade(self, random: Random, like: Tensor) -> float | None:
        """A span's grade by a coin, where that is what decides; None: the method finds one.

        Args:
            like: says dtype and device.
        """
        return None

    def judge(self, grade: float) -> Self:
        """The rule for the span at hand."""
        return replace(self, accepted=self.accepts(grade))

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """All of a span that stands, nothing of another."""
        import torch

        return torch.full_like(tokens, self.accepted, dtype=torch.bool)

    def __str__(self) -> str:
        told = (each.name for each in fields(self) if each.repr)
        return f"{self.name}({', '.join(f'{name}={getattr(self, name):g}' for name in told)})"


@dataclass(frozen=True, kw_only=True)
class RandomSegment(SegmentRule):
    """The control of rules over spans: a coin decides, whatever a span says."""

    rate: float
    name: ClassVar[str] = "random"

    def random_grade(self, random: Random, like: Tensor) -> float:
        """1 with probability `rate`, else 0; see `SpanRule`."""
        from specbench_cli.engine import host

        return float(host.number(random.bernoulli(like.new_full((1,), self.rate)).sum()))

    def accepts(self, grade: float) -> bool:
        """Where the coin says so."""
        return grade > 0

    @property
    def is_exact(self) -> bool:
        """At rate 0."""
        return self.rate <= 0


Delimiting = Annotated[str, BeforeValidator(lambda said: str(said).replace("\\n", "\n"))]
"""The type of a delimiter: `\\n`, as a command line has it, is a line's end."""


class SegmentParams(MethodParams):
    """Parameters of a method that writes span by span: a base of its own.

    The coin is its control: as many spans stand, whatever they say.
    """

    delimiter: Delimiting = Field(
        "\n", description="text that ends a span; empty: the cap alone does"
    )
    cap: int = Field(64, ge=1, description="tokens of a span at most")
    rate: float | None = Field(
        None, ge=0, le=1, description="share of what is judged that stands, by a coin: a control"
    )
    like: str | None = Field(
        None, description="the row whose rate, as measured, takes the place of `rate`"
    )

    @property
    def random_rule(self) -> RandomSegment | None:
        """What judges in the method's place, if anything does."""
        if self.rate is None and self.like is None:
            return None
        return RandomSegment(rate=self.rate or 0.0)

    def choose_rule(self, own: SegmentRule) -> SegmentRule:
        """What judges: the coin, if there is one and the method's own rule is not off."""
        return own if own.is_exact else self.random_rule or own
