"""Several requests decoded together: a session each, and one forward of the target a step for all.

Every sequence has a length, a draft, a tree mask and an end of its own. It joins once a seat is
free, which holds its states, and leaves it at its end to one that waits: continuous batching. What
it commits does not depend on those beside it: its draws, its noise and its states are its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.meter import HostClock, Meter, Metered
from specbench_cli.engine.request import Request, Shared
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Forward
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Loans, Workspace


class Batch:
    """The sessions of requests that one method decodes together.

    Args:
        size: most sequences that take part in a step; default: all requests.
        held: seats, at least `size`: sequences that are held at once, each with states of its own;
            default: `size`. Requests beyond these wait, in their order.
        chunk: most tokens of prompts that a forward reads beside others' drafts; None: no bound.
            Where none is decoded, prompts are read whole.
        arrivals: by place, seconds after the first `join` before which a request is not there,
            never falling; none: all are there.
        memory: what the method keeps between prompts; the same for all sequences.
        recordings, references: by place, as `Session` takes them.
        kind: what makes the sessions.
        clock: what it is timed by, and waits by; default: the device's.

    Attributes:
        sessions: one a request, in their order.
        size: as given, but no more than there are requests.
        meter: the trace of all forwards; `Forward.rows` says whose rows each had.
        prefill_ns: nanoseconds that joining took: the drafts' prefills, and the target's in
            forwards of their own. What others' forwards had of prompts says `Forward.reading`.
        idle_ns: nanoseconds in which none had arrived that was not decoded.
    """

    def __init__(
        self,
        workspace: Workspace,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        size: int | None = None,
        held: int = 0,
        chunk: int | None = None,
        arrivals: Sequence[float] = (),
        pass_: int = 1,
        memory: Memory | None = None,
        recordings: Mapping[int, Sequence[int]] | None = None,
        references: Mapping[int, Sequence[int]] | None = None,
        kind: type[Session] = Session,
        clock: HostClock | None = None,
    ) -> None:
        target = workspace.decoders["target"]
        self.meter = Meter(target.device, clock)
        self.size = min(size or len(requests), len(requests))
        self.prefill_ns = self.idle_ns = 0
        self._arrivals = [round(seconds * 1e9) for seconds in arrivals]
        self._first_ns: int | None = None
        self._workspace, self._target = workspace, Metered(target, self.meter, role="verify")
        self._taken = 0
        self._chunk = chunk
        kept = Memory() if memory is None else memory
        self.sessions = tuple(
            kind(
                workspace,
                request,
                sampling,
                pass_=pass_,
                memory=kept,
                recording=(recordings or {}).get(place),
                reference=(references or {}).get(place),
                shared=Shared(self.meter, place),
            )
            for place, request in enumerate(requests)
        )
        self._seats = min(max(held, self.size), len(requests))
        self._free = list(range(self._seats))
        self._seat: dict[Session, int] = {}
        self._loans: dict[Session, Loans] = {}
        self._waiting = deque(self.sessions)
        if self._seats:  # so that the states' memory is there before the clock runs
            lend = workspace.loans(self._seats)
            for _ in range(1 if sampling.contrast is None else 2):
                lend(target, 0)

    # ---- the schedule ---------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether all sequences have come to their ends."""
        return not self._waiting and all(session.finish is not None for session in self._seat)

    @property
    def live(self) -> list[Session]:
        """Those whose prompt was read and that have not ended, in the order of their joining."""
        return [each for each in self._seat if each.finish is None and _begun(each)]

    def seated(self, session: Session) -> bool:
        """Whether a sequence has joined, and its states are its own yet."""
        return session in self._seat

    def join(self, start: Callable[[Session], object] | None = None) -> list[Session]:
        """Have others take the seats of sequences that have ended: those that are returned. Their
        prompts are read by the next `prefill`, or beside others' drafts by `score`.

        Args:
            start: what each begins with: its draft's prefill.
        """
        self.leave()
        n = min(len(self._free), self._arrived())
        began = self.meter.clock.now()
        joined = [self._waiting.popleft() for _ in range(n)]
        # Sequences about as long as each other lie beside each other: attention takes them at once.
        seats = sorted(self._free)[:n]
        by_length = sorted(joined, key=lambda session: len(session.tokens()))
        seat_of = dict(zip(by_length, seats, strict=True))
        for session in joined:
            seat = self._seat[session] = seat_of[session]
            self._free.remove(seat)
            self._loans[session] = self._workspace.loans(self._seats, seat)
            session.harness.seat(self._loans[session])
            if start is not None:
                start(session)
        self.prefill_ns += self.meter.clock.now() - began
        return joined

    def leave(self) -> None:
        """Free the seats of sequences that have ended, and the memory that their states hold."""
        for session in [each for each in self._seat if each.finish is not None]:
            self._free.append(self._seat.pop(session))
            self._loans.pop(session).free()
            session.harness.left()

    def _arrived(self) -> int:
        """How many of those that wait are there; where none is decoded, waits for the next one."""
        clock = self.meter.clock
        now = clock.now()
        if self._first_ns is None:
            self._first_ns = now
        if not self._arrivals or not self._waiting:
            return len(self._waiting)
        due = self._arrivals[len(self._arrivals) - len(self._waiting) :]
        wait = self._first_ns + due[0] - now
        if not self._seat and wait > 0:
            clock.sleep(wait)
            began, now = now, clock.now()
            self.idle_ns += now - began
        return bisect_right(due, now - self._first_ns)

    def prefill(self) -> None:
        """Run the prompts of sequences that have joined through the target in one forward; commit
        each one's first token."""
        began = self.meter.clock.now()
        if prompts := self._prompts(None):
            self._forward((), prompts)
        self.forwards()  # these are no step's
        self.prefill_ns += self.meter.clock.now() - began

    # ---- a step ---------------------------------------------------------------------------------

    def score(self, drafts: Sequence[tuple[Session, Draft]]) -> list[Tensor]:
        """One target forward over the last committed tokens and the drafts of some sequences, and
        over the next tokens of the prompts of those that have joined; commits the first token of
        each whose prompt is read by then.

        Returns:
            for each, logits [m + 1, V] as of `Session.score`.
        Raises:
            MethodFault: a draft is malformed.
        """
        return self._forward(drafts, self._prompts(self._chunk))

    def forwards(self) -> Sequence[Forward]:
        """The forwards since the last call, for the steps that they led to."""
        first, self._taken = self._taken, len(self.meter.forwards)
        return self.meter.forwards[first:]

    def _prompts(self, most: int | None) -> list[tuple[Session, int]]:
        """What the next forward reads of prompts, at most so many tokens: of who joined first,
        first."""
        found = []
        for session in self._seat:
            n = 0 if _begun(session) else session.harness.scoring.unread
            if most is not None:
                n = min(n, most)
                most -= n
            if n:
                found.append((session, n))
        return found

    def _forward(
        self, drafts: Sequence[tuple[Session, Draft]], prompts: Sequence[tuple[Session, int]]
    ) -> list[Tensor]:
        parts = {session: session.harness.scoring.score_part(draft) for session, draft in drafts}
        parts |= {session: session.harness.scoring.prompt_part(n) for session, n in prompts}
        order = sorted(parts, key=self._seat.__getitem__)
        outs = self._target.forward_batch(
            [parts[session] for session in order], taps=order[0].harness.scoring.layers
        )
        of = dict(zip(order, outs, strict=True))
        for session, n in prompts:
            logits = session.harness.scoring.take_prompt(of[session], n)
            if logits is not None:
                session.harness.begun(logits)
        return [session.harness.scoring.take(of[session]) for session, _ in drafts]


def _begun(session: Session) -> bool:
    """Whether a sequence has its first token."""
    return session.harness.text.position > 0
