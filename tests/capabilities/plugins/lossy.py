"""A plug-in with its own accept rule, and the control of that rule."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specbench_cli.api import AcceptRule, Draft, Field, Method, MethodParams, Session


@dataclass(frozen=True)
class Likeliest(AcceptRule):
    """Accept tokens that are among the target's most likely ones."""

    most: int
    name: ClassVar[str] = "likeliest"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        return (p > p.gather(-1, tokens[:, None])).sum(-1) < self.most


class LossyParams(MethodParams):
    most: int = Field(3, ge=1, description="how many of the target's likeliest tokens pass")
    control: float | None = Field(None, ge=0, le=1, description="instead: the rate of what passes")


class Lossy(Method):
    """Lossy: copies what followed the newest token before, and accepts likely tokens."""

    name, Params = "lossy", LossyParams

    @property
    def accept(self) -> AcceptRule:
        rule, rate = Likeliest(self.params.most), self.params.control
        return rule if rate is None else rule.control(rate)

    def propose(self, session: Session, limit: int) -> Draft:
        text = list(session.tokens())
        last = max((at for at, token in enumerate(text[:-1]) if token == text[-1]), default=-1)
        return session.chain(text[last + 1 : last + 1 + min(4, limit)])
