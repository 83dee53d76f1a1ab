"""Typical acceptance of a draft model's chain.

Tianle Cai, Yuhong Li, Zhengyang Geng, Hongwu Peng, Jason D. Lee, Deming Chen, Tri Dao: Medusa:
Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, ICML 2024,
arXiv:2401.10774, section 2.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specbench_cli.api import (
    NEVER,
    AcceptRule,
    DraftModelMethod,
    Field,
    MethodParams,
    Typical,
)


class TypicalParams(MethodParams):
    """Parameters of `TypicalAcceptance`."""

    length: int = Field(5, ge=1, description="draft tokens a step")
    epsilon: float = Field(
        0.09, ge=0, description="a token of at least this probability stands, however sure the"
        " target is; off: 1, with delta 1e9"
    )  # fmt: skip
    delta: float = Field(
        0.3, ge=0, description="a token stands above this part of exp(-entropy): the less sure the"
        " target is, the less a token needs"
    )  # fmt: skip


class TypicalAcceptance(DraftModelMethod):
    """Typical: accepts draft tokens above a probability threshold that depends on the entropy.

    Not exact: a token that the lossless rule rejects passes if p(x) > min(epsilon, delta exp(-H))
    with the target's distribution p, under the run's temperature and cuts, and its entropy H. At
    its off position, epsilon 1 and delta 1e9, nothing passes, and it makes the tokens of `sps`.
    Differs from the paper: a draft model drafts, not heads; where the paper takes the first token
    of a step in any case, here the lossless rule is asked first, and what neither takes is replaced
    by its token.

    One step:
    1. (base) Feed the draft its pending tokens, and draw `length` tokens x from it.
    2. (engine) One target forward over the last committed token and the draft. A token x stands if
       the lossless rule takes it, or if p(x) > min(epsilon, delta exp(-H)).
    3. (engine) In place of the first that does not stand: the lossless rule's token.
    4. (base) Forget the draft's rows of rejected tokens.
    """

    name: ClassVar[str] = "typical"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("cai2024medusa",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[TypicalParams]] = TypicalParams
    params: TypicalParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})
    relative: ClassVar[str | None] = "sps"
    off: ClassVar[Mapping[str, Any]] = {"epsilon": 1.0, "delta": NEVER}

    @property
    def accept(self) -> AcceptRule:
        """Step 2, of what the lossless rule rejects."""
        return Typical(self.params.epsilon, self.params.delta)
