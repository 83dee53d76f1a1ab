"""Accept rules for segments, and the parameters of methods that draft segments.

A segment is a chunk of text, such as a reasoning step. A rule accepts or rejects a drafted segment
as a whole. If the segment is rejected, only the tokens that the lossless rule accepts are kept.

Code that only plans a run imports this module, so it does not import torch at the top.
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

    The method grades a segment, for example by a question to the target. The rule accepts or
    rejects the segment according to the grade.

    Attributes:
        accepted: True if the rule accepted the last segment.
    """

    accepted: bool = field(default=False, repr=False)
    pure: ClassVar[bool] = False

    @abstractmethod
    def accepts(self, grade: float) -> bool:
        """Return True if a segment with this grade is accepted."""

    def random_grade(self, random: Random, like: Tensor) -> float | None:
        """Return a random grade. Return None if the method must grade the segment itself.

        Args:
            like: Tensor whose dtype and device the function uses.
        """
        return None

    def judge(self, grade: float) -> Self:
        """Return a copy of the rule that has decided about a segment with this grade."""
        return replace(self, accepted=self.accepts(grade))

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return a tensor with True for each token if the segment was accepted, otherwise False."""
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
        """Return 1 with probability `rate`, otherwise 0."""
        from specbench_cli.engine import host

        return float(host.number(random.bernoulli(like.new_full((1,), self.rate)).sum()))

    def accepts(self, grade: float) -> bool:
        """Return True if the random grade is 1."""
        return grade > 0

    @property
    def is_exact(self) -> bool:
        """True if the rule never accepts a segment, because `rate` is 0. The method is then
        lossless.
        """
        return self.rate <= 0


DelimiterText = Annotated[str, BeforeValidator(lambda value: str(value).replace("\\n", "\n"))]
r"""Type of a delimiter parameter. The characters `\n` on the command line become a newline."""


@renamed_members(coin="random_rule", ruled="choose_rule")
class SegmentParams(MethodParams):
    """Parameters of a method that drafts segments. List this class first among the base classes.

    If `rate` or `like` is set, the method accepts segments at random and serves as a control.
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
        """Random rule that replaces the method's own rule. None if neither `rate` nor `like` is
        set.
        """
        if self.rate is None and self.like is None:
            return None
        return RandomSegment(rate=self.rate or 0.0)

    def choose_rule(self, own: SegmentRule) -> SegmentRule:
        """Return the random rule if the parameters select it, otherwise the method's own rule.

        A lossless rule is never replaced.
        """
        return own if own.is_exact else self.random_rule or own
