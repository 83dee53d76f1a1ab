"""SpecDec++: draft lengths that adapt to how likely the draft is to be rejected.

Kaixuan Huang, Xudong Guo, Mengdi Wang: SpecDec++: Boosting Speculative Decoding via Adaptive
Candidate Lengths, 2024, arXiv:2405.19715 (COLM 2025).
"""

from __future__ import annotations

from typing import ClassVar

from methods._heads.acceptance import AcceptanceHead
from specbench_cli.api import Claim, Draft, Field, Method, MethodParams, Outcome, Session, Trained
from specbench_cli.engine.drafting import lengths as stopping
from specbench_cli.engine.drafting.lengths import draft_chain


class SpecDecPPParams(MethodParams):
    """Parameters of `SpecDecPP`."""

    threshold: float = Field(
        stopping.REJECTION,
        ge=0,
        le=1,
        description="stop once a rejection is likelier than this (stop_threshold)",
    )
    min: int = Field(2, ge=1, description="draft tokens a step, at least (bound)")
    max: int = Field(20, ge=1, description="draft tokens a step, at most (bound)")
    head: str = Field("auto", description="the trained head: auto, its folder, or a hub id")


class SpecDecPP(Method):
    """SpecDec++: a trained head predicts acceptance, drafting stops once a rejection is likely.

    Exact as speculative sampling is: whether to go on is decided by the draft alone, and after a
    token is kept, so that the law of what is kept stays the q that verification is given.
    Differs from the authors' code: nothing in what is drafted.

    One step, with s = 1, the predicted chance that all tokens drafted so far stand:
    1. Feed the draft the newest token (at first, all that it has not seen); draw x_i. An EOS ends
       the draft.
    2. The draft has now made a row of x_{i-1}: s := s * head(row). The first token has none before
       it, and the newest is never scored.
    3. Draft another token while i < min, or while i < max and 1 - s <= threshold.
    4. (engine) One target forward over the last committed token and the draft; verify; commit.
    5. Forget the draft's rows of rejected tokens.
    """

    name: ClassVar[str] = "specdec++"
    Params: ClassVar[type[SpecDecPPParams]] = SpecDecPPParams
    params: SpecDecPPParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    claims: ClassVar[tuple[Claim, ...]] = tuple(
        Claim(
            speedup=speedup,
            models="Llama-2-chat 70B, draft 7B",
            task=task,
            temperature=1,
            hardware="2 x A100 80GB, bf16",
            source="figure in the repository of arXiv:2405.19715",
        )
        for speedup, task in (
            ("2.04x", "Alpaca"),
            ("2.23x", "HumanEval"),
            ("2.26x", "GSM8K"),
        )
    )
    citation: ClassVar[str] = """
        @misc{huang2024specdecpp,
          title = {{SpecDec++}: Boosting Speculative Decoding via Adaptive Candidate Lengths},
          author = {Huang, Kaixuan and Guo, Xudong and Wang, Mengdi},
          year = {2024},
          eprint = {2405.19715},
          archiveprefix = {arXiv},
          note = {COLM 2025},
        }
    """

    def artifacts(self) -> tuple[Trained, ...]:
        """The trained head."""
        return (Trained(AcceptanceHead, self.params.head),)

    def start(self, session: Session) -> None:
        """Prefill the draft."""
        self.model = session.draft()
        self.state = session.new_state(self.model)
        self.model.forward(session.since(0), self.state, logits_at=None)
        (head,) = map(session.artifact, self.artifacts())
        params = self.params
        self.length = stopping.AcceptanceHead(
            session, params.max, params.threshold, head, least=params.min
        )

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 to 3."""
        return draft_chain(session, self.model, self.state, self.length, limit)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Step 5: the last committed token has no row yet."""
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
