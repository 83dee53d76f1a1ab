"""A cell: one method decodes one prompt once, and what is kept of that."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.learning import Memory, Saved, learn
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.request import Request
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Forward, Step
from specbench_cli.engine.verify.hooks import steps_of
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.watch import Told, Watch, misreported
from specbench_cli.engine.workers.transport import Transport
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import (
    MethodFault,
    SpecbenchError,
    WorkerLost,
    message_of,
    on_one_line,
    truncate,
)
from specbench_cli.measure.hardware.energy import Energy
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.measure.phases import divided
from specbench_cli.measure.shown import shown
from specbench_cli.plan.plan import Arm
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import Batch as Batched
from specbench_cli.store.schema import (
    Drafted,
    Likelihood,
    Ns,
    Params,
    Record,
    Steps,
    Trace,
    Verdict,
)
from specbench_cli.time_limit import limit_time

WARM_UP_TOKENS = 16
WARM_UP_ROUNDS = 2

NO_ENERGY = Energy((), "nobody asked")

PAUSE_S = 0.01  # lets the machine come to rest between two cells


@dataclass
class Measured:
    """What a decoding left behind; `error` is set if it failed."""

    output: list[int]
    origin: list[str]
    finish: str
    steps: Steps
    trace: Trace
    ns: Ns
    peak: int | None
    drafts: list[Drafted]
    extra: dict[str, float]
    version: int | None
    error: str | None = None
    batch: Batched | None = None
    joules: float | None = None

    @classmethod
    def failed(cls, error: str) -> Measured:
        """Nothing but why there is nothing."""
        nothing = Trace.pack([])
        return cls([], [], "error", Steps(), nothing, Ns(), None, [], {}, None, error)


@dataclass(slots=True)
class Delay:
    """What learning from one request delays the row's next one by.

    void: whether it was measured while others took too much of the machine.
    """

    ns: int = 0
    void: bool = False


class Cell:
    """One output to be made, timed, judged and written.

    Attributes:
        pass_: of the run, from 1.
        measured: the last measurement.
        other_cpu, void: the window's verdict, once it is settled.
        delay: of the row's next cell.
        lost: why the cell has no output, and gets no record: a worker was lost.

    A cell with a `recording` is given its tokens (`engine.replay`); one with a `reference`,
    vanilla's output, may read it (`Method.upper_bound`). A `pictured` one keeps its drafts. Each
    measurement begins with the same `memory`, and fails after `limit_s` seconds. `load`: how the
    requests of its pass arrive. `energy`: what counts joules.
    """

    def __init__(
        self,
        arm: Arm,
        prompt: Prompt,
        request: Request,
        workspace: Workspace,
        sampling: Sampling,
        pass_: int,
        memory: Memory,
        recording: Sequence[int] | None = None,
        reference: Sequence[int] | None = None,
        *,
        pictured: bool = False,
        delayed_by: Delay | None = None,
        limit_s: float | None = None,
        load: str | None = None,
        energy: Energy = NO_ENERGY,
    ) -> None:
        self.arm = arm
        self.prompt = prompt
        self.request = request
        self._workspace = workspace.alone(arm.method.decodes)
        self._sampling = sampling
        self.pass_ = pass_
        self._memory = memory
        self.recording = recording
        self.reference = reference
        self.pictured = pictured
        self.limit_s = limit_s
        self._load = load
        self.energy = energy
        self._memory_before: Saved | None = None
        self._delayed_by = Delay() if delayed_by is None else delayed_by
        self.delay = Delay()
        self.measured: Measured | None = None
        self.lost: WorkerLost | None = None
        self.settled = False
        self.other_cpu: float | None = None
        self.void = False

    def measure(self) -> None:
        """Decode the prompt with the clock running; a later call replaces the earlier result.

        Nothing is measured once a worker was lost. Where forwards were recorded meanwhile, which
        takes time once and never again, it is decoded once more."""
        recorded = self._workspace.recorded
        self._measure()
        if self._workspace.recorded > recorded:
            self._measure()

    def _measure(self) -> None:
        if self.lost is not None:
            return
        device = self.rest()
        watch = self.watch()
        learns, version = self.arm.method.learns, self._memory.version
        transport, parallel = self._workspace.transport, self.arm.method.workers > 1
        reset_peak(device, transport.pid if parallel else None)
        kind = PeerSession if self.arm.method.peer else Session
        session = kind(
            self._workspace,
            self.request,
            self._sampling,
            pass_=self.pass_,
            memory=self._memory,
            recording=self.recording,
            reference=self.reference,
        )
        harness, text = session.harness, session.harness.text
        steps, extra = self.counters(), dict[str, float]()
        told: list[Told] = []
        error = None
        gc.disable()
        try:
            with staffed(session, transport, parallel), limited(self.limit_s):
                self.energy.begin()
                watch.begin(session)
                made = self.arm.method.generate(session)
                for step in steps_of(self.arm.method, "generate", made):
                    _count(steps, extra, step)
                    told.append(Told.of(step))
                watch.end()
        except WorkerLost as lost:
            self.lost = lost
            return
        except BaseException as failure:  # a method's fault fails its cell, not the run
            watch.end()
            error = one_line(failure)
        finally:
            gc.enable()
        joules = self.energy.end()
        harness.meter.resolve()
        error = error or watch.fault(harness.meter) or self.fault_of(session, told)
        # A peer tells its steps once it has all of them: its end is when they came.
        ended_ns = text.last_ns if self.arm.method.peer else watch.ended_ns
        self.measured = Measured(
            output=list(session.output()),
            origin=list(text.origin),
            finish=session.finish or "error",
            steps=steps,
            trace=Trace.pack(harness.meter.forwards, harness.meter.messages),
            ns=divided(
                harness.meter.forwards,
                ended_ns - watch.began_ns,
                text.first_ns - watch.began_ns,
                self._delayed_by.ns if learns else None,
            ),
            peak=peak_bytes(device, transport.pid if parallel else None),
            drafts=[_drafted(each) for each in told],
            extra=extra,
            version=version if learns else None,
            error=error,
            joules=joules,
        )
        if isinstance(session, PeerSession):
            ns = self.measured.ns
            seen = (ns.prefill, ns.decode) if session.sees_first else ()
            self.measured.ns, self.measured.extra = Ns(ns.total, *seen), extra | session.counted
        if learns and error is None:
            self._learn(session, self.measured)

    def _learn(self, session: Session, measured: Measured) -> None:
        """Have the method learn from what it decoded; its fault fails this cell."""
        gc.disable()
        try:
            self.delay.ns = learn(self.arm.method, session)
        except BaseException as failure:
            measured.error = one_line(failure)
        finally:
            gc.enable()
        measured.peak = peak_bytes(session.device)

    def batch(self, requests: Sequence[Request], size: int, rest: Mapping[str, Any]) -> Batch:
        """Requests to be decoded as this cell's would be alone, `size` of them in a step."""
        return Batch(
            self._workspace,
            requests,
            self._sampling,
            size=size,
            held=self.arm.method.held(size),
            pass_=self.pass_,
            memory=self._memory,
            **rest,
        )

    def counters(self) -> Steps:
        """Those of no step; of relaxed levels where an accept rule is on."""
        rule = self.arm.method.accept
        return Steps(relaxed=None if rule is None or rule.off else [])

    def same(self, other: Measured) -> bool:
        """Whether another decoding of the prompt came to the same: output and counters. What
        workers' forwards were is left out: how many were cancelled is a matter of time."""
        assert self.measured is not None
        m = self.measured
        counted = [
            each.trace.counted()[:2] if self.arm.method.workers == 1 else None
            for each in (m, other)
        ]
        return counted[0] == counted[1] and (m.output, m.origin, m.steps, m.drafts) == (
            other.output,
            other.origin,
            other.steps,
            other.drafts,
        )

    def fault_of(self, session: Session, told: Sequence[Told]) -> str | None:
        """What is wrong with an output that came without an error, or with what is told of the
        steps that it came in; None if nothing is."""
        if session.finish is None:
            return (
                f"stopped after {len(session.output())} tokens, with neither EOS nor stop string"
                f" nor the budget of {self.request.stop.max_new_tokens}"
            )
        if self.replays and session.output() != self.recording:
            return "left the recorded tokens: it does not decide by `session.verify`"
        method = self.arm.method
        return None if method.peer else misreported(session.harness.seen, told, bonus=method.bonus)

    def watch(self) -> Watch:
        """What sees a decoding of this cell from outside of the method."""
        return Watch(self._workspace, self._memory)

    def rest(self) -> torch.device:
        """Have memory as it was before the first measurement, and let the machine come to rest;
        returns the target's device."""
        if self._memory_before is None:
            self._memory_before = self._memory.save()
        else:
            self._memory.restore(self._memory_before)
        self.delay.ns = 0
        gc.collect()
        time.sleep(PAUSE_S)
        return self._workspace.decoders["target"].device

    @property
    def delayed_ns(self) -> int:
        """What learning from the request before delayed it by."""
        return self._delayed_by.ns

    @property
    def replays(self) -> bool:
        """Whether recorded tokens decide in place of the target."""
        return self.recording is not None

    def settle(self, other_cpu: float | None, void: bool) -> None:
        """See `window.Measurable`."""
        self.settled, self.other_cpu, self.void = True, other_cpu, void
        self.delay.void = void and self.delay.ns > 0
        self._memory_before = None

    def record(
        self,
        verdict: Verdict | None,
        score: float | None = None,
        log_likelihood: float | None = None,
        likelihood: Likelihood | None = None,
        log_probs: list[float] | None = None,
        valid: bool | None = None,
    ) -> Record:
        """The cell as it is written; `verdict` is None for a failed one."""
        assert self.measured is not None
        m, method, peer = self.measured, self.arm.method, self.arm.method.peer
        failed, void = m.error is not None, self.void or self._delayed_by.void
        ns = Ns() if failed or void else m.ns
        depth = self._workspace.decoders["target"].n_layers
        targets, drafts, equivalents = m.trace.counted(depth)
        unseen = failed or peer
        untold = failed or (peer and not m.steps.levels and len(m.output) > 1)
        return Record(
            prompt_id=self.prompt.prompt_id,
            cluster=self.prompt.cluster,
            task=self.prompt.task,
            family=self.prompt.family,
            category=self.prompt.category,
            turn=self.prompt.turn,
            method=self.arm.name,
            label=self.arm.label,
            peer=peer,
            params=Params(
                shown(self.arm.passed), shown(method.params.model_dump()), self.arm.source
            ),
            sampling="replay" if self.replays else self._sampling.rule,
            guarantee=self.arm.guarantees[self._sampling.rule],
            pass_=self.pass_,
            seed=self._sampling.seed,
            output_ids=None if failed else m.output,
            origin=None if untold else m.origin,
            n_tokens=None if failed else len(m.output),
            finish="error" if failed else m.finish,
            steps=None if untold else m.steps,
            drafts=m.drafts if self.pictured and not untold else None,
            extra=None if failed else {truncate(k): v for k, v in m.extra.items()} or None,
            target_forwards=None if unseen else targets,
            draft_forwards=None if unseen else drafts,
            target_equivalents=None if unseen else equivalents,
            version=m.version,
            batch=m.batch and replace(m.batch, load=self._load),
            forwards=None if unseen else m.trace,
            ns=ns,
            peak_bytes=m.peak,
            energy_j=None if failed or void else m.joules,
            other_cpu=self.other_cpu,
            verdict=verdict,
            log_likelihood=log_likelihood,
            likelihood=likelihood,
            log_probs=log_probs,
            score=score,
            valid=valid,
            synthetic=self._workspace.synthetic,
            void=void,
            error=None if m.error is None else on_one_line(str(m.error)),
        )


