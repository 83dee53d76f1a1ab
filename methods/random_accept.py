"""The control of every rule over tokens: as many rejected tokens pass, whatever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specbench_cli.api import (
    AcceptRule,
    Draft,
    Field,
    Fixed,
    Method,
    MethodParams,
    Outcome,
    RandomAccept,
    Session,
    draft_chains,
)


class RandomAcceptParams(MethodParams):
    """Parameters of `RandomAcceptance`."""

    length: int = Field(5, ge=1, description="draft tokens a step")
    rate: float = Field(
        0.1, ge=0, le=1, description="share of the rejected tokens that pass; off: 0"
    )  # fmt: skip
    like: str | None = Field(
        None, description="the row whose rate, as measured, takes the place of `rate`"
    )  # fmt: skip


class RandomAcceptance(Method):
    """Random accept: a rejected draft token passes by the toss of a coin; a control of rules.

    Not exact, and no way to decode: a rule that keeps no more of the answers' quality than this
    does, at the same rate, knows nothing of what may pass. At its off position, rate 0, it makes
    the tokens of `sps`.

    One step:
    1. Feed the draft the committed tokens that it has not seen; draw `length` tokens from it.
    2. (engine) One target forward over the last committed token and the draft. A token stands if
       the lossless rule takes it, or else with probability `rate`, whatever it is.
    3. (engine) In place of the first that does not stand: the lossless rule's token.
    4. Forget the draft's rows of rejected tokens.
    """

    name: ClassVar[str] = "random-accept"
    family: ClassVar[str] = "a draft model"
    lossy: ClassVar[bool] = True
    Params: ClassVar[type[RandomAcceptParams]] = RandomAcceptParams
    params: RandomAcceptParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    tunable: ClassVar[frozenset[str] | None] = frozenset({"length"})
    relative: ClassVar[str | None] = "sps"
    off: ClassVar[Mapping[str, Any]] = {"rate": 0.0}
    control: ClassVar[bool] = True

    @property
    def accept(self) -> AcceptRule:
        """Step 2, of what the lossless rule rejects."""
        return RandomAccept(self.params.rate)

    def start(self, session: Session) -> None:
        """Prefill the draft."""
        self.model = session.draft()
        self.state = session.new_state(self.model)
        self.model.forward(session.since(0), self.state, logits_at=None)

    def propose(self, session: Session, limit: int) -> Draft:
        """Step 1."""
        length = Fixed(self.params.length)
        return draft_chains(self.model, [(session, self.state)], [length])[0]

    def observe(self, session: Session, outcome: Outcome) -> None:
        """Step 4: the last committed token has no row yet."""
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
