"""Draft windows that are prepared in advance, for parallel methods such as Mirror and SSD.

A window is the chain of draft tokens of one step. While the target verifies a window, the drafter
guesses outcomes of the verification: the number of accepted tokens, and the token after them. For
each guess, the draft model drafts the next window in advance, as a branch of the current window.
Each forward extends all branches by one token. If a guess was right, its branch becomes the next
window. The rows of the branch stay in the draft model's cache.
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
"""Guessed outcome of a verification: the number of accepted tokens, and the token after them."""


def guess_outcomes(ranked: Tensor, window: Sequence[int], width: int, limit: int) -> list[Guess]:
    """Return the most likely verification outcomes of a window of m tokens.

    An outcome is the number of accepted tokens and the token after them. The token after a
    rejection is never the rejected token, so the function does not guess that.

    Args:
        ranked: Most likely tokens at each position, best first, [m + 1, width + 1]. The rows may be
            shorter if the vocabulary is small.
        width: Maximum number of guesses for each number of accepted tokens.
        limit: Remaining token budget. An outcome commits the accepted tokens and one more token.

    Returns:
        Outcomes sorted by the number of accepted tokens. Outcomes that use up the budget are left
        out.
    """
    found: list[Guess] = []
    for accepted, row in enumerate(host.numbers(ranked)[: max(0, limit - 1)]):
        rejected = window[accepted] if accepted < len(window) else None
        kept = [token for token in row if token != rejected]
        found += [(accepted, token) for token in kept[:width]]
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """A chain of draft tokens that follows a verification outcome.

    Attributes:
        tokens: The draft tokens.
        q: [m, V], the distributions that the tokens were drawn from. None if they were not drawn.
        reused: True if the window was prepared in advance.
        prepared: Number of windows that were prepared in advance.
    """

    tokens: tuple[int, ...]
    q: Tensor | None
    reused: bool
    prepared: int


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of all branches. A branch is a possible next window.

    Attributes:
        first: Index of the level's first row, counted from the end of the text.
        rows: Logits [b, V'] after each branch.
        next: Next tokens of the branches that continue. These branches come first.
    """

    first: int
    rows: Tensor
    next: Pick | None


