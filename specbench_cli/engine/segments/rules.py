"""Accept rules for segments, and the parameters of methods that draft segments.

A rule accepts or rejects a drafted segment as a whole. Of a rejected segment, only the tokens that
the lossless rule accepts are kept.

Planning code imports this module, so it does not import torch at the top.
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
    """Base class of accept rules for segments.

    The method grades a segment, for example by asking the target. The rule decides by the grade.

    Attributes:
        accepted: True if the last judged segment was accepted.
    """

    accepted: bool = field(default=False, repr=False)
    pure: ClassVar[bool] = False

    @abstractmethod
    def accepts(self, grade: float) -> bool:
        """Return True if a segment with this grade is accepted."""

    def random_grade(self, random: Random, like: Tensor) -> float | None:
        """Return a random grade. Return None if the method must grade the segment itself.

        Args:
            like: Tensor with the dtype and device to use.
        """
        return None

    def judge(self, grade: float) -> Self:
        """Return a copy of the rule with its decision on a segment of this grade."""
        return replace(self, accepted=self.accepts(grade))

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return True for each token if the segment was accepted, else False."""
        import torch

        return torch.full_like(tokens, self.accepted, dtype=torch.bool)

    def __str__(self) -> str:
        names = (each.name for each in fields(self) if each.repr)
        return f"{self.name}({', '.join(f'{name}={getattr(self, name):g}' for name in names)})"


@dataclass(frozen=True, kw_only=True)
class RandomSegment(SegmentRule):
    """Control for segment rules: it accepts segments at random, at a fixed rate."""

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


DelimiterText = Annotated[str, BeforeValidator(lambda value: str(value).replace("\\n", "\n"))]
r"""Type of a delimiter parameter. The characters `\n` on the command line become a newline."""


@renamed_members(coin="random_rule", ruled="choose_rule")
class SegmentParams(MethodParams):
    """Parameters of a method that drafts segments. List this class first among the base classes.

    With `rate` or `like`, the method accepts segments at random and serves as a control.
    """

    delimiter: DelimiterText = Field(
        "\n", description="text that ends a segment. If empty, only `cap` ends segments"
    )
    cap: int = Field(64, ge=1, description="maximum number of tokens of a segment")
    rate: float | None = Field(
        None,
        ge=0,
        le=1,
        description="probability of accepting a segment at random, as a control. By default, the"
        " method's own rule decides",
    )
    like: str | None = Field(
        None,
        description="label of a method in the run whose measured acceptance rate replaces `rate`",
    )

    @property
    def random_rule(self) -> RandomSegment | None:
        """Random rule that replaces the method's rule. None if neither `rate` nor `like` is set."""
        if self.rate is None and self.like is None:
            return None
        return RandomSegment(rate=self.rate or 0.0)

    def choose_rule(self, own: SegmentRule) -> SegmentRule:
        """Return the random rule if there is one, else the method's own rule.

        An exact rule is never replaced.
        """
        return own if own.is_exact else self.random_rule or own