class Together:
    """Cells of one row whose prompts are decoded together, and measured as one.

    Each gets the steps and the forwards that it took part in, and an equal share of the time: over
    all prompts these add up to what the row took.

    Args:
        size: most of them that take part in a step; others join as these come to their ends.
        chunk: most tokens of prompts that a forward reads beside these.
        arrivals: of each, seconds from the beginning; none: all are there.
    """

    def __init__(
        self, cells: Sequence[Cell], size: int, chunk: int, arrivals: Sequence[float] = ()
    ) -> None:
        self._cells, self._size, self._arrivals = cells, size, arrivals
        self._chunk = chunk

    def measure(self) -> None:
        """Decode the prompts with the clock running; see `Cell.measure`."""
        cells, first = self._cells, self._cells[0]
        device = first.rest()
        watch = first.watch()
        reset_peak(device, None)
        batch = first.batch([cell.request for cell in cells], self._size, self._known())
        counted = [(cell.counters(), dict[str, float](), list[Told]()) for cell in cells]
        error = None
        gc.disable()
        try:
            with limited(first.limit_s and first.limit_s * len(cells)):
                first.energy.begin()
                watch.begin(*batch.sessions)
                made = first.arm.method.generate_batch(batch)
                for step in steps_of(first.arm.method, "generate_batch", made, len(counted)):
                    steps, extra, told = counted[step.seq]
                    _count(steps, extra, step)
                    told.append(Told.of(step))
                watch.end()
        except BaseException as failure:  # a method's fault fails its cells, not the run
            watch.end()
            error = one_line(failure)
        finally:
            gc.enable()
        joules = first.energy.end()
        batch.meter.resolve()
        error = error or watch.fault(batch.meter)
        peak = peak_bytes(device, None)
        texts = [session.harness.text for session in batch.sessions]
        started = watch.began_ns
        total = watch.ended_ns - started
        busy = divided(batch.meter.forwards, total - batch.idle_ns, batch.prefill_ns, since=0)
        share = _share(busy, len(cells))
        for place, (cell, session) in enumerate(zip(cells, batch.sessions, strict=True)):
            steps, extra, told = counted[place]
            own = [f for f in batch.meter.forwards if f.rows is None or place in f.rows]
            cell.measured = Measured(
                output=list(session.output()),
                origin=list(texts[place].origin),
                finish=session.finish or "error",
                steps=steps,
                trace=Trace.pack(_own(f, place) for f in own),
                ns=share,
                peak=peak,
                drafts=[_drafted(each) for each in told],
                extra=extra,
                version=None,
                error=error or cell.fault_of(session, told),
                batch=Batched(
                    len(cells),
                    place,
                    total,
                    max(1, texts[place].last_ns - started),
                    batch.size,
                    round(self._arrivals[place] * 1e9) if self._arrivals else None,
                    texts[place].first_ns - started if self._arrivals else None,
                ),
                joules=None if joules is None else joules / len(cells),
            )

    def settle(self, other_cpu: float | None, void: bool) -> None:
        """See `window.Measurable`."""
        for cell in self._cells:
            cell.settle(other_cpu, void)

    def _known(self) -> dict[str, Any]:
        """What the cells know beforehand of their outputs."""
        recordings = {at: cell.recording for at, cell in enumerate(self._cells) if cell.recording}
        references = {at: cell.reference for at, cell in enumerate(self._cells) if cell.reference}
        known = {"recordings": recordings, "references": references}
        return {**known, "arrivals": self._arrivals, "chunk": self._chunk}


