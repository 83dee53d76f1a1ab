"""Checks that a method did not bypass the measurement, by accident or on purpose.

A method can reach the objects through which a session records time and work, and could change them.
So `Watch` uses other sources: its own clock, the number of forwards that each model counts, and the
threads and processes of this program. `find_misreported_step` compares the steps that a method
reports with what the session scored and verified.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specbench_cli.engine.learning import Memory, count_calls
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.head import FeatureHead
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.session import Session
from specbench_cli.engine.step_log import DraftShape, StepRecord
from specbench_cli.engine.types import Forward, Outcome, Step
from specbench_cli.engine.verify.tree import ROOT
from specbench_cli.engine.workspace import Workspace

# ---- clock, forwards, helpers -------------------------------------------------------------------


class Watch:
    """Monitor of the decoding of one request or batch: its times, and the models that ran.

    Args:
        workspace: Workspace with all models that may run.
        memory: Data that the method keeps between prompts. Trainable copies of models in it are
            monitored too, because the method may run them.

    Attributes:
        began_ns, ended_ns: Begin and end of the decoding, in ns of the monotonic clock.
    """

    def __init__(self, workspace: Workspace, memory: Memory) -> None:
        self._workspace, self._memory = workspace, memory
        self._initial_counts = {id(model): (model, model.ran) for model in workspace.models(memory)}
        self._initial_calls = {id(made): count_calls(made) for made in memory.copies}
        self._threads, self._processes = _list_threads(), _list_processes()
        self._sessions: Sequence[Session] = ()
        self.began_ns = self.ended_ns = 0

    def begin(self, *sessions: Session) -> None:
        """Start the timers of requests that are decoded together. Call the method
        right after it."""
        for session in sessions:
            session.harness.begin()
        self._sessions = sessions
        self._start_times = [_get_start_times(session) for session in sessions]
        self.began_ns = min(start for start, _ in self._start_times)

    def end(self) -> None:
        """Stop the timer, after the method has returned."""
        self.ended_ns = time.perf_counter_ns()

    def find_fault(self, meter: Meter) -> str | None:
        """Return a message if the trace of forwards contradicts this monitor, otherwise None.

        Args:
            meter: The complete trace, with times in ns.
        """
        found = self._find_clock_fault() or self.find_helpers()
        return found or self._find_unmetered(meter) or _find_overlap(meter.forwards)

    def find_helpers(self) -> str | None:
        """Return a message about threads or processes that the method has started,
        otherwise None."""
        transport = self._workspace.transport
        threads = len(_list_threads() - self._threads - transport.threads)
        if threads:
            return f"the method started {threads} threads, whose work is not measured"
        processes = len(_list_processes() - self._processes - {transport.pid})
        if processes:
            return f"the method started {processes} processes, whose work is not measured"
        return None

    def _find_clock_fault(self) -> str | None:
        for session, start in zip(self._sessions, self._start_times, strict=True):
            text = session.harness.text
            if _get_start_times(session) != start:
                late = (_get_start_times(session)[0] - start[0]) / 1e6
                return f"the timer was restarted {late:.3g} ms after the beginning"
            if not start[0] <= text.first_ns <= text.last_ns <= self.ended_ns:
                return "the timer was changed: token times are outside of the decoding time"
        return None

    def _find_unmetered(self, meter: Meter) -> str | None:
        counted: Counter[str] = Counter()
        for model in self._workspace.models(self._memory):
            counted[model.name] += model.ran - self._initial_count(model)
        separate_process = (
            self._workspace.transport.pid is not None
        )  # a peer process is counted separately
        traced = Counter(f.model for f in meter.forwards if not (separate_process and f.worker))
        for made in self._memory.copies:
            if not isinstance(made, Decoder):
                continue  # not metered
            called = count_calls(made) - self._initial_calls.get(id(made), 0)
            # If a trainable copy has `publish`, its forwards do not call its module. Each forward
            # of any other copy calls its module once.
            own = 0 if hasattr(made, "publish") else made.ran - self._initial_count(made)
            if called > own:
                return f"the module of {made.name} was called without being recorded"
        for name in {*counted, *traced}:
            if counted[name] != traced[name]:
                return (
                    f"the {name} ran {counted[name]} forwards, but the trace has {traced[name]}:"
                    " some were not recorded"
                )
        return None

    def _initial_count(self, model: Decoder | FeatureHead) -> int:
        """Return the number of forwards that a model had run at the beginning.

        The number is 0 if the model was created later.
        """
        return self._initial_counts.get(id(model), (model, 0))[1]


def _get_start_times(session: Session) -> tuple[int, int]:
    return session.harness.text.started_ns, session.harness.meter.clock.zero_ns


def _list_threads() -> set[int]:
    """Return the ids of the Python threads of this process."""
    return set(sys._current_frames())


def _list_processes() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def _find_overlap(forwards: Sequence[Forward]) -> str | None:
    """Return a message if two forwards of one worker ran at the same time, otherwise None."""
    ends: dict[int, int] = {}
    for forward in forwards:
        if forward.t0_ns < ends.get(forward.worker, forward.t0_ns):
            return f"two forwards of worker {forward.worker} ran at the same time, in two threads"
        ends[forward.worker] = forward.t1_ns
    return None


# ---- steps --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """A step as the method reports it, without the draft's distributions."""

    draft: DraftShape | None
    outcome: Outcome

    @classmethod
    def from_step(cls, step: Step) -> ReportedStep:
        """Return what a step reports."""
        return cls(None if step.draft is None else DraftShape.from_draft(step.draft), step.outcome)


