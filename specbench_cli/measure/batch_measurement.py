"""Measurement of a batch: several prompts that one method decodes together."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specbench_cli.engine.types import Forward
from specbench_cli.engine.verify.hooks import check_steps
from specbench_cli.engine.watch import ReportedStep
from specbench_cli.measure.measurement import (
    DecodedOutput,
    Measurement,
    build_draft_record,
    count_step,
)
from specbench_cli.measure.memory import peak_bytes, reset_peak
from specbench_cli.measure.method_code import describe_failure, enforce_time_limit
from specbench_cli.measure.phases import split_time
from specbench_cli.store.schema import BatchMembership, Ns, Trace


class BatchMeasurement:
    """Measurement of several prompts that one method decodes together, with continuous batching.

    The result of each prompt has the steps and forwards of that prompt's sequence. The time of the
    batch is divided equally among the prompts.

    Args:
        measurements: One measurement per prompt. It receives the result of its prompt.
        size: Maximum number of sequences in a step. When a sequence ends, the next prompt joins.
        chunk: Maximum number of prompt tokens that a verification forward also prefills.
        arrivals: Arrival time of each request in seconds. Empty if all requests arrive at the
            start.
    """

    def __init__(
        self,
        measurements: Sequence[Measurement],
        size: int,
        chunk: int,
        arrivals: Sequence[float] = (),
    ) -> None:
        self._measurements, self._size, self._arrivals = measurements, size, arrivals
        self._chunk = chunk

    def measure(self) -> None:
        """Decode the prompts of the batch and time them.

        A second call replaces the result of the first.
        """
        measurements, first = self._measurements, self._measurements[0]
        device = first.prepare()
        watch = first.create_watch()
        reset_peak(device, None)
        batch = first.create_batch(
            [measurement.request for measurement in measurements], self._size, self._batch_options()
        )
        counted = [
            (measurement.new_counters(), dict[str, float](), list[ReportedStep]())
            for measurement in measurements
        ]
        error = None
        gc.disable()
        try:
            with enforce_time_limit(first.limit_s and first.limit_s * len(measurements)):
                first.energy.begin()
                watch.begin(*batch.sessions)
                generated = first.method_run.method.generate_batch(batch)
                for step in check_steps(
                    first.method_run.method, "generate_batch", generated, len(counted)
                ):
                    steps, extra, reported = counted[step.seq]
                    count_step(steps, extra, step)
                    reported.append(ReportedStep.from_step(step))
                watch.end()
        except BaseException as failure:  # an error of a method fails its outputs, not the run
            watch.end()
            error = describe_failure(failure)
        finally:
            gc.enable()
        joules = first.energy.end()
        batch.meter.resolve()
        error = error or watch.find_fault(batch.meter)
        peak = peak_bytes(device, None)
        texts = [session.harness.text for session in batch.sessions]
        started = watch.began_ns
        total = watch.ended_ns - started
        busy = split_time(
            batch.meter.forwards, total - batch.idle_ns, batch.prefill_ns, decode_start=0
        )
        share = _divide_time(busy, len(measurements))
        for place, (measurement, session) in enumerate(
            zip(measurements, batch.sessions, strict=True)
        ):
            steps, extra, reported = counted[place]
            own = [f for f in batch.meter.forwards if f.rows is None or place in f.rows]
            measurement.output = DecodedOutput(
                output_ids=list(session.output()),
                origin=list(texts[place].origin),
                finish=session.finish or "error",
                steps=steps,
                trace=Trace.pack(_sequence_part(f, place) for f in own),
                ns=share,
                peak=peak,
                drafts=[build_draft_record(each) for each in reported],
                extra=extra,
                version=None,
                error=error or measurement.find_fault(session, reported),
                batch=BatchMembership(
                    len(measurements),
                    place,
                    total,
                    max(1, texts[place].last_ns - started),
                    batch.size,
                    round(self._arrivals[place] * 1e9) if self._arrivals else None,
                    texts[place].first_ns - started if self._arrivals else None,
                ),
                joules=None if joules is None else joules / len(measurements),
            )

    def finish(self, other_cpu: float | None, noisy: bool) -> None:
        """Accept the last results of all measurements, and store how noisy the machine was."""
        for measurement in self._measurements:
            measurement.finish(other_cpu, noisy)

    def _batch_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `Batch` that depend on the prompts.

        The argument `recordings` has tokens to replay. The argument `references` has vanilla's
        outputs, for methods that may read them. The keys of both are indices of prompts.
        """
        recordings = {
            at: measurement.recording
            for at, measurement in enumerate(self._measurements)
            if measurement.recording
        }
        references = {
            at: measurement.reference
            for at, measurement in enumerate(self._measurements)
            if measurement.reference
        }
        return {
            "recordings": recordings,
            "references": references,
            "arrivals": self._arrivals,
            "chunk": self._chunk,
        }


def make_measurable(
    measurements: Sequence[Measurement], size: int, chunk: int, arrivals: Sequence[float] = ()
) -> Measurement | BatchMeasurement:
    """Return the object that measures the outputs of a method.

    If prompts are decoded alone, this is the single measurement. Otherwise it is a
    `BatchMeasurement`.
    """
    return (
        measurements[0]
        if size == 1 and not arrivals
        else BatchMeasurement(measurements, size, chunk, arrivals)
    )


def _sequence_part(forward: Forward, place: int) -> Forward:
    """Return one sequence's part of a batch's forward, with its own token count and role.

    Args:
        place: Index of the sequence in the batch.
    """
    if forward.rows is None:
        return forward
    role = "prefill" if place in forward.prompt_places else forward.role
    return replace(forward, n_tokens=forward.rows[place], role=role)


def _divide_time(ns: Ns, n: int) -> Ns:
    """Return times divided by n. They are rounded so that their sum still equals `total`."""
    prefill, draft, verify, host = (
        (part or 0) // n for part in (ns.prefill, ns.draft, ns.verify, ns.host)
    )
    decode = draft + verify + host
    return Ns(prefill + decode, prefill, decode, draft, verify, host)
