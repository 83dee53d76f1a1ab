"""PEARL: draft model and target run at the same time.

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

MAX_WINDOW = 64
"""Maximum window with `window=auto`. Forwards up to this size are timed before the run."""


class PearlParams(MethodParams):
    """Parameters of `Pearl`."""

    window: NumberOrAuto = Field(
        4,
        description="number of tokens that the draft generates during a target forward (gamma"
        " in the paper); auto chooses the number that takes the draft as long as the"
        " target takes to verify them",
    )


class PearlDrafter(Drafter):
    """Draft worker of PEARL. Its text is the committed text followed by its own draft tokens.

    The target's process sends messages. A message contains the length of the text to keep, the
    window size, and the tokens to append. For each message:

    A. Cut the text to that length and append the tokens. Drop the KV entries that no longer match
    the text. B. The draft model processes its pending tokens: the last token of the previous
    window, or the replacement of a rejected token. C. Draw a window of tokens from the draft model,
    one forward per token.
    """

    def __init__(self, session: DraftSession, params: MethodParams) -> None:
        super().__init__(session, params)
        self.state = session.new_state(session.model)

    def start(self) -> None:
        """Prefill the draft model."""
        self.session.model.forward(self.session.pending_tokens(0), self.state, logits_at=None)

    def handle(self, message: Message) -> Message:
        """Handle one message (steps A to C of the class docstring). Return the drafted window."""
        session, state = self.session, self.state
        length, window, *new_tokens = message.ints
        # Step A: Cut the text, and append the new tokens.
        session.text[length:] = new_tokens
        state.rollback(0, length)
        # Steps B and C: Draw a window of tokens.
        x, picks = session.pending_tokens(state.length()), []
        for at in range(session.position, session.position + window):
            out = session.model.forward(x, state)
            picks.append(session.chooser.pick(out.rows[-1:], at))
            x = Tokens(picks[-1][0][None])
        ids = host.numbers(torch.cat([token for token, _ in picks]))
        session.text += ids
        distributions = [q for _, q in picks if q is not None]
        return Message(tuple(ids), torch.cat(distributions) if distributions else None)


class Pearl(Method):
    """PEARL: the draft model keeps drafting while the target verifies its earlier tokens.

    Lossless because every draft token is verified as in speculative sampling, with a random number
    of its own. Draft tokens after a rejected one are dropped.
    Differs from the authors' code, which verifies the first two tokens of a window with the same
    random number. Here each token has its own random number. Unverified tokens are never returned.
    Windows end at the token budget, and outputs end at their first EOS. The draft distribution q in
    verification is the distribution from which the token was drawn.

    Draft tokens that the target has not verified yet are pending. While the target runs, the draft
    model drafts the next window. Without pending tokens, the target forward verifies the first
    token of this window (pre-verify in the paper). With pending tokens, it verifies the pending
    tokens and this first token (post-verify). There is no bonus token.

    One step:
    1. Send the accepted tokens to the draft worker, which drafts a window after the pending tokens.
    2. Meanwhile run one target forward over the last committed token and the pending tokens.
    3. Receive the window. Verify the pending tokens and the window's first token, left to right.
    4. (engine) Commit the accepted tokens, and the replacement of a rejected token if there is one.
    5. If all tokens are accepted, the rest of the window becomes pending. Otherwise drop all draft
       tokens.
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
        """True if the parameter `window` is "auto": the method chooses it from measured forward
        times.
        """
        return self.params.window == AUTO

    def generate(self, session: Session) -> Iterator[Step]:
        """Decode the request, and yield each decoding step."""
        drafter, max_window = (
            session.start_worker(PearlDrafter, self.params),
            self._choose_window(session),
        )
        session.prefill()
        pending: tuple[int, ...] = ()
        distributions: Tensor | None = None  # q of the pending tokens and of the next one
        new_tokens = session.tokens()[-1:]
        while session.finish is None:
            # Step 1: Draft no more tokens than can be committed after the pending tokens.
            kept_length = len(session.tokens()) - len(new_tokens) + len(pending)
            window = max(1, min(max_window, session.max_draft_length() - len(pending)))
            drafter.send(Message((kept_length, window, *new_tokens)))
            # Step 2: Run the target on the pending tokens.
            rows = session.score(session.chain(pending, distributions))
            # Step 3: Verify the draft tokens left from the last step, and the first token of the
            # new draft window.
            drafted = drafter.receive()
            if drafted.rows is not None:
                distributions = torch.cat(
                    (drafted.rows[:0] if distributions is None else distributions, drafted.rows[:1])
                )
            draft = session.chain((*pending, drafted.ints[0]), distributions)
            outcome = session.verify(draft, rows)
            # Step 4: Commit the accepted tokens and the replacement of a rejected token.
            committed = session.commit(outcome)
            # Step 5: Keep the rest of the window if every token was accepted.
            if len(outcome.path) == draft.nodes:
                pending, new_tokens = drafted.ints[1:], ()
                distributions = None if drafted.rows is None else drafted.rows[1:]
            else:
                pending, new_tokens, distributions = (), outcome.committed[-1:], None
            yield session.step(draft, committed)

    def _choose_window(self, session: Session) -> int:
        """Return the window size in tokens.

        With "auto", it is the smallest window that takes as long to draft as the target needs to
        verify it.
        """
        if self.params.window != AUTO:
            return self.params.window
        draft = session.draft_cost(session.draft())
        fits = (g for g in range(1, MAX_WINDOW) if round(session.verify_cost(g) / draft) <= g)
        return next(fits, MAX_WINDOW)