def find_misreported_step(
    records: Sequence[StepRecord], reported: Sequence[ReportedStep], *, bonus: bool
) -> str | None:
    """Return a message about the first step that the method reports wrongly, otherwise None.

    Args:
        bonus: True if the target adds a bonus token after a fully accepted draft (`Method.bonus`).
    """
    for number, (record, step) in enumerate(zip(records, reported, strict=False), start=1):
        wrong = find_misreport(record, step, bonus=bonus, last=number == len(reported))
        if wrong is not None:
            return f"step {number}: {wrong}"
    if len(records) != len(reported):
        return f"{len(reported)} steps are reported, but drafts were scored for {len(records)}"
    return None


def find_misreport(
    record: StepRecord, reported: ReportedStep, *, bonus: bool, last: bool
) -> str | None:
    """Return how a reported step differs from what the session recorded, or None if both agree.

    The function compares the tokens of the draft and the number of verified levels. The session
    recorded the draft before the target's forward.

    Args:
        last: True if the output ends in this step. The stop rule may then have shortened the draft.
    """
    if len(record.scored) != 1 or len(record.verified) > 1:
        return (
            f"{len(record.scored)} drafts were scored and {len(record.verified)} verified before"
            " one `commit`; a step has one draft"
        )
    (scored,), draft, outcome = record.scored, reported.draft, reported.outcome
    verified = record.verified[0] if record.verified else scored
    if not _continues(scored, verified, last_too=not bonus):
        return f"{_describe(scored)} was scored, but {_describe(verified)} was verified"
    if draft is None or not _are_equal(draft, verified):
        return f"{_describe(draft)} is reported, but {_describe(verified)} was verified"
    if outcome != record.committed:
        return f"{outcome} is reported, but {record.committed} was committed"
    path, parents, ids = outcome.path, _parents_of_nodes(draft), draft.tokens.tolist()
    accepted, committed = len(path), outcome.committed
    drafted = [word in ("accepted", "relaxed") for word in outcome.origin]
    if drafted != [at < accepted for at in range(len(committed))]:
        return (
            f"origin {outcome.origin} does not fit {accepted} accepted of {len(committed)} tokens"
        )
    if not all(0 <= node < len(ids) for node in path) or (
        [parents[node] for node in path] != [ROOT, *path[:-1]][:accepted]
        or [ids[node] for node in path] != list(committed[:accepted])
    ):
        return f"path {path} of {_describe(draft)} does not name {committed[:accepted]}"
    rejected = (path[-1] if path else ROOT) in parents
    cut = last and len(committed) == accepted
    if outcome.tested != accepted + (rejected and not cut):
        return f"{outcome.tested} levels tested of {_describe(draft)}, but {accepted} accepted"
    if not cut and not rejected and len(committed) > accepted and ids and not bonus:
        return f"a token follows {_describe(draft)}, but the method has no bonus token"
    return None


def _parents_of_nodes(shape: DraftShape) -> tuple[int, ...]:
    return shape.parents or tuple(range(ROOT, shape.tokens.shape[0] - 1))


def _are_equal(a: DraftShape, b: DraftShape) -> bool:
    return _parents_of_nodes(a) == _parents_of_nodes(b) and (
        a.tokens is b.tokens or a.tokens.tolist() == b.tokens.tolist()
    )


def _continues(scored: DraftShape, verified: DraftShape, *, last_too: bool) -> bool:
    """Return True if the verified draft is the scored draft.

    With `last_too`, a verified chain may have one more token than the scored chain. The last row of
    logits then verifies this token, and no bonus token follows.
    """
    n = scored.tokens.shape[0]
    if last_too and verified.parents is None and verified.tokens.shape[0] == n + 1:
        verified = DraftShape(verified.tokens[:n], None)
    return _are_equal(scored, verified)


def _describe(shape: DraftShape | None) -> str:
    if shape is None:
        return "no draft"
    ids = shape.tokens.tolist()
    kind = "a chain" if _parents_of_nodes(shape) == tuple(range(ROOT, len(ids) - 1)) else "a tree"
    listed = f" {ids}" if len(ids) <= 8 else ""
    return f"{kind} of {len(ids)} tokens{listed}"
