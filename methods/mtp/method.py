"""Multi-token prediction (MTP): a layer trained with the target drafts a chain.

DeepSeek-AI: DeepSeek-V3 Technical Report, arXiv:2412.19437; checkpoints of XiaomiMiMo/MiMo and
others also contain such layers.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import field_validator

from methods.mtp.head import MtpHead
from specbench_cli.api import (
    Artifact,
    Draft,
    Field,
    LengthParams,
    LengthRule,
    Levels,
    Method,
    MethodParams,
    Outcome,
    Session,
    create_length_rule,
)


class MtpParams(LengthParams):
    """Parameters of `Mtp`."""

    length: int | LengthRule = Field(
        3,
        description="number of draft tokens per step, each from one forward of the layer, or"
        " the rule that decides it",
    )
    head: str = Field(
        "auto",
        description="prediction layer: auto (the default one of the target), a folder or a hub id",
    )

    @field_validator("length")
    @classmethod
    def _needs_no_draft_model(cls, value: int | LengthRule) -> int | LengthRule:
        if value == "acceptance-head":
            raise ValueError("'acceptance-head' needs a draft model; use it with sps or specdec++")
        return value


class Mtp(Method):
    """Multi-token prediction (MTP): a layer trained with the target drafts a chain of tokens.

    Lossless because each token is drawn from the layer's distribution q, and verified like the
    token of a draft model. A token x is accepted with probability min(1, p(x)/q(x)), where p is the
    target's distribution. A rejected token is replaced by a draw from norm(max(p - q, 0)). In
    greedy decoding and coupled sampling (all methods share the Gumbel noise), x is accepted if and
    only if the target chooses x.
    Differs from the report: one layer drafts all tokens, as in engines that serve such checkpoints,
    although it may have been trained for the first token only.

    One step:
    1. The layer reads the new committed tokens, each with the target's hidden state of the previous
       token. Drop the layer's KV entries of earlier draft tokens.
    2. Draw `length` tokens, or fewer if the length rule stops earlier. For each next token, the
       layer reads the last drafted token with its own previous output.
    3. (engine) One target forward over the last committed token and the draft; verify; commit.
    """

    name: ClassVar[str] = "mtp"
    family: ClassVar[str] = "a head on the target's hidden states"
    proposed_in: ClassVar[tuple[str, ...]] = ("deepseek2024v3",)
    Params: ClassVar[type[MethodParams]] = MtpParams
    params: MtpParams
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    Head: ClassVar[type[Artifact]] = MtpHead
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})

    def start(self, session: Session) -> None:
        """Capture the hidden states that the layer reads."""
        head = session.artifact(*self.artifacts())
        session.capture_layers(head.captured_layers)
        fed = self.params.levels - 1
        self.levels = Levels(session, head, session.new_state(head, slack=fed))
        self.length = create_length_rule(self.params, session, model=head)

    def propose(self, session: Session, limit: int) -> Draft:
        """Return the draft of one decoding step: steps 1 and 2 of the class docstring."""
        self.length.begin()
        limit = min(limit, self.length.most)
        if limit < 1:
            return session.chain(())
        levels = self.levels
        # Step 1: Run the layer on the target's hidden states of committed tokens.
        out = levels.begin(session.pending_features(levels.state.length()))
        picks = [session.pick(out)]
        # Step 2: From the second draft token on, the layer reads its own output in place of the
        # target's hidden states.
        while self.length.should_continue(out, picks[-1]) and len(picks) < limit:
            out = levels.feed(picks[-1][0], (0,))
            picks.append(session.pick(out, len(picks)))
        levels.drop()
        return session.chain_of_picks(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Pass the outcome of the verification to the rule that chooses the draft length."""
        self.length.observe(outcome)
