"""Modelled time of parallel methods: messages bound it, and a single worker is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine.forward_cost import SequenceRows
from specbench_cli.predict.parallel import COLUMNS, MedianCosts, median_gaps, modelled_rows
from specbench_cli.predict.replay import (
    HostGaps,
    RecordedForward,
    RecordedForwards,
    RecordedMessage,
    replay,
)
from specbench_cli.store.schema import ForwardKind, Trace

TARGET, DRAFT = 0, 1
NO_GAPS = HostGaps()


def forward(worker, start, end, n_tokens=1, used=True):
    model, role = ("target", "verify") if worker == TARGET else ("draft", "draft")
    return RecordedForward(
        model=model,
        rows=(SequenceRows(n_tokens, 1, False),),
        worker=worker,
        role=role,
        batch=1,
        n_tokens=n_tokens,
        layers=(0, 8),
        start=start,
        end=end,
        used=used,
    )


def make_recording(forwards, messages=()):
    ordered = sorted(forwards, key=lambda each: each.start)
    return RecordedForwards(tuple(ordered), tuple(messages))


def modelled_time(recording, medians=None, gaps=NO_GAPS):
    """Return the modelled decode time."""
    return replay(recording, MedianCosts(medians or {}), gaps).last_used


@st.composite
def recordings(draw):
    """Draw a recording of one to three workers.

    Forwards follow each other, and messages are read between forwards, after they were sent.
    """
    workers = draw(st.integers(1, 3))
    free = [0] * workers
    forwards, messages = [], []
    for _ in range(draw(st.integers(1, 12))):
        worker = draw(st.integers(0, workers - 1))
        start = free[worker] + draw(st.integers(0, 5))
        end = start + draw(st.integers(1, 20))
        forwards.append(forward(worker, start, end))
        free[worker] = end
        if workers > 1 and draw(st.booleans()):
            other = draw(st.integers(0, workers - 1).filter(lambda w, own=worker: w != own))
            sent = end + draw(st.integers(0, 3))
            read = max(sent, free[other]) + draw(st.integers(0, 5))
            messages.append(RecordedMessage(worker, other, sent, read, 8))
            free[worker], free[other] = sent, read
    return make_recording(forwards, messages)


def busy(own):
    """Return the sum of its forwards by worker."""
    found = {}
    for each in own.decoding:
        found[each.worker] = found.get(each.worker, 0) + each.end - each.start
    return found


@given(recordings())
def test_the_modelled_time_is_between_the_busiest_worker_and_the_measured_time(own):
    found = modelled_time(own)
    assert found >= max(busy(own).values())
    assert found <= max(each.end for each in own.decoding)


@given(recordings())
def test_a_single_worker_takes_the_sum_of_its_forwards(own):
    target_only = make_recording([each for each in own.decoding if each.worker == TARGET])
    assert modelled_time(target_only) == busy(target_only).get(TARGET, 0)


def earliest(own, latency):
    """Return the earliest start of each forward, found as a longest path backwards from it."""
    events = [(each.start, 2, each.worker, each) for each in own.decoding]
    for message in own.messages:
        events.append((message.sent, 0, message.sender, message))
        events.append((message.read, 1, message.receiver, message))
    events.sort(key=lambda event: event[:2])
    by_worker = {w: [e for e in events if e[2] == w] for w in range(3)}

    def earliest_end(worker, count):
        """Return the earliest time at which a worker has finished its first `count` events."""
        if not count:
            return 0
        event = by_worker[worker][count - 1][3]
        before = earliest_end(worker, count - 1)
        if isinstance(event, RecordedForward):
            return before + event.end - event.start
        if event.sender == worker:
            return before
        place = next(i for i, e in enumerate(by_worker[event.sender]) if e[3] is event)
        return max(before, earliest_end(event.sender, place + 1) + latency)

    return {
        id(event[3]): earliest_end(worker, place)
        for worker, own_events in by_worker.items()
        for place, event in enumerate(own_events)
        if isinstance(event[3], RecordedForward)
    }


@given(recordings(), st.integers(0, 50))
def test_every_forward_waits_only_for_its_recorded_dependencies(own, latency):
    starts = earliest(own, latency)
    last = max(starts[id(each)] + each.end - each.start for each in own.decoding)
    assert modelled_time(own, gaps=HostGaps(latency=latency)) == last


def test_independent_workers_take_the_time_of_the_busier_one():
    # measured one after the other, as on one core
    own = make_recording([forward(TARGET, 0, 30), forward(DRAFT, 30, 40), forward(DRAFT, 40, 50)])
    assert modelled_time(own) == 30


def test_a_forward_starts_one_latency_after_its_message_was_sent():
    order = RecordedMessage(TARGET, DRAFT, 10, 12, 8)
    answer = RecordedMessage(DRAFT, TARGET, 17, 50, 8)
    own = make_recording(
        [forward(TARGET, 0, 10), forward(DRAFT, 12, 17), forward(TARGET, 50, 60)], [order, answer]
    )
    assert modelled_time(own) == 10 + 5 + 10
    assert modelled_time(own, gaps=HostGaps(latency=3.0)) == 10 + 3 + 5 + 3 + 10


def test_a_pearl_step_takes_the_longer_of_draft_and_target():
    # The draft order is sent before the target's forward, its reply is read after it.
    forwards, messages = [], []
    for step in range(4):
        t = 100 * step
        messages.append(RecordedMessage(TARGET, DRAFT, t, t + 1, 8))
        forwards += [forward(TARGET, t + 2, t + 62), forward(DRAFT, t + 63, t + 83)]
        messages.append(RecordedMessage(DRAFT, TARGET, t + 84, t + 90, 8))
    assert modelled_time(make_recording(forwards, messages)) == 4 * 60


def test_known_times_replace_measured_ones_and_cancelled_work_keeps_its_limit():
    medians = {("target", 1, (0, 8), 1.0): 5.0, ("draft", 1, (0, 8), 1.0): 50.0}
    assert (
        modelled_time(
            make_recording([forward(TARGET, 0, 30), forward(TARGET, 30, 70, n_tokens=4)]), medians
        )
        == 45
    )
    own = [forward(DRAFT, 0, 7, used=False), forward(DRAFT, 7, 17)]
    assert modelled_time(make_recording(own), medians) == 57


def test_a_partial_forward_takes_the_time_of_equal_shares():
    medians = {("target", 1, (0, 8), 1.0): 5.0, ("target", 1, (0, 8), 0.5): 3.0}
    full_forward = forward(TARGET, 0, 30)
    assert (
        modelled_time(
            make_recording([full_forward, replace(full_forward, start=30, end=70, share=0.5)]),
            medians,
        )
        == 8
    )


def test_cancelled_forwards_at_the_end_add_no_time():
    own = make_recording([forward(TARGET, 0, 10), forward(DRAFT, 0, 40, used=False)])
    assert modelled_time(own) == 10


def test_host_time_is_the_median_gap_and_latency_that_of_awaited_messages():
    waited = RecordedMessage(TARGET, DRAFT, 14, 17, 8)
    late_message = RecordedMessage(TARGET, DRAFT, 19, 90, 8)  # its receiver was busy
    forwards = [
        forward(TARGET, 0, 10),
        forward(TARGET, 16, 18),
        forward(DRAFT, 0, 5),
        forward(DRAFT, 18, 80),
    ]
    host = median_gaps([make_recording(forwards, [waited, late_message])])
    assert host.forward == {TARGET: 2, DRAFT: 1}
    assert host.message == {TARGET: median_of(14 - 10, 19 - 18)}
    assert host.latency == 3


def median_of(a, b):
    return (a + b) / 2


@pytest.fixture
def run(synthetic):
    """Return a run of vanilla, a serial and a parallel method, with synthetic traces."""
    pearl = synthetic.Fake("pearl", length=4, alpha=0.8, cost=1.1, draft_cost=0.1)
    records = synthetic.records([synthetic.vanilla, synthetic.sps, pearl], prompts=6)
    verify = ForwardKind("target", "verify", TARGET, 1, (0, 8))
    draft = ForwardKind("draft", "draft", DRAFT, 1, (0, 2))
    for record in records:
        steps, t = len(record.steps.levels), record.ns.prefill
        trace = Trace()
        if record.label == "pearl":
            trace.kinds = [verify, draft]
            for step in range(steps):
                at = t + 10_000_000 * step
                trace.kind += [0, 1]
                trace.n_tokens += [1, 1]
                trace.t0_ns += [at, at + 5_000_000]
                trace.t1_ns += [at + 5_000_000, at + 9_000_000]
        else:
            trace.kinds = [verify]
            trace.kind, trace.n_tokens = [0] * steps, [1] * steps
            trace.t0_ns = [t + 3_000_000 * step for step in range(steps)]
            trace.t1_ns = [start + 2_000_000 for start in trace.t0_ns]
        record.forwards = trace
    return records


def test_a_parallel_method_has_devices_and_a_speedup_over_measured_vanilla(run):
    (row,) = modelled_rows(run)
    own = [r for r in run if r.label == "pearl"]
    steps = sum(len(r.steps.levels) for r in own)
    # A target forward takes 2 ms, as in vanilla, after 5 ms of host work. A draft forward, which
    # is never measured alone, takes 4 ms after 6 ms.
    assert row.modelled == steps * max(2 + 5, 4 + 6) * 1_000_000
    vanilla = sum(r.ns.decode for r in run if r.label == "vanilla")
    assert row.speedup == pytest.approx(vanilla / row.modelled)
    assert row.per_device == row.speedup / 2
    assert row.own == 0.5
    assert row.measured == sum(r.ns.decode for r in own)
    assert "modelled, 2 devices" in " ".join(column.format(row) for column in COLUMNS)


def test_serial_methods_and_noisy_or_failed_outputs_are_not_modelled(run):
    serial = [r for r in run if r.label != "pearl"]
    assert modelled_rows(serial) == []
    assert modelled_rows([replace(r, void=True) if r.label == "pearl" else r for r in run]) == []
    assert modelled_rows([r for r in run if r.label == "pearl"]) == []