class Rollouts:
    """Drafting of windows, and of possible next windows in advance, with one draft model.

    A window is the chain of draft tokens of one step. In each step `settle` returns a window. While
    the target verifies it, the drafter calls `complete` and `prepare`. The draft model's state has
    the rows of the committed text, of the window, and of the branches, level by level.
    `session.text` has the committed text and the window.

    Under rejection sampling, a branch is drawn independently of the other branches and of the
    outcome. So a branch that becomes the next window is a valid draw from the draft distribution.
    The last token of a branch is drawn only when the branch is used.

    Args:
        length: Number of tokens in a window.
        width: Maximum number of branches for each number of accepted tokens.
    """

    def __init__(self, session: DraftSession, length: int, width: int) -> None:
        self._session, self._length, self._model = session, length, session.model
        self._state = session.new_state(session.model, slack=width * (length + 1) * length)
        self._root = len(session.text)  # number of committed tokens; the window follows them
        self._limit = 0
        self._picks: list[Pick] = []  # the window's tokens
        self._logits: list[
            Tensor
        ] = []  # logits [1, V'] that they were chosen from, and those after the last token
        self._branches: dict[Guess, int] = {}
        self._levels: list[_Level] = []
        self._model.forward(session.pending_tokens(0), self._state, logits_at=None)
        self._state.commit(0, range(self._root))

    def settle(self, accepted: int, token: int, limit: int) -> Window:
        """Return the window after a verification outcome. If it was not prepared, draft it now.

        Args:
            accepted: Number of accepted tokens of the current window. 0 if there is no current
                window.
            token: The committed token after the accepted tokens.
            limit: Remaining token budget after that token. 0 if the output ends.
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
        """Process the last token of the window, so that branches can continue after it."""
        if self._limit > 1:
            out = self._model.forward(Tokens(self._picks[-1][0][None]), self._state)
            self._logits.append(cast(Tensor, out.logits)[:, -1])

    def guess(self, width: int) -> list[Guess]:
        """Return the outcomes that are most likely under the draft model. Call it after `complete`.

        Args:
            width: Maximum number of guesses for each number of accepted tokens.
        """
        if self._limit < 2:
            return []
        rows, chooser = torch.cat(self._logits), self._session.chooser
        wide = min(width + 1, rows.shape[-1])
        ranked, _ = chooser.candidates(rows, wide, self._position, range(len(rows)))
        return guess_outcomes(ranked, self._session.text[self._root :], width, self._limit)

    def prepare(self, outcomes: Iterable[Guess]) -> None:
        """Draft the next window for each of several guessed outcomes. Call it after `complete`."""
        useful = (guess for guess in outcomes if guess[0] + 1 < self._limit)
        ordered = sorted(useful, key=lambda guess: guess[0])  # the longest branches first
        accepted_counts = [accepted for accepted, _ in ordered]
        heights = [min(self._length, self._limit - accepted - 1) for accepted in accepted_counts]
        device, first = self._session.device, len(self._session.text) - self._root
        tokens = host.ids([token for _, token in ordered], device)
        behind = host.ids(accepted_counts, device)
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
                depths = [accepted + level + 1 for accepted in accepted_counts[:more]]
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
        """Draft a window token by token."""
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
        """Make a branch the current window. Keep the rows of the branch and of accepted tokens."""
        levels = [level for level in self._levels if branch < len(level.rows)]
        one = slice(branch, branch + 1)
        rows = [*range(accepted), *(level.first + branch for level in levels)]
        self._state.commit(0, rows, loose=len(levels) - 1)
        self._logits = [level.rows[one] for level in levels]
        drawn = [cast(Pick, level.next) for level in levels[:-1]]
        self._picks = [(tokens[one], None if q is None else q[one]) for tokens, q in drawn]
        last = self._session.chooser.pick(self._logits[-1], self._position + len(drawn))
        self._picks.append(last)


# ---- drafter and target side --------------------------------------------------------------------

SETTLE, COMPLETE, PREPARE = range(3)
"""Orders to a `Preparer`: send an outcome and get a window, complete the window, prepare
windows."""


class Preparer(Drafter):
    """A drafter that receives a verification outcome and answers with the next window.

    If it is preparing windows, it finishes them before it handles the next outcome. So its answers
    do not depend on the speed of the target or the draft model.
    """

    rollouts: Rollouts

    def handle(self, message: Message) -> Message | None:
        """Handle an order: a verification outcome, or an order to prepare windows."""
        order, *numbers = message.ints
        if order == SETTLE:
            accepted, token, limit = numbers
            window = self.rollouts.settle(accepted, token, limit)
            return Message((window.reused, window.prepared, *window.tokens), window.q)
        if order == COMPLETE:
            self.rollouts.complete()
        else:
            self.prepare(list(zip(numbers[::2], numbers[1::2], strict=True)))
        return None

    @abstractmethod
    def prepare(self, outcomes: Sequence[Guess]) -> None:
        """Prepare next windows in advance.

        Args:
            outcomes: Likely verification outcomes that the method sent.
        """


class DraftWindows:
    """Client of a `Preparer`, for the method: it sends outcomes and receives windows.

    Args:
        kind, params: Class of the drafter and parameters of the method, as in
            `Session.start_worker`.

    Attributes:
        ids: Tokens of the current window.
    """

    ids: Sequence[int] = ()

    def __init__(self, session: Session, kind: type[Preparer], params: MethodParams) -> None:
        self._session = session
        self._worker = session.start_worker(kind, params)
        self._is_first = True

    def settle(self, committed: Sequence[int]) -> None:
        """Send the committed tokens to the drafter. If the output has ended, no window follows."""
        limit = 0 if self._session.finish else self._session.max_draft_length()
        self._worker.send(Message((SETTLE, len(committed) - 1, committed[-1], limit)))

    def next(self) -> tuple[Draft, Mapping[str, int]]:
        """Wait for the window after the last outcome, and return it.

        Returns:
            A draft chain, and counts for `Step.extra`. "prepared" is the number of windows that
            were prepared in advance. "reused" is 1 if this window was prepared in advance, and
            "missed" is 1 if not. "reused" and "missed" are 0 for the first window, and for an empty
            window at the end of the budget.
        """
        answer = self._worker.receive()
        reused, prepared, *self.ids = answer.ints
        due, self._is_first = bool(self.ids) and not self._is_first, False
        counts = {"prepared": prepared, "reused": reused, "missed": int(due and not reused)}
        return self._session.chain(self.ids, answer.rows), counts

    def complete(self) -> None:
        """Tell the drafter to process the last token of the window. Call it before `prepare`."""
        self._worker.send(Message((COMPLETE,)))

    def prepare(self, outcomes: Iterable[Guess] = ()) -> None:
        """Tell the drafter to prepare next windows in advance."""
        numbers = (number for outcome in outcomes for number in outcome)
        self._worker.send(Message((PREPARE, *numbers)))