def measurable(
    cells: Sequence[Cell], size: int, chunk: int, arrivals: Sequence[float] = ()
) -> Cell | Together:
    """Cells of one row as they are measured: one alone, or several as `Together` has it."""
    return cells[0] if size == 1 and not arrivals else Together(cells, size, chunk, arrivals)


def _own(forward: Forward, place: int) -> Forward:
    """What a sequence had in a batch's forward: its rows, and what they were for."""
    if forward.rows is None:
        return forward
    role = "prefill" if place in forward.reading else forward.role
    return replace(forward, n_tokens=forward.rows[place], role=role)


def _share(ns: Ns, n: int) -> Ns:
    """One of n equal shares of a time, whose parts add up."""
    prefill, draft, verify, host = (
        (part or 0) // n for part in (ns.prefill, ns.draft, ns.verify, ns.host)
    )
    decode = draft + verify + host
    return Ns(prefill + decode, prefill, decode, draft, verify, host)


def _count(steps: Steps, extra: dict[str, float], step: Step) -> None:
    draft, outcome = step.draft, step.outcome
    steps.levels.append(draft.levels if draft else 0)
    steps.nodes.append(draft.nodes if draft else 0)
    steps.tested.append(outcome.tested)
    relaxed = outcome.origin.count("relaxed")
    if relaxed and steps.relaxed is None:  # by a rule of the method's own
        steps.relaxed = [0] * len(steps.accepted)
    if steps.relaxed is not None:
        steps.relaxed.append(relaxed)
    steps.accepted.append(outcome.origin.count("accepted"))
    steps.committed.append(len(outcome.committed))
    for name, value in step.extra.items():
        if isinstance(value, int | float):
            extra[name] = extra.get(name, 0) + value


