"""A cell: one method decodes one prompt once, and what is kept of that."""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_cli.engine.sampling import Sampling
from specbench_cli.engine.session import Request, Session
from specbench_cli.engine.types import Step
from specbench_cli.engine.workspace import Workspace
from specbench_cli.execute.plan import Arm
from specbench_cli.execute.shown import shown
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import Ns, Params, Record, Steps, Trace, Verdict

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
    error: str | None = None


class Cell:
    """One output to be made, timed, judged and written.

    Attributes:
        measured: the last measurement.
        other_cpu, void: the window's verdict, once it is settled.

    A cell with a `recording` is given its tokens (`engine.replay`); one with a `reference`,
    vanilla's output, may read it (`Method.upper_bound`).
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
    ) -> None:
        self.arm = arm
        self.prompt = prompt
        self.request = request
        self._workspace = workspace
        self._sampling = sampling
        self._pass = pass_
        self._memory = memory
        self._recording = recording
        self._reference = reference
        self._memory_before = copy.deepcopy(memory)
        self.measured: Measured | None = None
        self.settled = False
        self.other_cpu: float | None = None
        self.void = False

    def measure(self) -> None:
        """Decode the prompt with the clock running; a later call replaces the earlier result."""
        self._memory.clear()
        self._memory.update(copy.deepcopy(self._memory_before))
        device = self._workspace.decoders["target"].device
        gc.collect()
        time.sleep(PAUSE_S)
        reset_peak(device)
        session = Session(
            self._workspace,
            self.request,
            self._sampling,
            pass_=self._pass,
            memory=self._memory,
            recording=self._recording,
            reference=self._reference,
        )
        steps = Steps()
        error = None
        gc.disable()
        try:
            session.begin()
            for step in self.arm.method.generate(session):
                _count(steps, step)
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
            trace=Trace.pack(session.meter.forwards),
            ns=_times(session),
            peak=peak_bytes(device),
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
    ) -> Record:
        """The cell as it is written; `verdict` is None for a failed one."""
        assert self.measured is not None
        m, method, peer = self.measured, self.arm.method, self.arm.method.peer
        failed = m.error is not None
        ns = Ns() if failed or self.void else Ns(total=m.ns.total) if peer else m.ns
        roles = [m.trace.kinds[kind].model for kind in m.trace.kind]
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
            pass_=self._pass,
            seed=self._sampling.seed,
            output_ids=None if failed else m.output,
            origin=None if failed else m.origin,
            n_tokens=None if failed else len(m.output),
            finish="error" if failed else m.finish,
            steps=None if failed else m.steps,
            target_forwards=None if unseen else roles.count("target"),
            draft_forwards=None if unseen else len(roles) - roles.count("target"),
            forwards=None if unseen else m.trace,
            ns=ns,
            peak_bytes=m.peak,
            other_cpu=self.other_cpu,
            verdict=verdict,
            log_likelihood=log_likelihood,
            score=score,
            void=self.void,
            error=m.error,
        )


def _count(steps: Steps, step: Step) -> None:
    draft, outcome = step.draft, step.outcome
    steps.levels.append(draft.levels if draft else 0)
    steps.nodes.append(draft.nodes if draft else 0)
    steps.tested.append(outcome.tested)
    steps.accepted.append(outcome.origin.count("accepted"))
    steps.committed.append(len(outcome.committed))


def _times(session: Session) -> Ns:
    total = session.last_ns - session.started_ns
    prefill = session.first_ns - session.started_ns
    spent = dict.fromkeys(("prefill", "draft", "verify", "aux"), 0)
    for forward in session.meter.forwards:
        spent[forward.role] += forward.t1_ns - forward.t0_ns
    draft, verify = spent["draft"] + spent["aux"], spent["verify"]
    decode = total - prefill
    return Ns(total, prefill, decode, draft, verify, decode - draft - verify)


def _one_line(failure: Exception) -> str:
    """The failure and where it arose, without a path of this machine."""
    frames = traceback.extract_tb(failure.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(failure).split()) or "no message"
    return f"{type(failure).__name__}: {text}{where}"
