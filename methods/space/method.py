"""SPACE: one target forward verifies a draft, and predicts the next draft at mask tokens.

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

    length: int = Field(
        5,
        ge=1,
        description="maximum number of draft tokens per step; each needs one mask (k in the"
        " paper: 5)",
    )
    head: str = Field(
        "auto", description="mask token: auto (the default one of the target), a folder or a hub id"
    )


class Space(Method):
    """SPACE: a target tuned to fill masks verifies a draft and drafts the next in one forward.

    Exact because no token attends to a mask, and each draft token is drawn from its mask's
    distribution q, which depends on no other draft token. It is accepted with probability
    min(1, p(x)/q(x)); a rejected one is replaced by a draw from norm(max(p - q, 0)). In greedy
    decoding and coupled sampling a draft token is accepted if and only if the target chooses it.
    All of this is relative to the target of the run, which is the fine-tuned model. Vanilla is that
    model's plain decoding, not that of the model it was tuned from.
    Differs from the authors' code, which at temperatures above 0 replaces a rejected token by a
    draw from p itself. This does not give the target's distribution. The first draft comes from
    masks after the prompt; their code starts with placeholder tokens. The mask is not a token of
    the vocabulary. No draft exceeds the remaining token budget.

    One step:
    1. The target's last forward also processed the masks after the last accepted token. Mask j
       predicts the token j places after the last committed one. Draw one token from each.
    2. (engine) One target forward over x, M..M, c_1, M..M, ..., c_k, M..M: the last committed
       token, the draft, and k masks after each. Masks attend to the text up to their token and to
       earlier masks of their group; no token attends to a mask. Mask j of c_i has the position of
       c_i plus j.
    3. (engine) Verify with the logits at the tokens. Keep the logits of the masks after the last
       accepted token for the next step, and drop all KV entries of masks.
    """

    name: ClassVar[str] = "space"
    family: ClassVar[str] = "the target itself, or a part of it"
    proposed_in: ClassVar[tuple[str, ...]] = ("yi2024generation",)
    Params: ClassVar[type[MethodParams]] = SpaceParams
    params: SpaceParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = MaskToken
    paper_params: ClassVar[Mapping[str, Any]] = {"length": 5}
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    @property
    def batches(self) -> bool:
        """False, because a forward with masks supports only one request."""
        return False

    def start(self, session: Session) -> None:
        """Add a group of masks after the last token and each draft token (step 2)."""
        self.masks = session.reserve(self.params.length, session.artifact(*self.artifacts()))

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: step 1 of the class docstring."""
        logits = self.masks.latest_logits()[: min(self.params.length, limit)]
        return draw_chain(session, logits)
