"""Accept rules for segments. An accepted segment is kept as a whole.

Of a rejected segment, only the tokens that the lossless rule accepts are kept.

Planning code imports the rules and parameters, so this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field

from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.former_names import renamed_members

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_cli.engine.verify.random import Random


@renamed_members(stands="accepted", enough="accepts", toss="random_grade")
@dataclass(frozen=True, kw_only=True)
class SegmentRule(AcceptRule, ABC):
    """Base of accept rules for segments: the method computes a grade, the rule decides by it.

    Attributes:
        accepted: True if the last judged segment was accepted.
    """

    accepted: bool = field(default=False, repr=False)
    pure: ClassVar[bool] = False

    @abstractmethod
    def accepts(self, grade: float) -> bool:
        """Return True if a segment with this grade is accepted."""

    def random_grade(self, random: Random, like: Tensor) -> float | None:
        """Return a random grade if the rule decides at random. None means that the method computes
        one.

        Args:
            like: Tensor with the dtype and device to use.
        """
        return None

    def judge(self, grade: float) -> Self:
        """Return the rule with its decision on the current segment."""
        return replace(self, accepted=self.accepts(grade))

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return True for all tokens of an accepted segment, and False for all others."""
        import torch

        return torch.full_like(tokens, self.accepted, dtype=torch.bool)

    def __str__(self) -> str:
        names = (each.name for each in fields(self) if each.repr)
        return f"{self.name}({', '.join(f'{name}={getattr(self, name):g}' for name in names)})"


@dataclass(frozen=True, kw_only=True)
class RandomSegment(SegmentRule):
    """Control of segment rules: accepts at random with a fixed rate."""

    rate: float
    name: ClassVar[str] = "random"

    def random_grade(self, random: Random, like: Tensor) -> float:
        """Return 1 with probability `rate`, else 0."""
        from specbench_cli.engine import host

        return float(host.number(random.bernoulli(like.new_full((1,), self.rate)).sum()))

    def accepts(self, grade: float) -> bool:
        """Return True for grade 1."""
        return grade > 0

    @property
    def is_exact(self) -> bool:
        """True at rate 0."""
        return self.rate <= 0


DelimiterText = Annotated[str, BeforeValidator(lambda said: str(said).replace("\\n", "\n"))]
r"""Type of a delimiter parameter. `\n` from the command line means a newline."""


@renamed_members(coin="random_rule", ruled="choose_rule")
class SegmentParams(MethodParams):
    """Parameters of a method that writes segment by segment. List it first among the base classes.

    With `rate` or `like`, segments are accepted at random: a control.
    """

    delimiter: DelimiterText = Field(
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
        """The random rule that replaces the method's rule. None without `rate` and `like`."""
        if self.rate is None and self.like is None:
            return None
        return RandomSegment(rate=self.rate or 0.0)

    def choose_rule(self, own: SegmentRule) -> SegmentRule:
        """Return the random rule if there is one and the method's own rule is not exact, else
        `own`."""
        return own if own.is_exact else self.random_rule or own
