"""Measurement: one prompt, decoded and timed once by one method, and its record."""

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
from specbench_cli.engine.verify.hooks import check_steps
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.watch import ReportedStep, Watch, find_misreported_step
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import (
    WorkerLost,
    to_one_line,
    truncate,
)
from specbench_cli.measure.energy import EnergyMeter
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.measure.method_code import describe_failure, enforce_time_limit, run_workers
from specbench_cli.measure.phases import split_time
from specbench_cli.measure.redaction import redact_setting
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import (
    BatchMembership,
    DraftedTokens,
    Likelihood,
    Ns,
    Params,
    Record,
    Steps,
    Trace,
    Verdict,
)

NO_METER = EnergyMeter((), "energy is not measured")

PAUSE_S = 0.01
"""Pause in seconds before each measurement, so that earlier work of the machine ends."""


@dataclass
class DecodedOutput:
    """Output of one decoding, with its counters and times.

    origin: Source of each token, such as "accepted", see `Record.origin`.
    peak: Peak memory during the decoding in bytes. None if unknown.
    extra: Sums over all steps of the counters that the method itself reports.
    version: Number of updates of the method's learned data before this output. None if the method
        does not learn.
    error: Error message if the decoding failed.
    batch: Batch in which the prompt was decoded. None if the prompt was decoded alone.
    joules: Energy of the decoding in joules. None if it was not measured.
    """

    output_ids: list[int]
    origin: list[str]
    finish: str
    steps: Steps
    trace: Trace
    ns: Ns
    peak: int | None
    drafts: list[DraftedTokens]
    extra: dict[str, float]
    version: int | None
    error: str | None = None
    batch: BatchMembership | None = None
    joules: float | None = None

    @classmethod
    def failed(cls, error: str) -> DecodedOutput:
        """Return the output of a failed decoding: an error message and no tokens."""
        nothing = Trace.pack([])
        return cls([], [], "error", Steps(), nothing, Ns(), None, [], {}, None, error)


@dataclass(slots=True)
class LearningDelay:
    """Time in ns that a method spent learning from one prompt, which delays its next prompt.

    noisy: True if other processes used too much CPU while the delay was measured.
    """

    ns: int = 0
    noisy: bool = False


