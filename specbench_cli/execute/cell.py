"""A cell: one method decodes one prompt once, and what is kept of that."""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

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
from specbench_cli.store.schema import (
    Drafted,
    ForwardKind,
    Ns,
    Params,
    Record,
    Steps,
    Trace,
    Verdict,
)

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
    error: str | None = None


class Cell:
    """One output to be made, timed, judged and written.

    Attributes:
        pass_: of the run, from 1.
        measured: the last measurement.
        other_cpu, void: the window's verdict, once it is settled.
        lost: why the cell has no output, and gets no record: a worker was lost.

    A cell with a `recording` is given its tokens (`engine.replay`); one with a `reference`,
    vanilla's output, may read it (`Method.upper_bound`). A `pictured` one keeps its drafts.
    """

    def __init__(
        self,
        arm: Arm,
        prompt: Prompt,
        request: Request,
        workspace: Workspace,
        sampling: Sampling,
        pass_: int,
        memory: dict[str, Any],
        recording: Sequence[int] | None = None,
        reference: Sequence[int] | None = None,
        *,
        pictured: bool = False,
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
        self._memory_before = copy.deepcopy(memory)
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
        self._memory.clear()
        self._memory.update(copy.deepcopy(self._memory_before))
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
            ),
            peak=peak_bytes(device, transport.pid if parallel else None),
            drafts=[_drafted(*each) for each in proposed] if self._pictured else None,
            extra=extra,
            error=error,
        )

    @property
    def replays(self) -> bool:
        """Whether recorded tokens decide in place of the target."""
        return self._recording is not None

    def settle(self, other_cpu: float | None, void: bool) -> None:
        """See `window.Measurable`."""
        self.settled, self.other_cpu, self.void = True, other_cpu, void

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
        failed = m.error is not None
        ns = Ns() if failed or self.void else Ns(total=m.ns.total) if peer else m.ns
        depth = self._workspace.decoders["target"].n_layers
        kinds = [m.trace.kinds[kind] for kind in m.trace.kind]
        targets, drafts, equivalents = _counted(kinds, depth)
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
            target_forwards=None if unseen else targets,
            draft_forwards=None if unseen else drafts,
            target_equivalents=None if unseen else equivalents,
            forwards=None if unseen else m.trace,
            ns=ns,
            peak_bytes=m.peak,
            other_cpu=self.other_cpu,
            verdict=verdict,
            log_likelihood=log_likelihood,
            log_probs=log_probs,
            score=score,
            void=self.void,
            error=m.error,
        )


def _counted(kinds: Sequence[ForwardKind], depth: int) -> tuple[int, int, float]:
    """Forwards of the target, forwards that draft, and the target's work in whole forwards of it.

    The target's are its prefills, and of a verification what reaches the last layer; the first half
    of one is neither. Parts of the target that draft do draft, whatever layer they end at.
    """
    targets = drafts = 0
    work = 0.0
    for kind in kinds:
        if kind.model != "target":
            drafts += 1
            continue
        work += kind.share
        whole = kind.share == 1 and kind.role == "prefill"
        if kind.role == "verify" or whole:
            targets += kind.layers[1] == depth
        else:
            drafts += 1
    return targets, drafts, round(work, 6)


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
