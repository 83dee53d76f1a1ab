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
from specbench_cli.engine.request import BatchSlot, Request
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Forward
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import StateAllocator, Workspace


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
            forwards of their own. What others' forwards had of prompts says
            `Forward.prompt_places`.
        idle_ns: nanoseconds in which none had arrived that was not decoded.
    """

    def __init__(
        self,
        workspace: Workspace,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        size: int | None = None,
        slots: int = 0,
        chunk: int | None = None,
        arrivals: Sequence[float] = (),
        pass_: int = 1,
        memory: Memory | None = None,
        recordings: Mapping[int, Sequence[int]] | None = None,
        references: Mapping[int, Sequence[int]] | None = None,
        session_class: type[Session] = Session,
        clock: HostClock | None = None,
    ) -> None:
        target = workspace.decoders["target"]
        self.meter = Meter(target.device, clock)
        self.size = min(size or len(requests), len(requests))
        self.prefill_ns = self.idle_ns = 0
        self._arrivals = [round(seconds * 1e9) for seconds in arrivals]
        self._first_ns: int | None = None
        self._workspace, self._target = workspace, Metered(target, self.meter, role="verify")
        self._num_reported = 0
        self._chunk = chunk
        shared_memory = Memory() if memory is None else memory
        self.sessions = tuple(
            session_class(
                workspace,
                request,
                sampling,
                pass_=pass_,
                memory=shared_memory,
                recording=(recordings or {}).get(place),
                reference=(references or {}).get(place),
                shared=BatchSlot(self.meter, place),
            )
            for place, request in enumerate(requests)
        )
        self._num_slots = min(max(slots, self.size), len(requests))
        self._free_slots = list(range(self._num_slots))
        self._slot_of: dict[Session, int] = {}
        self._allocators: dict[Session, StateAllocator] = {}
        self._waiting = deque(self.sessions)
        if self._num_slots:  # so that the states' memory is there before the clock runs
            allocate_state = workspace.loans(self._num_slots)
            for _ in range(1 if sampling.contrast is None else 2):
                allocate_state(target, 0)

    # ---- the schedule ---------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all sequences have come to their ends."""
        return not self._waiting and all(session.finish is not None for session in self._slot_of)

    @property
    def active(self) -> list[Session]:
        """Those whose prompt was read and that have not ended, in the order of their joining."""
        return [each for each in self._slot_of if each.finish is None and _has_first_token(each)]

    def has_slot(self, session: Session) -> bool:
        """Whether a sequence has joined, and its states are its own yet."""
        return session in self._slot_of

    def join(self, start: Callable[[Session], object] | None = None) -> list[Session]:
        """Have others take the seats of sequences that have ended: those that are returned. Their
        prompts are read by the next `prefill`, or beside others' drafts by `score`.

        Args:
            start: what each begins with: its draft's prefill.
        """
        self.leave()
        n = min(len(self._free_slots), self._count_arrived())
        began = self.meter.clock.now()
        joined = [self._waiting.popleft() for _ in range(n)]
        # Sequences about as long as each other lie beside each other: attention takes them at once.
        slots = sorted(self._free_slots)[:n]
        by_length = sorted(joined, key=lambda session: len(session.tokens()))
        slot_by_session = dict(zip(by_length, slots, strict=True))
        for session in joined:
            slot = self._slot_of[session] = slot_by_session[session]
            self._free_slots.remove(slot)
            self._allocators[session] = self._workspace.loans(self._num_slots, slot)
            session.harness.set_states(self._allocators[session])
            if start is not None:
                start(session)
        self.prefill_ns += self.meter.clock.now() - began
        return joined

    def leave(self) -> None:
        """Free the seats of sequences that have ended, and the memory that their states hold."""
        for session in [each for each in self._slot_of if each.finish is not None]:
            self._free_slots.append(self._slot_of.pop(session))
            self._allocators.pop(session).release()
            session.harness.release()

    def _count_arrived(self) -> int:
        """How many of those that wait are there; where none is decoded, waits for the next one."""
        clock = self.meter.clock
        now = clock.now()
        if self._first_ns is None:
            self._first_ns = now
        if not self._arrivals or not self._waiting:
            return len(self._waiting)
        arrival_times = self._arrivals[len(self._arrivals) - len(self._waiting) :]
        wait = self._first_ns + arrival_times[0] - now
        if not self._slot_of and wait > 0:
            clock.sleep(wait)
            began, now = now, clock.now()
            self.idle_ns += now - began
        return bisect_right(arrival_times, now - self._first_ns)

    def prefill(self) -> None:
        """Run the prompts of sequences that have joined through the target in one forward; commit
        each one's first token."""
        began = self.meter.clock.now()
        if prompts := self._select_prompts(None):
            self._run_forward((), prompts)
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
        return self._run_forward(drafts, self._select_prompts(self._chunk))

    def forwards(self) -> Sequence[Forward]:
        """The forwards since the last call, for the steps that they led to."""
        first, self._num_reported = self._num_reported, len(self.meter.forwards)
        return self.meter.forwards[first:]

    def _select_prompts(self, max_tokens: int | None) -> list[tuple[Session, int]]:
        """What the next forward reads of prompts, at most so many tokens: of who joined first,
        first."""
        found = []
        for session in self._slot_of:
            n = 0 if _has_first_token(session) else session.harness.scoring.pending_prompt_length
            if max_tokens is not None:
                n = min(n, max_tokens)
                max_tokens -= n
            if n:
                found.append((session, n))
        return found

    def _run_forward(
        self, drafts: Sequence[tuple[Session, Draft]], prompts: Sequence[tuple[Session, int]]
    ) -> list[Tensor]:
        parts = {session: session.harness.scoring.score_input(draft) for session, draft in drafts}
        parts |= {session: session.harness.scoring.prompt_input(n) for session, n in prompts}
        order = sorted(parts, key=self._slot_of.__getitem__)
        outs = self._target.forward_batch(
            [parts[session] for session in order], taps=order[0].harness.scoring.captured_layers
        )
        output_of = dict(zip(order, outs, strict=True))
        for session, n in prompts:
            logits = session.harness.scoring.store_prompt_output(output_of[session], n)
            if logits is not None:
                session.harness.commit_first(logits)
        return [session.harness.scoring.store_output(output_of[session]) for session, _ in drafts]


def _has_first_token(session: Session) -> bool:
    """Whether a sequence has its first token."""
    return session.harness.text.position > 0
