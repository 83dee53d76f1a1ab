"""Chrome trace of the timeline of an output, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The file is a JSON object in Trace Event Format, with one process per method and one thread per
worker. Forwards and steps are complete events ("X"). Messages are short events joined by flow
events ("s", "f"). Learning before the request has its own thread. Times are in µs since the timer's
start, or since the start of learning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from specbench_cli.predict.lanes import WorkerLanes

_LEARNING, _STEPS, _MESSAGES = 500, 1000, 2000
"""Thread ids of learning, steps and messages. Messages have one per worker, since events of a
thread must not overlap."""
_MAX_END_US = 1.0
"""Maximum duration in µs of a message's end points. An arrow needs an event with a duration."""


def write_trace(lanes: Sequence[WorkerLanes], path: Path) -> Path:
    """Write the timelines of some outputs to a file in an existing folder."""
    events = [
        event for pid, own in enumerate(lanes, start=1) for event in _shifted_events(pid, own)
    ]
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _shifted_events(pid: int, lanes: WorkerLanes) -> Iterable[dict[str, Any]]:
    """Yield the events of a timeline, delayed by the duration of learning.

    If the method learned before the request, an event for learning is added.
    """
    for event in _process(pid, lanes):
        yield event | {"ts": event["ts"] + lanes.learn / 1e3} if "ts" in event else event
    if lanes.learn:
        yield _name("thread_name", pid, _LEARNING, "learning")
        yield _complete(pid, _LEARNING, "learning", "learn", 0.0, lanes.learn / 1e3)


def _process(pid: int, lanes: WorkerLanes) -> Iterable[dict[str, Any]]:
    title = f"{lanes.label}, {lanes.prompt_id}, turn {lanes.turn}, pass {lanes.pass_}"
    yield _name("process_name", pid, 0, title)
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": pid,
        "tid": 0,
        "args": {"sort_index": pid},
    }
    for worker, models in lanes.workers.items():
        yield _name("thread_name", pid, worker, f"worker {worker}: {models}")
    for span in lanes.spans:
        yield _complete(
            pid,
            span.worker,
            f"{span.model} {span.role}",
            span.role if span.used else f"{span.role},unused",
            span.start / 1e3,
            (span.end - span.start) / 1e3,
            tokens=span.n_tokens,
            batch=span.batch,
            layers=list(span.layers),
            share=span.share,
            used=span.used,
        )
    yield from _steps(pid, lanes)
    yield from _messages(pid, lanes)


def _steps(pid: int, lanes: WorkerLanes) -> Iterable[dict[str, Any]]:
    if lanes.steps:
        yield _name("thread_name", pid, _STEPS, "steps")
    for number, step in enumerate(lanes.steps, start=1):
        yield _complete(
            pid,
            _STEPS,
            f"step {number}: +{step.committed}",
            "step",
            step.start / 1e3,
            (step.end - step.start) / 1e3,
            drafted=step.drafted,
            tested=step.tested,
            accepted=step.accepted,
            committed=step.committed,
        )


def _messages(pid: int, lanes: WorkerLanes) -> Iterable[dict[str, Any]]:
    ends: dict[int, list[_End]] = {}
    for number, arrow in enumerate(lanes.arrows):
        sent = _End(arrow.sent / 1e3, "s", number, f"to worker {arrow.receiver}", arrow.nbytes)
        read = _End(arrow.read / 1e3, "f", number, f"from worker {arrow.sender}", arrow.nbytes)
        ends.setdefault(arrow.sender, []).append(sent)
        ends.setdefault(arrow.receiver, []).append(read)
    for worker in sorted(ends):
        tid = _MESSAGES + worker
        yield _name("thread_name", pid, tid, f"messages of worker {worker}")
        own = sorted(ends[worker])
        for end, following in zip_longest(own, own[1:]):
            length = _MAX_END_US if following is None else min(_MAX_END_US, following.at - end.at)
            yield _complete(pid, tid, end.words, "message", end.at, length, bytes=end.nbytes)
            flow = {"name": "message", "cat": "message", "id": f"{pid}.{end.number}"}
            binding = {"bp": "e"} if end.phase == "f" else {}
            yield {"ph": end.phase, "pid": pid, "tid": tid, "ts": end.at, **flow, **binding}


class _End(NamedTuple):
    """One end of a message, with its time `at` in µs."""

    at: float
    phase: str
    number: int
    words: str
    nbytes: int


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(
    pid: int, tid: int, name: str, category: str, start: float, length: float, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": length,
        "args": args,
    }
