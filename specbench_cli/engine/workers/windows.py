"""Windows from a drafter that prepares them: its orders and answers, and both sides of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft
from specbench_cli.engine.workers.drafter import Drafter
from specbench_cli.engine.workers.message import Message
from specbench_cli.engine.workers.rollouts import Guess, Rollouts

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
    def prepare(self, told: Sequence[Guess]) -> None:
        """Prepare windows; `told` are the outcomes that the target's side thinks likely."""


class Windows:
    """The target's side: a session's windows, one for each outcome that is told.

    Args:
        kind, params: as for `Session.hire`; the drafter's prefill has begun.

    Attributes:
        ids: the current window's tokens.
    """

    ids: Sequence[int] = ()

    def __init__(self, session: Session, kind: type[Preparer], params: MethodParams) -> None:
        self._session = session
        self._worker = session.hire(kind, params)
        self._first = True

    def settle(self, committed: Sequence[int]) -> None:
        """Tell what was committed. If the output ends there, no window follows."""
        limit = 0 if self._session.finish else self._session.room()
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
        due, self._first = bool(self.ids) and not self._first, False
        counts = {"prepared": prepared, "reused": reused, "missed": int(due and not reused)}
        return self._session.chain(self.ids, answer.rows), counts

    def complete(self) -> None:
        """Have the window's last token fed, which comes before everything that is prepared."""
        self._worker.send(Message((COMPLETE,)))

    def prepare(self, outcomes: Iterable[Guess] = ()) -> None:
        """Have windows prepared."""
        told = (number for outcome in outcomes for number in outcome)
        self._worker.send(Message((PREPARE, *told)))
