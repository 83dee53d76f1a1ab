"""A deliberately loose accept rule, which shows how much accuracy a lossy method can lose.

A draft token passes if the target gives it at least `share` of the probability of its own first
choice. So the committed tokens are no longer the target's, and answers get worse:

    specbench run --plugin benchmarks/studies/loose.py -m loose --set loose.share=0.001
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from methods.sps import Sps, SpsParams
from specbench_cli.api import AcceptRule, Field, MethodParams


class LooseParams(SpsParams):
    """Parameters of `Loose`."""

    share: float = Field(
        0.001,
        ge=0,
        le=1,
        description="Share of the likeliest token's probability; 0 accepts every token.",
    )


@dataclass(frozen=True)
class ProbabilityShare(AcceptRule):
    """Accept rule for tokens with at least `share` of the likeliest token's probability."""

    share: float
    name: ClassVar[str] = "share"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return p(x) >= share * max p for each token x."""
        return p.gather(-1, tokens[:, None])[:, 0] >= self.share * p.amax(-1)


class Loose(Sps):
    """Speculative sampling that also accepts tokens that are likely enough."""

    name: ClassVar[str] = "loose"
    Params: ClassVar[type[MethodParams]] = LooseParams
    params: LooseParams

    @property
    def accept(self) -> AcceptRule:
        """The accept rule; with `accept=random`, its random control."""
        return self.params.rule or ProbabilityShare(self.params.share)
