"""SPACE: the target answers mask tokens while it verifies what they said before.

Hanling Yi, Feng Lin, Hongbin Li, Peiyang Ning, Xiaotian Yu, Rong Xiao: Generation Meets
Verification: Accelerating Large Language Model Inference with Smart Parallel Auto-Correct Decoding,
Findings of ACL 2024, arXiv:2402.11809.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from methods.space.head import MaskToken
from specbench_cli.api import (
    Artifact,
    Draft,
    Field,
    Method,
    MethodParams,
    Session,
    draw_chain,
)


class SpaceParams(MethodParams):
    """Parameters of `Space`."""

    length: int = Field(5, ge=1, description="draft tokens a step, at most a mask each (k)")
    head: str = Field("auto", description="auto: the target's own mask token; else its folder")


class Space(Method):
    """SPACE: a target tuned to fill mask tokens verifies a draft and makes the next in one forward.

    Exact because no row of the text sees a mask, and each draft token is drawn from its mask's
    distribution
    q, which knows no other draft token: it stands with probability min(1, p(x)/q(x)), a rejected
    one is replaced by a draw from norm(max(p - q, 0)). In greedy and coupled decoding a draft token
    stands iff it is the target's own choice. All of it relative to the target of the run, which is
    the fine-tuned model: vanilla beside it is that model's own plain decoding, and the model that
    it was tuned from is another one.
    Differs from the authors' code: at temperatures above 0 theirs replaces a rejected token by a
    draw from p itself, which is not the target's distribution; the first candidates come with the
    prompt, where theirs are dummies; the mask is no token of the vocabulary; nothing is drafted
    past the budget.

    One step:
    1. The masks behind the last row that stood went through the target's last forward: mask j says
       the token j places behind the last committed one. Draw a token from each.
    2. (engine) One target forward over x, M..M, c_1, M..M, ..., c_k, M..M: the last committed
       token, the draft, and k masks behind each. A group of masks sees the text up to its token and
       itself in order; no token sees a mask; mask j of c_i stands at the position of c_i + j.
    3. (engine) Verify by the rows of the tokens; keep what the group behind the last one that stood
       said, for the next step, and no row of a mask.
    """

    name: ClassVar[str] = "space"
    family: ClassVar[str] = "the target itself, or a part of it"
    proposed_in: ClassVar[tuple[str, ...]] = ("yi2024generation",)
    Params: ClassVar[type[MethodParams]] = SpaceParams
    params: SpaceParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = MaskToken
    paper: ClassVar[Mapping[str, Any]] = {"length": 5}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    @property
    def batches(self) -> bool:
        """No: a forward with masks is one request's."""
        return False

    def start(self, session: Session) -> None:
        """Have a group of masks stand behind the last token and each draft token (step 2)."""
        self.masks = session.reserve(self.params.length, session.artifact(*self.artifacts()))

    def propose(self, session: Session, limit: int) -> Draft:
        """Step 1."""
        said = self.masks.newest()[: min(self.params.length, limit)]
        return draw_chain(session, said)
