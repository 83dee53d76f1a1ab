"""A multi-token-prediction layer, drafting a chain as EAGLE does.

DeepSeek-AI: DeepSeek-V3 Technical Report, arXiv:2412.19437; layers of this form also ship with
XiaomiMiMo/MiMo and others.
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
        description="draft tokens a step, one forward of the layer each, or the rule that decides",
    )
    head: str = Field("auto", description="auto: the target's own; else the folder of one")

    @field_validator("length")
    @classmethod
    def _needs_no_draft_model(cls, value: int | LengthRule) -> int | LengthRule:
        if value == "acceptance-head":
            raise ValueError("'acceptance-head' reads a draft model's rows: for sps and specdec++")
        return value


class Mtp(Method):
    """Multi-token prediction: a layer trained with the target drafts a chain, fed its own output.

    Exact because each token is drawn from the layer's distribution q, or taken without a draw, and
    stands as a draft model's would: with probability min(1, p(x)/q(x)), a rejected one replaced by
    a draw from norm(max(p - q, 0)); in greedy and coupled decoding iff it is the target's own
    choice.
    Differs from the report: one layer makes all tokens of a draft, as engines that serve such
    checkpoints use it, though it may have been trained for the first of them alone.

    One step:
    1. Feed the layer the committed tokens that it has not read, each beside the target's true row
       of the token before; what it drafted of them before is forgotten.
    2. Draw `length` tokens, or as many as its rule asks for (see `sps`); each further one is fed
       beside the row that the layer left last.
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
        """Have the target keep what the layer reads."""
        head = session.artifact(*self.artifacts())
        session.tap(head.taps)
        fed = self.params.levels - 1
        self.levels = Levels(session, head, session.new_state(head, slack=fed))
        self.length = create_length_rule(self.params, session, model=head)

    def propose(self, session: Session, limit: int) -> Draft:
        """Steps 1 and 2."""
        self.length.begin()
        limit = min(limit, self.length.most)
        if limit < 1:
            return session.chain(())
        levels = self.levels
        # 1. True rows of what was committed.
        out = levels.begin(session.unread(levels.state.length()))
        picks = [session.pick(out)]
        # 2. From here on the layer reads its own output, as if it were the target's.
        while self.length.should_continue(out, picks[-1]) and len(picks) < limit:
            out = levels.feed(picks[-1][0], (0,))
            picks.append(session.pick(out, len(picks)))
        levels.drop()
        return session.drawn(picks)

    def observe(self, session: Session, outcome: Outcome) -> None:
        """The rule learns what was committed."""
        self.length.observe(outcome)
