"""Prepared continuations: what a draft model drafts next, rolled out for several outcomes at once.

While a window of draft tokens is verified, its outcome (how many of them stand, and which token
follows) is guessed, and for every guess the draft model drafts the window that would come next. A
guess is a branch off the window; all branches advance together, a level a forward. Once the outcome
is known its branch, if there is one, is the next window: its rows become the model's own, and
nothing is computed again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Tokens
from specbench_cli.engine.verify.choosing import Pick
from specbench_cli.engine.workers.drafter import Drafter, DraftSession
from specbench_cli.engine.workers.message import Message

Guess = tuple[int, int]
"""An outcome: how many tokens of a window stand, and the token that follows them."""


def guess_outcomes(ranked: Tensor, window: Sequence[int], width: int, limit: int) -> list[Guess]:
    """The likeliest outcomes of a window of m tokens, by the tokens thought best at each place.

    A rejected token does not come again, so it is no guess of what comes in its place.

    Args:
        ranked: tokens [m + 1, width + 1], or as wide as the vocabulary; best first.
        width: most guesses for each number of tokens that stand.
        limit: most tokens of use behind the text; an outcome takes one more of them than stand.
    Returns:
        by how many tokens stand; none behind which no window would be of use.
    """
    found: list[Guess] = []
    for stand, row in enumerate(host.numbers(ranked)[: max(0, limit - 1)]):
        rejected = window[stand] if stand < len(window) else None
        kept = [token for token in row if token != rejected]
        found += [(stand, token) for token in kept[:width]]
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """Draft tokens in a row, and where they come from.

    q: [m, V], the distributions that they were drawn from; None where they were chosen without a
        draw.
    reused: whether they were prepared before their outcome was known.
    prepared: for how many outcomes windows were.
    """

    tokens: tuple[int, ...]
    q: Tensor | None
    reused: bool
    prepared: int


@dataclass(frozen=True, slots=True)
class _Level:
    """The branches at one distance from the window.

    first: the place of their first row among those behind the text.
    rows: [b, V'], what the model says behind each of them.
    next: the tokens drawn there, for those that go on: the first of them.
    """

    first: int
    rows: Tensor
    next: Pick | None


class Rollouts:
    """A draft model that drafts windows, and prepares those that may follow.

    A round: `settle`, which gives a window; `complete`, `prepare`, while that is verified. The rows
    of the model's state are those of the committed text, those of the window, and behind them those
    of the branches, level by level. `desk.text` holds the text and the window.

    The last token of a prepared window is drawn when it is taken, so that chance is spent only on
    what is fed. Under a rule that draws, branches are drawn independently of each other and of what
    decides among them: the one taken is a draw from the draft's distribution behind its outcome.

    Args:
        length: tokens of a window.
        width: most branches for each number of tokens that may stand.
    """

    def __init__(self, session: DraftSession, length: int, width: int) -> None:
        self._session, self._length, self._model = session, length, session.model
        self._state = session.new_state(session.model, slack=width * (length + 1) * length)
        self._root = len(session.text)  # committed tokens; behind them `desk.text` holds the window
        self._limit = 0
        self._picks: list[Pick] = []  # of the window
        self._logits: list[
            Tensor
        ] = []  # rows [1, V'] they were picked from, and the last one's own
        self._branches: dict[Guess, int] = {}
        self._levels: list[_Level] = []
        self._model.forward(session.pending_tokens(0), self._state, logits_at=None)
        self._state.commit(0, range(self._root))

    def settle(self, accepted: int, token: int, limit: int) -> Window:
        """Take an outcome: the window that follows, prepared or else drafted now.

        Args:
            stand: tokens of the window that were committed; 0 at first, when there is none.
            token: the committed token behind them.
            limit: most tokens of use behind that: what is left of the last limit, or 0 where the
                output ends.
        """
        prepared = len(self._branches)
        branch = self._branches.get((accepted, token)) if limit > 0 else None
        fed = max(0, self._state.length() - self._root)
        self._session.text[self._root + accepted :] = [token]
        self._root, self._limit = len(self._session.text), limit
        if branch is None:
            self._state.commit(0, range(min(accepted, fed)))
            self._draft()
        else:
            self._take(accepted, branch)
        self._branches, self._levels = {}, []
        picked = [token for token, _ in self._picks]
        tokens = host.numbers(torch.cat(picked)) if picked else []
        distributions = [q for _, q in self._picks if q is not None]
        self._session.text += tokens
        return Window(
            tuple(tokens),
            torch.cat(distributions) if distributions else None,
            branch is not None,
            prepared,
        )

    def complete(self) -> None:
        """Feed the window's last token, so that all branches find the rows that they come off."""
        if self._limit > 1:
            out = self._model.forward(Tokens(self._picks[-1][0][None]), self._state)
            self._logits.append(cast(Tensor, out.logits)[:, -1])

    def guess(self, width: int) -> list[Guess]:
        """The outcomes that the draft model itself thinks likeliest, once the window is complete.

        Args:
            width: most guesses for each number of tokens that may stand.
        """
        if self._limit < 2:
            return []
        rows, chooser = torch.cat(self._logits), self._session.chooser
        wide = min(width + 1, rows.shape[-1])
        ranked, _ = chooser.candidates(rows, wide, self._position, range(len(rows)))
        return guess_outcomes(ranked, self._session.text[self._root :], width, self._limit)

    def prepare(self, outcomes: Iterable[Guess]) -> None:
        """Draft the windows that follow these outcomes of the current window, which is complete."""
        useful = (guess for guess in outcomes if guess[0] + 1 < self._limit)
        ordered = sorted(useful, key=lambda guess: guess[0])  # the highest branches first
        stands = [stand for stand, _ in ordered]
        heights = [min(self._length, self._limit - stand - 1) for stand in stands]
        device, first = self._session.device, len(self._session.text) - self._root
        tokens = host.ids([token for _, token in ordered], device)
        behind = host.ids(stands, device)
        seen = torch.arange(first, device=device) < behind[:, None]
        for level in range(max(heights, default=0)):
            n, more = (sum(height > at for height in heights) for at in (level, level + 1))
            seen = torch.cat((seen[:n], torch.eye(n, dtype=torch.bool, device=device)), 1)
            at = (behind[:n] + (self._root + level))[None]
            x = Tokens(tokens[None, :n])
            out = self._model.forward(x, self._state, positions=at, mask=seen, logits_at="all")
            rows = cast(Tensor, out.logits)[0]
            drawn = None
            if more:
                depths = [stand + level + 1 for stand in stands[:more]]
                drawn = self._session.chooser.pick(rows[:more], self._position, depths)
                tokens = drawn[0]
            self._levels.append(_Level(first, rows, drawn))
            first += n
        self._branches = {guess: at for at, guess in enumerate(ordered)}

    @property
    def _position(self) -> int:
        """Index in the output of the window's first token."""
        return self._root - self._session.prompt_length

    def _draft(self) -> None:
        """Draft a window, token by token."""
        self._picks, self._logits = [], []
        x = self._session.pending_tokens(self._state.length())
        for ahead in range(min(self._length, self._limit)):
            out = self._model.forward(x, self._state)
            if not ahead:
                self._state.commit(0, range(x.ids.shape[1]))
            self._logits.append(cast(Tensor, out.logits)[:, -1])
            self._picks.append(self._session.chooser.pick(self._logits[-1], self._position + ahead))
            x = Tokens(self._picks[-1][0][None])

    def _take(self, accepted: int, branch: int) -> None:
        """Make a branch the window: its rows, and of the one before those that stand."""
        levels = [level for level in self._levels if branch < len(level.rows)]
        one = slice(branch, branch + 1)
        rows = [*range(accepted), *(level.first + branch for level in levels)]
        self._state.commit(0, rows, loose=len(levels) - 1)
        self._logits = [level.rows[one] for level in levels]
        drawn = [cast(Pick, level.next) for level in levels[:-1]]
        self._picks = [(tokens[one], None if q is None else q[one]) for tokens, q in drawn]
        last = self._session.chooser.pick(self._logits[-1], self._position + len(drawn))
        self._picks.append(last)


# ---- the drafter that prepares them, and the target's side --------------------------------------

SETTLE, COMPLETE, PREPARE = range(3)
"""Orders. An outcome is told, and answered with a window; the window is to be completed; windows
are to be prepared."""


class Preparer(Drafter):
    """A drafter that answers an outcome with the window that follows it, prepared or not.

    The orders to prepare come before the outcome's, and are carried out before it: which windows
    are ready does not depend on who is faster.
    """

    rollouts: Rollouts

    def handle(self, message: Message) -> Message | None:
        """See `Drafter`."""
        order, *about = message.ints
        if order == SETTLE:
            stand, token, limit = about
            window = self.rollouts.settle(stand, token, limit)
            return Message((window.reused, window.prepared, *window.tokens), window.q)
        if order == COMPLETE:
            self.rollouts.complete()
        else:
            self.prepare(list(zip(about[::2], about[1::2], strict=True)))
        return None

    @abstractmethod
    def prepare(self, outcomes: Sequence[Guess]) -> None:
        """Prepare windows; `told` are the outcomes that the target's side thinks likely."""


class DraftWindows:
    """The target's side: a session's windows, one for each outcome that is told.

    Args:
        kind, params: as for `Session.start_worker`; the drafter's prefill has begun.

    Attributes:
        ids: the current window's tokens.
    """

    ids: Sequence[int] = ()

    def __init__(self, session: Session, kind: type[Preparer], params: MethodParams) -> None:
        self._session = session
        self._worker = session.start_worker(kind, params)
        self._is_first = True

    def settle(self, committed: Sequence[int]) -> None:
        """Tell what was committed. If the output ends there, no window follows."""
        limit = 0 if self._session.finish else self._session.max_draft_length()
        self._worker.send(Message((SETTLE, len(committed) - 1, committed[-1], limit)))

    def next(self) -> tuple[Draft, Mapping[str, int]]:
        """The window behind the outcome told last; waits for it.

        Returns:
            a chain, and counts for `Step.extra`: "prepared", the outcomes that windows were ready
            for; "reused" or "missed", 1, whether the one that came was among them. (The first
            window, and an empty one at the end of the budget, are neither.)
        """
        answer = self._worker.receive()
        reused, prepared, *self.ids = answer.ints
        due, self._is_first = bool(self.ids) and not self._is_first, False
        counts = {"prepared": prepared, "reused": reused, "missed": int(due and not reused)}
        return self._session.chain(self.ids, answer.rows), counts

    def complete(self) -> None:
        """Have the window's last token fed, which comes before everything that is prepared."""
        self._worker.send(Message((COMPLETE,)))

    def prepare(self, outcomes: Iterable[Guess] = ()) -> None:
        """Have windows prepared."""
        told = (number for outcome in outcomes for number in outcome)
        self._worker.send(Message((PREPARE, *told)))