class Measurement:
    """Measurement of one method on one prompt in one repeat.

    Args:
        method_run: The method.
        prompt: The prompt.
        request: The request that decodes the prompt.
        workspace: Decoders and their states.
        sampling: Sampling settings.
        pass_: Number of the repeat, from 1.
        memory: Data that the method has learned so far.
        recording: Token ids to replay. They replace the target's choices
            (`engine.sequence.RecordedOutput`). None decodes normally.
        reference: Vanilla's output, for a method that may read it (`Method.upper_bound`).
        keeps_drafts: True stores the draft of each step in the record.
        previous_delay: Learning delay that the previous measurement of the same method caused.
        limit_s: Time in seconds after which the measurement fails.
        load: Name of the load, which defines when requests arrive. None if all requests arrive at
            the start.
        energy: Energy meter.

    Attributes:
        delay: Learning delay that this measurement causes for the next measurement of the method.
        output: The decoded output. None before `measure`.
        lost: Error if a worker process of the method ended. Then there is no output.
        finished: True if the times are accepted, so that the output will not be measured again.
        other_cpu: CPU share of other processes during the measurement.
        noisy: True if `other_cpu` was too high, so that the times are not stored.
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
        keeps_drafts: bool = False,
        previous_delay: LearningDelay | None = None,
        limit_s: float | None = None,
        load: str | None = None,
        energy: EnergyMeter = NO_METER,
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
        self.keeps_drafts = keeps_drafts
        self.limit_s = limit_s
        self._load = load
        self.energy = energy
        self._memory_before: MemorySnapshot | None = None
        self._previous_delay = LearningDelay() if previous_delay is None else previous_delay
        self.delay = LearningDelay()
        self.output: DecodedOutput | None = None
        self.lost: WorkerLost | None = None
        self.finished = False
        self.other_cpu: float | None = None
        self.noisy = False

    def measure(self) -> None:
        """Decode the prompt and time it. A second call replaces the result of the first.

        Recording a forward as a CUDA graph takes time and happens only once. If this decoding
        recorded a graph, the prompt is decoded again. If a worker process of the method has ended,
        do nothing.
        """
        recorded = self._workspace.recorded
        self._measure()
        if self._workspace.recorded > recorded:
            self._measure()

    def _measure(self) -> None:
        if self.lost is not None:
            return
        device = self.prepare()
        watch = self.create_watch()
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
        steps, extra = self.new_counters(), dict[str, float]()
        reported: list[ReportedStep] = []
        error = None
        gc.disable()
        try:
            with run_workers(session, transport, parallel), enforce_time_limit(self.limit_s):
                self.energy.begin()
                watch.begin(session)
                generated = self.method_run.method.generate(session)
                for step in check_steps(self.method_run.method, "generate", generated):
                    count_step(steps, extra, step)
                    reported.append(ReportedStep.from_step(step))
                watch.end()
        except WorkerLost as lost:
            self.lost = lost
            return
        except BaseException as failure:  # an error of a method fails its output, not the run
            watch.end()
            error = describe_failure(failure)
        finally:
            gc.enable()
        joules = self.energy.end()
        harness.meter.resolve()
        error = error or watch.find_fault(harness.meter) or self.find_fault(session, reported)
        # An external engine reports all steps only after the last one. So the arrival of the last
        # token marks the end of decoding.
        ended_ns = text.last_ns if self.method_run.method.peer else watch.ended_ns
        self.output = DecodedOutput(
            output_ids=list(session.output()),
            origin=list(text.origin),
            finish=session.finish or "error",
            steps=steps,
            trace=Trace.pack(harness.meter.forwards, harness.meter.messages),
            ns=split_time(
                harness.meter.forwards,
                ended_ns - watch.began_ns,
                text.first_ns - watch.began_ns,
                self._previous_delay.ns if learns else None,
            ),
            peak=peak_bytes(device, transport.pid if parallel else None),
            drafts=[build_draft_record(each) for each in reported],
            extra=extra,
            version=version if learns else None,
            error=error,
            joules=joules,
        )
        if isinstance(session, PeerSession):
            ns = self.output.ns
            parts = (ns.prefill, ns.decode) if session.knows_first_token_time else ()
            self.output.ns, self.output.extra = Ns(ns.total, *parts), extra | session.counts
        if learns and error is None:
            self._learn(session, self.output)

    def _learn(self, session: Session, output: DecodedOutput) -> None:
        """Let the method learn from the output, and time the learning.

        An error fails the measurement.
        """
        gc.disable()
        try:
            self.delay.ns = learn(self.method_run.method, session)
        except BaseException as failure:
            output.error = describe_failure(failure)
        finally:
            gc.enable()
        output.peak = peak_bytes(session.device)

    def create_batch(
        self, requests: Sequence[Request], size: int, options: Mapping[str, Any]
    ) -> Batch:
        """Return a batch of requests with the method, models and sampling of this measurement.

        Args:
            requests: The requests.
            size: Maximum number of sequences in a step.
            options: Further keyword arguments of `Batch`.
        """
        return Batch(
            self._workspace,
            requests,
            self._sampling,
            size=size,
            slots=self.method_run.method.max_sequences(size),
            pass_=self.pass_,
            memory=self._memory,
            **options,
        )

    def new_counters(self) -> Steps:
        """Return empty counters of steps.

        The counters include relaxed tokens only if the method has a lossy accept rule.
        """
        rule = self.method_run.method.accept
        return Steps(relaxed=None if rule is None or rule.is_exact else [])

    def matches(self, other: DecodedOutput) -> bool:
        """Return True if another decoding of the prompt has the same output and counters.

        For parallel methods, the numbers of forwards are not compared, because they depend on
        timing.
        """
        m = self.result
        counted = [
            each.trace.count_forwards()[:2] if self.method_run.method.workers == 1 else None
            for each in (m, other)
        ]
        return counted[0] == counted[1] and (m.output_ids, m.origin, m.steps, m.drafts) == (
            other.output_ids,
            other.origin,
            other.steps,
            other.drafts,
        )

    def find_fault(self, session: Session, reported: Sequence[ReportedStep]) -> str | None:
        """Return a description of an error in the output or in the reported steps, or None.

        Args:
            session: The session that decoded the output. The decoding raised no exception.
            reported: The steps that the method reported. They must match the steps that the engine
                recorded.
        """
        if session.finish is None:
            return (
                f"stopped after {len(session.output())} tokens, without EOS or a stop string and"
                f" below the limit of {self.request.stop.max_new_tokens} tokens"
            )
        if self.is_replay and session.output() != self.recording:
            return "did not generate the recorded tokens: the method does not use `session.verify`"
        method = self.method_run.method
        return (
            None
            if method.peer
            else find_misreported_step(session.harness.step_records, reported, bonus=method.bonus)
        )

    def create_watch(self) -> Watch:
        """Return a watch. The watch checks the decoding without relying on the method."""
        return Watch(self._workspace, self._memory)

    def prepare(self) -> torch.device:
        """Prepare a measurement and return the target's device.

        Reset the method's learned data to its content before the first call. Collect garbage. Wait
        for a moment.
        """
        if self._memory_before is None:
            self._memory_before = self._memory.save()
        else:
            self._memory.restore(self._memory_before)
        self.delay.ns = 0
        gc.collect()
        time.sleep(PAUSE_S)
        return self._workspace.decoders["target"].device

    @property
    def result(self) -> DecodedOutput:
        """Output of the last measurement. Use it only after `measure`."""
        assert self.output is not None
        return self.output

    @property
    def previous_delay_ns(self) -> int:
        """Time in ns that learning from the previous prompt delayed this prompt."""
        return self._previous_delay.ns

    @property
    def is_replay(self) -> bool:
        """True if recorded tokens replace the target's choices."""
        return self.recording is not None

    def finish(self, other_cpu: float | None, noisy: bool) -> None:
        """Accept the last result, so that it is not measured again.

        Store how noisy the machine was.
        """
        self.finished, self.other_cpu, self.noisy = True, other_cpu, noisy
        self.delay.noisy = noisy and self.delay.ns > 0
        self._memory_before = None

    def build_record(
        self,
        verdict: Verdict | None,
        score: float | None = None,
        log_likelihood: float | None = None,
        likelihood: Likelihood | None = None,
        log_probs: list[float] | None = None,
        valid: bool | None = None,
    ) -> Record:
        """Return the record of the measurement.

        Args:
            verdict: Comparison of the output with vanilla's output. None if the measurement failed.
            score: Score of the answer.
            log_likelihood, likelihood, log_probs: See `Record`.
            valid: True if the output matches the grammar of the run.
        """
        m, method, peer = self.result, self.method_run.method, self.method_run.method.peer
        failed, noisy = m.error is not None, self.noisy or self._previous_delay.noisy
        ns = Ns() if failed or noisy else m.ns
        depth = self._workspace.decoders["target"].n_layers
        targets, drafts, equivalents = m.trace.count_forwards(depth)
        lacks_forwards = failed or peer
        # External engines (peers) may not report steps. Then an output of several tokens has no
        # counters.
        lacks_steps = failed or (peer and not m.steps.levels and len(m.output_ids) > 1)
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
                redact_setting(self.method_run.user_params),
                redact_setting(method.params.model_dump()),
                self.method_run.source,
            ),
            sampling="replay" if self.is_replay else self._sampling.rule,
            guarantee=self.method_run.guarantees[self._sampling.rule],
            pass_=self.pass_,
            seed=self._sampling.seed,
            output_ids=None if failed else m.output_ids,
            origin=None if lacks_steps else m.origin,
            n_tokens=None if failed else len(m.output_ids),
            finish="error" if failed else m.finish,
            steps=None if lacks_steps else m.steps,
            drafts=m.drafts if self.keeps_drafts and not lacks_steps else None,
            extra=None if failed else {truncate(k): v for k, v in m.extra.items()} or None,
            target_forwards=None if lacks_forwards else targets,
            draft_forwards=None if lacks_forwards else drafts,
            target_equivalents=None if lacks_forwards else equivalents,
            version=m.version,
            batch=m.batch and replace(m.batch, load=self._load),
            forwards=None if lacks_forwards else m.trace,
            ns=ns,
            peak_bytes=m.peak,
            energy_j=None if failed or noisy else m.joules,
            other_cpu=self.other_cpu,
            verdict=verdict,
            log_likelihood=log_likelihood,
            likelihood=likelihood,
            log_probs=log_probs,
            score=score,
            valid=valid,
            synthetic=self._workspace.synthetic,
            void=noisy,
            error=None if m.error is None else to_one_line(str(m.error)),
        )


def count_step(steps: Steps, extra: dict[str, float], step: Step) -> None:
    """Add a step to the counters of a decoding."""
    draft, outcome = step.draft, step.outcome
    steps.levels.append(draft.levels if draft else 0)
    steps.nodes.append(draft.nodes if draft else 0)
    steps.tested.append(outcome.tested)
    relaxed = outcome.origin.count("relaxed")
    if relaxed and steps.relaxed is None:  # the method has its own accept code
        steps.relaxed = [0] * len(steps.accepted)
    if steps.relaxed is not None:
        steps.relaxed.append(relaxed)
    steps.accepted.append(outcome.origin.count("accepted"))
    steps.committed.append(len(outcome.committed))
    for name, value in step.extra.items():
        if isinstance(value, int | float):
            extra[name] = extra.get(name, 0) + value


def build_draft_record(reported: ReportedStep) -> DraftedTokens:
    """Return the draft of a step in the form that records store."""
    draft, path = reported.draft, list(reported.outcome.path)
    if draft is None:
        return DraftedTokens([], None, path)
    return DraftedTokens(
        draft.tokens.tolist(), None if draft.parents is None else list(draft.parents), path
    )
