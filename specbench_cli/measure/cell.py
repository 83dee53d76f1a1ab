"""A cell: one method decodes one prompt once, and what is kept of that."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.learning import Memory, MemorySnapshot, learn
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.request import Request
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.hooks import steps_of
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.watch import ReportedStep, Watch, find_misreported_step
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import (
    WorkerLost,
    on_one_line,
    truncate,
)
from specbench_cli.measure.energy import Energy
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.measure.method_code import limited, one_line, staffed
from specbench_cli.measure.phases import divided
from specbench_cli.measure.shown import shown
from specbench_cli.plan.method_run import MethodRun
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

    If `recording` is set, the tokens are replayed from it (`engine.sequence.RecordedOutput`). If
    `reference`, vanilla's output, is set, the method may read it (`Method.upper_bound`). If
    `pictured` is True, the drafts are kept. Each measurement starts with the same `memory` and
    fails after `limit_s` seconds. `load` describes how the requests of its pass arrive. `energy`
    is the meter that counts joules.
    """

    def __init__(
        self,
        method_run: MethodRun,
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
        self.method_run = method_run
        self.prompt = prompt
        self.request = request
        self._workspace = workspace.decode_alone(method_run.method.decodes)
        self._sampling = sampling
        self.pass_ = pass_
        self._memory = memory
        self.recording = recording
        self.reference = reference
        self.pictured = pictured
        self.limit_s = limit_s
        self._load = load
        self.energy = energy
        self._memory_before: MemorySnapshot | None = None
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
        learns, version = self.method_run.method.learns, self._memory.version
        transport, parallel = self._workspace.transport, self.method_run.method.workers > 1
        reset_peak(device, transport.pid if parallel else None)
        kind = PeerSession if self.method_run.method.peer else Session
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
        told: list[ReportedStep] = []
        error = None
        gc.disable()
        try:
            with staffed(session, transport, parallel), limited(self.limit_s):
                self.energy.begin()
                watch.begin(session)
                made = self.method_run.method.generate(session)
                for step in steps_of(self.method_run.method, "generate", made):
                    count_step(steps, extra, step)
                    told.append(ReportedStep.of(step))
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
        error = error or watch.find_fault(harness.meter) or self.fault_of(session, told)
        # A peer tells its steps once it has all of them: its end is when they came.
        ended_ns = text.last_ns if self.method_run.method.peer else watch.ended_ns
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
            drafts=[drafted(each) for each in told],
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
            self.delay.ns = learn(self.method_run.method, session)
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
            slots=self.method_run.method.held(size),
            pass_=self.pass_,
            memory=self._memory,
            **rest,
        )

    def counters(self) -> Steps:
        """Those of no step; of relaxed levels where an accept rule is on."""
        rule = self.method_run.method.accept
        return Steps(relaxed=None if rule is None or rule.off else [])

    def same(self, other: Measured) -> bool:
        """Whether another decoding of the prompt came to the same: output and counters. What
        workers' forwards were is left out: how many were cancelled is a matter of time."""
        m = self.result
        counted = [
            each.trace.counted()[:2] if self.method_run.method.workers == 1 else None
            for each in (m, other)
        ]
        return counted[0] == counted[1] and (m.output, m.origin, m.steps, m.drafts) == (
            other.output,
            other.origin,
            other.steps,
            other.drafts,
        )

    def fault_of(self, session: Session, told: Sequence[ReportedStep]) -> str | None:
        """What is wrong with an output that came without an error, or with what is told of the
        steps that it came in; None if nothing is."""
        if session.finish is None:
            return (
                f"stopped after {len(session.output())} tokens, with neither EOS nor stop string"
                f" nor the budget of {self.request.stop.max_new_tokens}"
            )
        if self.replays and session.output() != self.recording:
            return "left the recorded tokens: it does not decide by `session.verify`"
        method = self.method_run.method
        return (
            None
            if method.peer
            else find_misreported_step(session.harness.step_records, told, bonus=method.bonus)
        )

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
    def result(self) -> Measured:
        """Return the last measurement; there must be one."""
        assert self.measured is not None
        return self.measured

    @property
    def delayed_ns(self) -> int:
        """What learning from the request before delayed it by."""
        return self._delayed_by.ns

    @property
    def replays(self) -> bool:
        """Whether recorded tokens decide in place of the target."""
        return self.recording is not None

    def settle(self, other_cpu: float | None, void: bool) -> None:
        """See `quiet.Measurable`."""
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
        m, method, peer = self.result, self.method_run.method, self.method_run.method.peer
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
            method=self.method_run.name,
            label=self.method_run.label,
            peer=peer,
            params=Params(
                shown(self.method_run.passed),
                shown(method.params.model_dump()),
                self.method_run.source,
            ),
            sampling="replay" if self.replays else self._sampling.rule,
            guarantee=self.method_run.guarantees[self._sampling.rule],
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


def count_step(steps: Steps, extra: dict[str, float], step: Step) -> None:
    """Add a step to the counters of a decoding."""
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


def drafted(told: ReportedStep) -> Drafted:
    """Return the draft of a step, as a record keeps it."""
    draft, path = told.draft, list(told.outcome.path)
    if draft is None:
        return Drafted([], None, path)
    return Drafted(
        draft.tokens.tolist(), None if draft.parents is None else list(draft.parents), path
    )
