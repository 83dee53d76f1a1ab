"""A cell: one method decodes one prompt once, and what is kept of that."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specbench_cli.engine.learning import Memory, Saved, learn
from specbench_cli.engine.session import Request, Session
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workers.transport import Transport
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import WorkerLost
from specbench_cli.execute.phases import divided
from specbench_cli.execute.plan import Arm
from specbench_cli.execute.shown import shown
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import Drafted, Ns, Params, Record, Steps, Trace, Verdict

Nodes = tuple[int, ...]
Proposal = tuple[Tensor | None, Nodes | None, Nodes]
"""A draft's tokens and parents, and the path that stood."""

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
    drafts: list[Drafted] | None
    extra: dict[str, float]
    version: int | None
    error: str | None = None


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
    measurement begins with the same `memory`.
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
    ) -> None:
        self.arm = arm
        self.prompt = prompt
        self.request = request
        self._workspace = workspace
        self._sampling = sampling
        self.pass_ = pass_
        self._memory = memory
        self._recording = recording
        self._reference = reference
        self._pictured = pictured
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

        Nothing is measured once a worker was lost."""
        if self.lost is not None:
            return
        if self._memory_before is None:
            self._memory_before = self._memory.save()
        else:
            self._memory.restore(self._memory_before)
        self.delay.ns = 0
        learns, version = self.arm.method.learns, self._memory.version
        device = self._workspace.decoders["target"].device
        gc.collect()
        time.sleep(PAUSE_S)
        transport, parallel = self._workspace.transport, self.arm.method.workers > 1
        reset_peak(device, transport.pid if parallel else None)
        session = Session(
            self._workspace,
            self.request,
            self._sampling,
            pass_=self.pass_,
            memory=self._memory,
            recording=self._recording,
            reference=self._reference,
        )
        steps, extra = Steps(), dict[str, float]()
        proposed: list[Proposal] = []
        error = None
        gc.disable()
        try:
            with staffed(session, transport, parallel):
                session.begin()
                for step in self.arm.method.generate(session):
                    _count(steps, extra, step)
                    if self._pictured:
                        proposed.append(_proposal(step))
        except WorkerLost as lost:
            self.lost = lost
            return
        except Exception as failure:  # a method's fault fails its cell, not the run
            error = _one_line(failure)
        finally:
            gc.enable()
        session.meter.resolve()
        if error is None and session.finish is None:
            error = (
                f"stopped after {len(session.output())} tokens, with neither EOS nor stop string"
                f" nor the budget of {self.request.stop.max_new_tokens}"
            )
        if error is None and self.replays and session.output() != self._recording:
            error = "left the recorded tokens: it does not decide by `session.verify`"
        self.measured = Measured(
            output=list(session.output()),
            origin=list(session.origin),
            finish=session.finish or "error",
            steps=steps,
            trace=Trace.pack(session.meter.forwards, session.meter.messages),
            ns=divided(
                session.meter.forwards,
                session.last_ns - session.started_ns,
                session.first_ns - session.started_ns,
                self._delayed_by.ns if learns else None,
            ),
            peak=peak_bytes(device, transport.pid if parallel else None),
            drafts=[_drafted(*each) for each in proposed] if self._pictured else None,
            extra=extra,
            version=version if learns else None,
            error=error,
        )
        if learns and error is None:
            self._learn(session, self.measured)

    def _learn(self, session: Session, measured: Measured) -> None:
        """Have the method learn from what it decoded; its fault fails this cell."""
        gc.disable()
        try:
            self.delay.ns = learn(self.arm.method, session)
        except Exception as failure:
            measured.error = _one_line(failure)
        finally:
            gc.enable()
        measured.peak = peak_bytes(session.device)

    @property
    def replays(self) -> bool:
        """Whether recorded tokens decide in place of the target."""
        return self._recording is not None

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
        log_probs: list[float] | None = None,
    ) -> Record:
        """The cell as it is written; `verdict` is None for a failed one."""
        assert self.measured is not None
        m, method, peer = self.measured, self.arm.method, self.arm.method.peer
        failed, void = m.error is not None, self.void or self._delayed_by.void
        ns = Ns() if failed or void else Ns(total=m.ns.total) if peer else m.ns
        depth = self._workspace.decoders["target"].n_layers
        kinds = [m.trace.kinds[kind] for kind in m.trace.kind]
        whole = sum(kind.model == "target" and kind.layers[1] == depth for kind in kinds)
        drafting = sum(kind.model != "target" for kind in kinds)
        unseen = failed or peer
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
            guarantee=method.guarantee(self._sampling.rule),
            pass_=self.pass_,
            seed=self._sampling.seed,
            output_ids=None if failed else m.output,
            origin=None if failed else m.origin,
            n_tokens=None if failed else len(m.output),
            finish="error" if failed else m.finish,
            steps=None if failed else m.steps,
            drafts=None if failed else m.drafts,
            extra=None if failed else m.extra or None,
            target_forwards=None if unseen else whole,
            draft_forwards=None if unseen else drafting,
            version=m.version,
            forwards=None if unseen else m.trace,
            ns=ns,
            peak_bytes=m.peak,
            other_cpu=self.other_cpu,
            verdict=verdict,
            log_likelihood=log_likelihood,
            log_probs=log_probs,
            score=score,
            void=void,
            error=m.error,
        )


def _count(steps: Steps, extra: dict[str, float], step: Step) -> None:
    draft, outcome = step.draft, step.outcome
    steps.levels.append(draft.levels if draft else 0)
    steps.nodes.append(draft.nodes if draft else 0)
    steps.tested.append(outcome.tested)
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
            for worker in session.workers:
                with suppress(Exception):  # the first failure counts
                    worker.settle()
            raise
        for worker in session.workers:
            worker.settle()


def _proposal(step: Step) -> Proposal:
    """References to what a step proposed and what stood, without the laws, which are large."""
    draft, path = step.draft, step.outcome.path
    return (None, None, path) if draft is None else (draft.tokens, draft.parents, path)


def _drafted(tokens: Tensor | None, parents: Nodes | None, path: Nodes) -> Drafted:
    return Drafted(
        [] if tokens is None else tokens.tolist(),
        None if parents is None else list(parents),
        list(path),
    )


def _one_line(failure: Exception) -> str:
    """The failure and where it arose, without a path of this machine."""
    frames = traceback.extract_tb(failure.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(failure).split()) or "no message"
    return f"{type(failure).__name__}: {text}{where}"