@contextmanager
def staffed(session: Session, transport: Transport, parallel: bool) -> Iterator[None]:
    """While entered, a method may have workers beside the target, which computes where it then
    should; afterwards they have nothing more to do, and disturb no other method."""
    with transport.placed() if parallel else nullcontext():
        try:
            yield
        except Exception:
            for worker in session.harness.workers:
                with suppress(Exception):  # the first failure counts
                    worker.settle()
            raise
        for worker in session.harness.workers:
            worker.settle()


def _drafted(told: Told) -> Drafted:
    draft, path = told.draft, list(told.outcome.path)
    if draft is None:
        return Drafted([], None, path)
    return Drafted(
        draft.tokens.tolist(), None if draft.parents is None else list(draft.parents), path
    )


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """While entered, Python code is interrupted after so many seconds; in the main thread of a
    system that has such a timer.

    Raises:
        MethodFault: it was.
    """
    message = f"no end after {seconds or 0:g} s (--timeout-per-prompt)"
    with limit_time(seconds, message, MethodFault):
        yield


def warm_up(
    arm: Arm,
    workspace: Workspace,
    request: Request,
    sampling: Sampling,
    memory: Memory,
    together: Sequence[Request] = (),
    size: int = 1,
) -> None:
    """Run a row a little: lazy set-up, caches and clocks are then as they will be.

    Args:
        together: requests that are decoded as a batch, too, `size` of them in a step.
    """
    kind = PeerSession if arm.method.peer else Session
    own = memory if arm.method.learns else None
    workspace = workspace.alone(arm.method.decodes)
    session = kind(workspace, request, sampling, memory=own)
    with staffed(session, workspace.transport, arm.method.workers > 1):
        for _ in arm.method.generate(session):
            pass
    if arm.method.learns:
        learn(arm.method, session)
    if together and arm.method.batches:
        held = arm.method.held(size)
        batch = Batch(workspace, together, sampling, size=size, held=held, memory=own)
        for _ in arm.method.generate_batch(batch):
            pass


def one_line(failure: BaseException) -> str:
    """The failure, where it arose and what to do about it, without a path of this machine.

    Raises:
        KeyboardInterrupt: it is one: somebody wants the run to stop.
    """
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    frames = traceback.extract_tb(failure.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    then = f"; {failure.hint}" if isinstance(failure, SpecbenchError) and failure.hint else ""
    text = message_of(failure) or "no message"
    return on_one_line(f"{type(failure).__name__}: {text}{where}{then}")
