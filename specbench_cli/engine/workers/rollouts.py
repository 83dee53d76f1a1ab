"""Prepared draft windows: the draft model continues several possible outcomes in advance.

While the target verifies a window of draft tokens, the drafter guesses outcomes. An outcome is the
number of accepted tokens and the token after them. For each guess the draft model drafts the next
window, as a branch of the present window. Each forward extends all branches by one level. If the
real outcome has a branch, that branch is the next window, and its cache rows are kept.
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
"""Outcome of a window: the number of accepted tokens, and the token after them."""


def guess_outcomes(ranked: Tensor, window: Sequence[int], width: int, limit: int) -> list[Guess]:
    """Return the likeliest outcomes of a window of m tokens, from the best tokens per position.

    The rejected token itself is never the recovered token, so it is no guess.

    Args:
        ranked: Tokens [m + 1, width + 1], or as wide as the vocabulary, best first.
        width: Maximum number of guesses per number of accepted tokens.
        limit: Remaining token budget after the text. An outcome uses its accepted tokens and one
            more.

    Returns:
        Outcomes sorted by the number of accepted tokens, without those that use up the budget.
    """
    found: list[Guess] = []
    for accepted, row in enumerate(host.numbers(ranked)[: max(0, limit - 1)]):
        rejected = window[accepted] if accepted < len(window) else None
        kept = [token for token in row if token != rejected]
        found += [(accepted, token) for token in kept[:width]]
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """A chain of draft tokens after an outcome.

    Attributes:
        tokens: The draft tokens.
        q: [m, V], the distributions that they were drawn from. None without a draw.
        reused: Whether the window was prepared before the outcome was known.
        prepared: Number of outcomes with a prepared window.
    """

    tokens: tuple[int, ...]
    q: Tensor | None
    reused: bool
    prepared: int


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of all branches.

    Attributes:
        first: Index of the level's first row, counted from the end of the text.
        rows: Logits [b, V'] after each branch.
        next: Tokens drawn from them, for the branches that continue. These are the first ones.
    """

    first: int
    rows: Tensor
    next: Pick | None


class Rollouts:
    """A draft model that drafts windows and prepares possible next ones.

    In each round `settle` returns a window. While the target verifies it, `complete` and `prepare`
    run. The model's state has the rows of the committed text, of the window, and of the branches,
    level by level. `session.text` has the committed text and the window.

    The last token of a prepared window is drawn when the window is used, so no random number is
    drawn for a token without a forward. With sampling, branches are drawn independently of each
    other and of the outcome. The used branch is thus a draw from the draft distribution after its
    outcome.

    Args:
        length: Number of tokens in a window.
        width: Maximum number of branches per number of accepted tokens.
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
        """Return the window after an outcome. Draft it now if it was not prepared.

        Args:
            accepted: Number of committed tokens of the present window; 0 without a window.
            token: The committed token after them.
            limit: Remaining token budget after that token; 0 if the output ends.
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
        """Process the last token of the window, so that all branches have their parent rows."""
        if self._limit > 1:
            out = self._model.forward(Tokens(self._picks[-1][0][None]), self._state)
            self._logits.append(cast(Tensor, out.logits)[:, -1])

    def guess(self, width: int) -> list[Guess]:
        """Return the likeliest outcomes by the draft model. Call it after `complete`.

        Args:
            width: Maximum number of guesses per number of accepted tokens.
        """
        if self._limit < 2:
            return []
        rows, chooser = torch.cat(self._logits), self._session.chooser
        wide = min(width + 1, rows.shape[-1])
        ranked, _ = chooser.candidates(rows, wide, self._position, range(len(rows)))
        return guess_outcomes(ranked, self._session.text[self._root :], width, self._limit)

    def prepare(self, outcomes: Iterable[Guess]) -> None:
        """Draft the windows after the given outcomes. Call it after `complete`."""
        useful = (guess for guess in outcomes if guess[0] + 1 < self._limit)
        ordered = sorted(useful, key=lambda guess: guess[0])  # the highest branches first
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
        """Output index of the window's first token."""
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
        """Make a branch the window. Keep its rows and the accepted rows of the previous window."""
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
"""Orders: send an outcome and get a window, complete the window, and prepare next windows."""


class Preparer(Drafter):
    """A drafter that answers an outcome with the next window, prepared or not.

    It handles orders to prepare before the outcome that follows them. So the prepared windows do
    not depend on the speed of either side.
    """

    rollouts: Rollouts

    def handle(self, message: Message) -> Message | None:
        """See `Drafter`."""
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
        """Prepare windows. `outcomes` are the likely outcomes by the target's side."""


class DraftWindows:
    """The target's side: the draft windows of a session, one after each outcome.

    Args:
        kind, params: As in `Session.start_worker`. The drafter starts its prefill.

    Attributes:
        ids: Tokens of the present window.
    """

    ids: Sequence[int] = ()

    def __init__(self, session: Session, kind: type[Preparer], params: MethodParams) -> None:
        self._session = session
        self._worker = session.start_worker(kind, params)
        self._is_first = True

    def settle(self, committed: Sequence[int]) -> None:
        """Send the committed tokens to the drafter. If the output ends, no window follows."""
        limit = 0 if self._session.finish else self._session.max_draft_length()
        self._worker.send(Message((SETTLE, len(committed) - 1, committed[-1], limit)))

    def next(self) -> tuple[Draft, Mapping[str, int]]:
        """Wait for the window after the last outcome, and return it.

        Returns:
            A chain, and counts for `Step.extra`. "prepared" is the number of outcomes with a
                prepared window. "reused" is 1 if the real outcome had one, "missed" is 1 if not.
                Both are 0 for the first window and for an empty one at the end of the budget.
        """
        answer = self._worker.receive()
        reused, prepared, *self.ids = answer.ints
        due, self._is_first = bool(self.ids) and not self._is_first, False
        counts = {"prepared": prepared, "reused": reused, "missed": int(due and not reused)}
        return self._session.chain(self.ids, answer.rows), counts

    def complete(self) -> None:
        """Order the drafter to process the window's last token, before any `prepare`."""
        self._worker.send(Message((COMPLETE,)))

    def prepare(self, outcomes: Iterable[Guess] = ()) -> None:
        """Order the drafter to prepare windows."""
        numbers = (number for outcome in outcomes for number in outcome)
        self._worker.send(Message((PREPARE, *numbers)))
