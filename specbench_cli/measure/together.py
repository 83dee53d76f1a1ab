"""Measurement of a batch: prompts that one method decodes together."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specbench_cli.engine.types import Forward
from specbench_cli.engine.verify.hooks import steps_of
from specbench_cli.engine.watch import ReportedStep
from specbench_cli.measure.cell import Cell, Measured, count_step, drafted
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.measure.method_code import limited, one_line
from specbench_cli.measure.phases import divided
from specbench_cli.store.schema import Batch as Batched
from specbench_cli.store.schema import Ns, Trace


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
        counted = [(cell.counters(), dict[str, float](), list[ReportedStep]()) for cell in cells]
        error = None
        gc.disable()
        try:
            with limited(first.limit_s and first.limit_s * len(cells)):
                first.energy.begin()
                watch.begin(*batch.sessions)
                made = first.method_run.method.generate_batch(batch)
                for step in steps_of(first.method_run.method, "generate_batch", made, len(counted)):
                    steps, extra, told = counted[step.seq]
                    count_step(steps, extra, step)
                    told.append(ReportedStep.of(step))
                watch.end()
        except BaseException as failure:  # a method's fault fails its cells, not the run
            watch.end()
            error = one_line(failure)
        finally:
            gc.enable()
        joules = first.energy.end()
        batch.meter.resolve()
        error = error or watch.find_fault(batch.meter)
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
                drafts=[drafted(each) for each in told],
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
        """See `quiet.Measurable`."""
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
