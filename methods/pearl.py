"""PEARL: draft and target at the same time.

Tianyu Liu, Yun Li, Qitan Lv, Kai Liu, Jianchen Zhu, Winston Hu, Xiao Sun: PEARL: Parallel
Speculative Decoding with Adaptive Draft Length, ICLR 2025, arXiv:2408.11850.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from specbench_cli.api import (
    AUTO,
    Drafter,
    DraftSession,
    Field,
    Message,
    Method,
    MethodParams,
    NumberOrAuto,
    Session,
    Step,
    Tokens,
    host,
)

LONGEST = 64
"""The largest window under "auto": it makes the largest forward that is measured."""


class PearlParams(MethodParams):
    """Parameters of `Pearl`."""

    window: NumberOrAuto = Field(
        4,
        description="tokens drafted during a target forward (gamma in the paper), or auto: as many"
        " as take the draft as long as the target takes to verify them",
    )


class PearlDrafter(Drafter):
    """The draft's side. Its text is what was committed, and behind that its own drafts.

    An order holds the length up to which its text stands, the window, and the tokens that follow
    what stands. One order:
    A. Cut the text to what stands, add the tokens, and forget the draft's rows of all else.
    B. Feed the draft the tokens that it has not seen: a window's last one, or the recovered one.
    C. Draw a window of tokens from it, one forward each, whatever becomes of those before.
    """

    def __init__(self, desk: DraftSession, params: MethodParams) -> None:
        super().__init__(desk, params)
        self.state = desk.new_state(desk.model)

    def start(self) -> None:
        """Prefill."""
        self.session.model.forward(self.session.pending_tokens(0), self.state, logits_at=None)

    def handle(self, message: Message) -> Message:
        """One order."""
        desk, state = self.session, self.state
        length, window, *told = message.ints
        # A.
        desk.text[length:] = told
        state.rollback(0, length)
        # B and C.
        x, picks = desk.pending_tokens(state.length()), []
        for at in range(desk.position, desk.position + window):
            out = desk.model.forward(x, state)
            picks.append(desk.chooser.pick(out.rows[-1:], at))
            x = Tokens(picks[-1][0][None])
        ids = host.numbers(torch.cat([token for token, _ in picks]))
        desk.text += ids
        distributions = [q for _, q in picks if q is not None]
        return Message(tuple(ids), torch.cat(distributions) if distributions else None)


class Pearl(Method):
    """PEARL: the draft goes on drafting while the target verifies what it drafted before.

    Exact because every draft token is verified as in speculative sampling, by a test of its own:
    what was drafted behind a rejected token is thrown away, which depends on earlier tests alone.
    Differs from the authors' code: each test draws anew (theirs tests the first two tokens of a
    window with one number); drafts that were not verified are never returned; windows end with the
    budget, texts with their first EOS; q is the distribution that each token was drawn from.

    Drafted tokens that the target has not seen are pending. Without any (pre-verify) its forward
    tests the first token of the window that is drafted meanwhile; with some (post-verify) it tests
    these and that first token, to which the last row belongs: there is no bonus token.

    One step:
    1. Tell the drafter what stands; it drafts a window behind the pending tokens (A to C).
    2. Meanwhile one target forward over the last committed token and the pending ones.
    3. Receive the window. Verify the pending tokens and its first one, left to right.
    4. (engine) Commit what stands and, where a token was rejected, the one in its place.
    5. If all stand, the rest of the window is pending. If not, all drafts are thrown away.
    """

    name: ClassVar[str] = "pearl"
    family: ClassVar[str] = "a draft model, in parallel with the target"
    proposed_in: ClassVar[tuple[str, ...]] = ("liu2025pearl",)
    Params: ClassVar[type[MethodParams]] = PearlParams
    params: PearlParams
    needs: ClassVar[frozenset[str]] = frozenset({"draft"})
    workers: ClassVar[int] = 2
    bonus: ClassVar[bool] = False

    @property
    def uses_costs(self) -> bool:
        """The window `auto` does."""
        return self.params.window == AUTO

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the session's request."""
        drafter, most = session.start_worker(PearlDrafter, self.params), self._window(session)
        session.prefill()
        pending: tuple[int, ...] = ()
        distributions: Tensor | None = (
            None  # q of the pending tokens, and of the first one behind them
        )
        told = session.tokens()[-1:]
        while session.finish is None:
            # 1. No more than can be committed once the pending tokens and the first one are.
            stands = len(session.tokens()) - len(told) + len(pending)
            window = max(1, min(most, session.max_draft_length() - len(pending)))
            drafter.send(Message((stands, window, *told)))
            # 2.
            rows = session.score(session.chain(pending, distributions))
            # 3.
            drafted = drafter.receive()
            if drafted.rows is not None:
                distributions = torch.cat(
                    (drafted.rows[:0] if distributions is None else distributions, drafted.rows[:1])
                )
            draft = session.chain((*pending, drafted.ints[0]), distributions)
            outcome = session.verify(draft, rows)
            # 4.
            committed = session.commit(outcome)
            # 5.
            if len(outcome.path) == draft.nodes:
                pending, told = drafted.ints[1:], ()
                distributions = None if drafted.rows is None else drafted.rows[1:]
            else:
                pending, told, distributions = (), outcome.committed[-1:], None
            yield session.step(draft, committed)

    def _window(self, session: Session) -> int:
        """The smallest window that takes the draft as long as the target takes to verify it."""
        if self.params.window != AUTO:
            return self.params.window
        draft = session.draft_cost(session.draft())
        fits = (g for g in range(1, LONGEST) if round(session.verify_cost(g) / draft) <= g)
        return next(fits, LONGEST)
