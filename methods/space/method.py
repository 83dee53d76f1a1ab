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
    """SPACE: the target is tuned to fill masks. One forward verifies a draft and predicts the next.

    Lossless because no token attends to a mask, and each draft token is drawn from its mask's
    distribution q, which depends on no other draft token. A token x is accepted with probability
    min(1, p(x)/q(x)), where p is the target's distribution. A rejected token is replaced by a draw
    from norm(max(p - q, 0)). In greedy decoding and coupled sampling (all methods share the Gumbel
    noise) a draft token is accepted if and only if the target chooses it. The target is the
    fine-tuned model. The baseline vanilla decodes with the fine-tuned model too, not with the
    original model.
    Differs from the authors' code, which at temperatures above 0 replaces a rejected token by a
    draw from p itself. Its outputs therefore do not follow the target's distribution. The first
    draft comes from masks after the prompt. The authors' code starts with placeholder tokens. The
    mask is not a token of the vocabulary. No draft exceeds the remaining token budget.

    One step:
    1. The target's last forward also processed the masks after the last accepted token. Mask j = 1,
       2, ... predicts the token j places after the last committed token. Draw one token from the
       distribution at each mask.
    2. (engine) One target forward over x, M..M, c_1, M..M, ..., c_k, M..M. x is the last committed
       token, c_1, ..., c_k is the draft, and k masks M follow each token. A mask attends to the
       text up to its token, and to earlier masks after the same token. No token attends to a mask.
       Mask j of c_i has the position of c_i plus j.
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
        """Return False, because a forward with masks supports only one request."""
        return False

    def start(self, session: Session) -> None:
        """Append masks to the last token and to each draft token (step 2 of the class
        docstring).
        """
        self.masks = session.reserve(self.params.length, session.artifact(*self.artifacts()))

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: step 1 of the class docstring."""
        logits = self.masks.latest_logits()[: min(self.params.length, limit)]
        return draw_chain(session, logits)
