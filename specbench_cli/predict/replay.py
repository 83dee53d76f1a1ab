"""Replay of a recorded trace with other forward times, for example those of another machine.

`RecordedForwards` reads the forwards of an output from its trace, with the number of rows in the KV
cache before each, and the messages between workers. `replay` repeats the forwards and messages of
each worker in the recorded order. A cost function returns the time of each forward on the predicted
hardware: a probed machine or a roofline model (`costs.TableCosts`), or one device per worker
(`parallel.MedianCosts`). For requests that arrive over time, the order of forwards is not known, so
`load` runs the engine again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from operator import itemgetter
from typing import NamedTuple

from specbench_cli.engine.forward_cost import ForwardWork, SequenceRows
from specbench_cli.store.schema import Steps, Trace


@dataclass(slots=True, kw_only=True)
class RecordedForward(ForwardWork):
    """A forward of a trace, with its measured times in ns from the start of the timer.

    n_tokens: number of new tokens of each sequence in the forward's batch.
    used: False if the forward was cancelled.
    """

    worker: int
    role: str
    batch: int
    n_tokens: int
    layers: tuple[int, int]
    start: int
    end: int
    used: bool = True


class RecordedMessage(NamedTuple):
    """A message of a trace, with its measured times in ns from the start of the timer."""

    sender: int
    receiver: int
    sent: int
    read: int
    nbytes: int


Event = tuple[int, int, int, RecordedForward | RecordedMessage]
"""(time, rank among events of the same time, worker, action). The action is a forward, or a message
that the worker sends or reads."""


@dataclass(frozen=True, slots=True)
class RecordedForwards:
    """Forwards and messages of one output, in the recorded order.

    since: start of decoding (end of prefill) in ns.
    """

    forwards: tuple[RecordedForward, ...]
    messages: tuple[RecordedMessage, ...] = ()
    since: int = 0

    @classmethod
    def from_trace(
        cls,
        trace: Trace,
        steps: Steps | None = None,
        *,
        n_layers: Mapping[str, int | None] | None = None,
        since: int = 0,
    ) -> RecordedForwards:
        """Read a trace.

        Args:
            steps: steps of the output. Without them the rows before a forward are unknown.
            n_layers: number of layers by model. Needed for old traces, in which forwards lack the
                share of weights that they read.
            since: start of decoding in ns.
        """
        return cls(
            tuple(_forwards(trace, steps or Steps(), n_layers or {})),
            tuple(RecordedMessage(*message) for message in trace.messages),
            since,
        )

    @property
    def prefill(self) -> list[RecordedForward]:
        """Forwards that process the prompt."""
        return [each for each in self.forwards if each.role == "prefill"]

    @property
    def decoding(self) -> list[RecordedForward]:
        """Forwards after prefill."""
        return [
            each for each in self.forwards if each.role != "prefill" and each.start >= self.since
        ]

    def events(self) -> list[Event]:
        """Return the events of decoding in the measured order. A message has two: send and read."""
        found: list[Event] = [(each.start, 2, each.worker, each) for each in self.decoding]
        for message in self.messages:
            if message.sent >= self.since:
                found.append((message.sent, 0, message.sender, message))
            if message.read >= self.since:
                read = max(message.sent, message.read)
                found.append((read, 1, message.receiver, message))
        return sorted(found, key=itemgetter(0, 1))


@dataclass(frozen=True, slots=True)
class HostGaps:
    """Host work between forwards, in ns.

    forward: worker -> work before each of its forwards.
    message: worker -> work before each message that it sends.
    latency: time from the send of a message to its read by a waiting worker.
    """

    forward: Mapping[int, float] = field(default_factory=dict)
    message: Mapping[int, float] = field(default_factory=dict)
    latency: float = 0.0


NO_WAITING = HostGaps(latency=-inf)
"""Gaps with which only forwards take time, and no worker waits for a message."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """End times of replayed decoding, in ns from its start.

    workers: worker -> end time of the worker's last forward or message.
    last_used: end of the last forward whose result was used.
    """

    workers: Mapping[int, float]
    last_used: float

    @property
    def busiest(self) -> float:
        """End time of the worker that ended last; 0 if there were no events."""
        return max(self.workers.values(), default=0.0)


def replay(
    recording: RecordedForwards,
    cost: Callable[[RecordedForward], float],
    gaps: HostGaps = NO_WAITING,
) -> Timeline:
    """Replay a recorded output with other forward times.

    Each worker repeats its actions in the recorded order, as soon as it is free. It reads a message
    no earlier than one latency after the send.

    Args:
        cost: returns the time of a forward in ns.
        gaps: host work between forwards.
    """
    done: dict[int, float] = defaultdict(float)
    arrived: dict[int, float] = {}
    last_used = 0.0
    for _, _, worker, what in recording.events():
        if isinstance(what, RecordedForward):
            done[worker] += gaps.forward.get(worker, 0.0) + cost(what)
            if what.used:
                last_used = max(last_used, done[worker])
        elif what.sender == worker:
            done[worker] += gaps.message.get(worker, 0.0)
            arrived[id(what)] = done[worker] + gaps.latency
        else:  # a message that was sent before decoding began has already arrived
            done[worker] = max(done[worker], arrived.get(id(what), 0.0))
    return Timeline(done, last_used)


def _forwards(
    trace: Trace, steps: Steps, n_layers: Mapping[str, int | None]
) -> Iterator[RecordedForward]:
    """Yield the forwards of a trace, each with the number of rows in the model's KV cache before
    it.

    A prefill adds the prompt's rows, and a forward adds its own rows. After the verification that
    ends a step, all models drop the rows of rejected tokens. The i-th verification belongs to the
    i-th step. If there are more verifications than steps, as in a method that verifies ahead, they
    are distributed evenly over the steps.
    """
    last = max((kind.layers[1] for kind in trace.kinds if kind.role == "verify"), default=0)
    ends = [kind.role == "verify" and kind.layers[1] == last for kind in trace.kinds]
    unused = set(trace.unused)
    verifications = sum(ends[kind] and at not in unused for at, kind in enumerate(trace.kind))
    trees = find_tree_steps(steps)
    committed = list(accumulate(steps.committed, initial=0))
    prompt = verified = step = 0
    held: dict[str, int] = defaultdict(int)
    previous: dict[int, str] = {}
    columns = zip(trace.kind, trace.n_tokens, trace.t0_ns, trace.t1_ns, strict=True)
    for at, (index, n, start, end) in enumerate(columns):
        kind = trace.kinds[index]
        model, used = kind.model, at not in unused
        warm = previous.get(kind.worker) == model == "target"
        previous[kind.worker] = model
        share = kind.share_of(n_layers.get(model))
        new, before, tree = n * kind.batch, held[model], False
        if kind.role == "prefill":
            new, before, warm = n, 0, False
            if model == "target" and share == 1:  # a prompt may be prefilled in chunks
                before, prompt = prompt, prompt + n
            held[model] = before + n
        elif kind.role == "verify":  # self-drafting methods dropped the rows that they drafted
            before = held[model] = min(before, prompt + committed[step])
            tree = used and trees[step : step + 1] == [True]
        yield RecordedForward(
            model=model,
            rows=(SequenceRows(new, before, not before),),
            tree=tree,
            warm=warm,
            share=share,
            worker=kind.worker,
            role=kind.role,
            batch=kind.batch,
            n_tokens=n,
            layers=kind.layers,
            start=start,
            end=end,
            used=used,
        )
        if kind.role == "prefill" or not used:
            continue
        if kind.layers[1]:  # the output matrix alone adds no rows
            held[model] += n
        if ends[index]:
            verified += 1
            step = verified * len(trees) // verifications
            for each, length in held.items():
                held[each] = min(length, prompt + committed[step])


def find_tree_steps(steps: Steps) -> list[bool]:
    """Return for each step whether it drafted a tree. A tree has more tokens than levels."""
    return [nodes > levels for nodes, levels in zip(steps.nodes, steps.levels, strict=True)]
