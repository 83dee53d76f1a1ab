"""A deliberately loose accept rule: what a lossy method has to lose on the embedded models.

A draft token passes if the target gives it at least `share` of the probability of its own first
choice. The target's tokens are then no longer what is committed, and answers get worse:

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
        0.001, ge=0, le=1, description="of the likeliest token's probability; 0 accepts everything"
    )


@dataclass(frozen=True)
class Share(AcceptRule):
    """Lets pass what is not too far behind the likeliest token."""

    share: float
    name: ClassVar[str] = "share"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(x) >= share max p."""
        return p.gather(-1, tokens[:, None])[:, 0] >= self.share * p.amax(-1)


class Loose(Sps):
    """sps, which takes what is likely enough beside what the target chooses."""

    name: ClassVar[str] = "loose"
    Params: ClassVar[type[MethodParams]] = LooseParams
    params: LooseParams

    @property
    def accept(self) -> AcceptRule:
        """Its rule; with `accept=random`, that one's control."""
        return self.params.rule or Share(self.params.share)
