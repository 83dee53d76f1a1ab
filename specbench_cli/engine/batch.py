"""Continuous batching: several requests decoded together, with one target forward per step.

Each request has a session. A slot is the memory for the model states of one sequence. When a
sequence ends, its slot becomes free and a waiting sequence joins. The output of one sequence does
not depend on the other sequences, because each has its own states, random numbers and sampling
noise.
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
from specbench_cli.former_names import renamed_members


@renamed_members(over="finished", live="active")
class Batch:
    """Sessions of the requests that one method decodes together.

    Args:
        size: Maximum number of sequences in a step. Default: all requests.
        slots: Number of sequences that have model states at the same time, at least `size`.
            Default: `size`. All further requests wait in their order.
        chunk: Maximum number of prompt tokens in one target forward, in addition to the draft
            tokens. None means no limit. The limit does not apply while no sequence is being
            decoded.
        arrivals: Arrival time of each request, in ascending order, in seconds after the first call
            of `join`. Empty means that all requests arrive at the beginning.
        memory: Data that the method keeps between prompts. All sequences share it.
        recordings, references: Arguments of the sessions, one for each request; see `Session`.
        session_class: Class of the sessions.
        clock: Clock for times and waits. Default: the clock of the target's device.

    Attributes:
        sessions: One session for each request, in the order of the requests.
        size: Maximum number of sequences in a step, at most the number of requests.
        meter: Trace of all forwards. `Forward.rows` lists the rows of each sequence.
        prefill_ns: Time in ns for prefills of the draft model, and for prefills of the target
            outside the steps. `Forward.prompt_places` marks prompt rows inside the steps.
        idle_ns: Time in ns during which no request had arrived and was still unfinished.
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
        if self._num_slots:  # allocate the states before the clock starts
            allocate_state = workspace.create_allocator(self._num_slots)
            for _ in range(1 if sampling.contrast is None else 2):
                allocate_state(target, 0)

    # ---- scheduling -----------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True if all sequences of the batch have ended."""
        return not self._waiting and all(session.finish is not None for session in self._slot_of)

    @property
    def active(self) -> list[Session]:
        """Sequences that have their first token and have not ended, in the order in which they
        joined.
        """
        return [each for each in self._slot_of if each.finish is None and _has_first_token(each)]

    def has_slot(self, session: Session) -> bool:
        """Return True if a sequence has joined and still has its slot."""
        return session in self._slot_of

    def join(self, start: Callable[[Session], object] | None = None) -> list[Session]:
        """Let waiting sequences join in free slots. Return the sequences that joined.

        The next call of `prefill` or `score` processes their prompts.

        Args:
            start: Function called with the session of each new sequence. It prefills the draft
                model.
        """
        self.leave()
        n = min(len(self._free_slots), self._count_arrived())
        began = self.meter.clock.now_ns()
        joined = [self._waiting.popleft() for _ in range(n)]
        # Sequences of similar length get neighbouring slots, so that one attention call can process
        # several of them.
        slots = sorted(self._free_slots)[:n]
        by_length = sorted(joined, key=lambda session: len(session.tokens()))
        slot_by_session = dict(zip(by_length, slots, strict=True))
        for session in joined:
            slot = self._slot_of[session] = slot_by_session[session]
            self._free_slots.remove(slot)
            self._allocators[session] = self._workspace.create_allocator(self._num_slots, slot)
            session.harness.set_states(self._allocators[session])
            if start is not None:
                start(session)
        self.prefill_ns += self.meter.clock.now_ns() - began
        return joined

    def leave(self) -> None:
        """Free the slots and the state memory of sequences that have ended."""
        for session in [each for each in self._slot_of if each.finish is not None]:
            self._free_slots.append(self._slot_of.pop(session))
            self._allocators.pop(session).release()
            session.harness.release()

    def _count_arrived(self) -> int:
        """Return the number of waiting sequences that have arrived.

        If no sequence is being decoded, wait for the next arrival.
        """
        clock = self.meter.clock
        now_ns = clock.now_ns()
        if self._first_ns is None:
            self._first_ns = now_ns
        if not self._arrivals or not self._waiting:
            return len(self._waiting)
        arrival_times = self._arrivals[len(self._arrivals) - len(self._waiting) :]
        wait = self._first_ns + arrival_times[0] - now_ns
        if not self._slot_of and wait > 0:
            clock.sleep(wait)
            began, now_ns = now_ns, clock.now_ns()
            self.idle_ns += now_ns - began
        return bisect_right(arrival_times, now_ns - self._first_ns)

    def prefill(self) -> None:
        """Prefill the new sequences in one target forward, and commit the first token of each."""
        began = self.meter.clock.now_ns()
        if prompts := self._select_prompts(None):
            self._run_forward((), prompts)
        self.forwards()  # prefill belongs to no step
        self.prefill_ns += self.meter.clock.now_ns() - began

    # ---- a step ---------------------------------------------------------------------------------

    def score(self, drafts: Sequence[tuple[Session, Draft]]) -> list[Tensor]:
        """Run one target forward over all drafts, and over the next prompt tokens of new sequences.

        If a prompt is complete, commit the first token of its sequence.

        Returns:
            Logits [m + 1, V] for each draft of m tokens: for the root and each draft token.

        Raises:
            MethodFault: A draft is malformed.
        """
        return self._run_forward(drafts, self._select_prompts(self._chunk))

    def forwards(self) -> Sequence[Forward]:
        """Return the forwards since the last call of this function. They belong to the current
        step.
        """
        first, self._num_reported = self._num_reported, len(self.meter.forwards)
        return self.meter.forwards[first:]

    def _select_prompts(self, max_tokens: int | None) -> list[tuple[Session, int]]:
        """Return how many prompt tokens of each new sequence the next forward processes.

        Sequences that joined earlier come first.

        Args:
            max_tokens: Maximum number of prompt tokens in total. None means no limit.
        """
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
            [parts[session] for session in order],
            captured_layers=order[0].harness.scoring.captured_layers,
        )
        output_of = dict(zip(order, outs, strict=True))
        for session, n in prompts:
            logits = session.harness.scoring.store_prompt_output(output_of[session], n)
            if logits is not None:
                session.harness.commit_first(logits)
        return [session.harness.scoring.store_output(output_of[session]) for session, _ in drafts]


def _has_first_token(session: Session) -> bool:
    return session.harness.text.position > 0
