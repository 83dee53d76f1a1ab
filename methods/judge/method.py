"""Judge Decoding: a head on the target's hidden states decides which draft tokens are harmless.

Gregor Bachmann et al.: Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model
Alignment, ICLR 2025, arXiv:2501.19309.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from methods.judge.head import JudgeHead
from specbench_cli.api import (
    NORMED,
    AcceptRule,
    Artifact,
    DraftContext,
    DraftModelMethod,
    Field,
    MethodFault,
    MethodParams,
    Random,
    Session,
)


class JudgeParams(MethodParams):
    """Parameters of `Judge`."""

    length: int = Field(5, ge=1, description="number of draft tokens per step")
    threshold: float = Field(
        0.5,
        ge=0,
        le=1,
        description="minimum probability that a token is harmless; 1 makes the method lossless",
    )
    head: str = Field(
        "auto", description="judge: auto (the default one of the target), a folder or a hub id"
    )


@dataclass(frozen=True)
class JudgeVerifier(AcceptRule):
    """Accept rule that accepts a draft token if the judge predicts that it is harmless."""

    threshold: float
    head: JudgeHead | None = field(default=None, repr=False, compare=False)
    name: ClassVar[str] = "judge"
    pure: ClassVar[bool] = False

    def relaxed_mask(self, places: DraftContext, random: Random) -> Tensor:
        """Return sigmoid(w h + b) > threshold for each draft token, where h is the target's hidden
        state at the token.
        """
        if self.head is None or places.features is None:
            raise MethodFault(
                "a judge needs its head and the target's hidden states (`session.capture_layers`)"
            )
        return self.head(places.features) > self.threshold

    @property
    def is_exact(self) -> bool:
        """Return True if the threshold is 1.

        Then the judge accepts no tokens that the lossless rule rejects.
        """
        return self.threshold >= 1

    @property
    def stricter(self) -> JudgeVerifier:
        """Rule with a higher threshold, half way between the threshold of this rule and 1."""
        return replace(self, threshold=(1 + self.threshold) / 2)


class Judge(DraftModelMethod):
    """Judge: a small head on the target's hidden states accepts harmless draft tokens.

    Not exact: a token that the lossless rule rejects is accepted if the head predicts that it is
    harmless with a probability above `threshold`. The head is one linear layer on the target's
    hidden state at that token. With threshold 1 the method generates the same tokens as standard
    speculative sampling (`sps`).
    Differs from the paper: the head reads the hidden state after the final norm. Its training
    labels are found automatically, not annotated by people: a draft token is harmless if it does
    not make the target's answer worse (AutoJudge: Garipov et al., NeurIPS 2025, arXiv:2504.20039).
    The command `specbench train judge` trains the head.

    One step:
    1. (base) The draft model processes its pending tokens. Draw `length` tokens x from it.
    2. (engine) One target forward over the last committed token and the draft. x is accepted if the
       lossless rule accepts it, or if sigmoid(w h + b) > threshold, where h is the hidden state at
       x.
    3. (engine) Replace the first rejected token by the lossless rule's token.
    4. (base) Drop the draft model's KV entries of rejected tokens.
    """

    name: ClassVar[str] = "judge"
    family: ClassVar[str] = "a draft model"
    proposed_in: ClassVar[tuple[str, ...]] = ("bachmann2025judge",)
    builds_on: ClassVar[tuple[str, ...]] = ("garipov2025autojudge",)
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[JudgeParams]] = JudgeParams
    params: JudgeParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    Head: ClassVar[type[Artifact]] = JudgeHead
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})
    lossless_counterpart: ClassVar[str | None] = "sps"
    exact_params: ClassVar[Mapping[str, Any]] = {"threshold": 1.0}
    judge_head: JudgeHead | None = None

    @property
    def accept(self) -> AcceptRule:
        """Rule of step 2 of the class docstring.

        It may accept tokens that the lossless rule rejects.
        """
        return JudgeVerifier(self.params.threshold, self.judge_head)

    def start(self, session: Session) -> None:
        """Prefill the draft model, and capture the target's hidden states that the judge reads."""
        (wanted,) = self.artifacts()
        self.judge_head = session.artifact(wanted)
        session.capture_layers((NORMED,))
        super().start(session)
