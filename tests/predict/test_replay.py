"""Reading of traces, and their replay with other costs."""

import pytest

from specbench_cli import registry
from specbench_cli.engine.forward_cost import ForwardWork, SequenceRows
from specbench_cli.engine.simulation import ScriptedRequest
from specbench_cli.measure.costs import BatchCost
from specbench_cli.predict.costs import BatchCosts, TableCosts
from specbench_cli.predict.parallel import MedianCosts
from specbench_cli.predict.replay import HostGaps, RecordedForwards, replay
from specbench_cli.predict.scripts import RequestTimeline, replay_scripts
from specbench_cli.store.schema import ForwardKind, Steps, Trace
from tests.predict.test_prediction import make_costs

PREFILL = ForwardKind("target", "prefill", 0, 1, (0, 8))
VERIFY = ForwardKind("target", "verify", 0, 1, (0, 8))
DRAFT = ForwardKind("draft", "draft", 1, 1, (0, 2))


def make_trace(*forwards, messages=(), unused=()):
    """Return a trace of forwards (kind, new tokens, start, end)."""
    kinds = list(dict.fromkeys(kind for kind, *_ in forwards))
    columns = ([each[i] for each in forwards] for i in (1, 2, 3))
    kind = [kinds.index(each[0]) for each in forwards]
    return Trace(kinds, kind, *columns, list(unused), [list(each) for each in messages])


TWO_STEPS = Steps([2, 1], [2, 1], [2, 1], [1, 1], [2, 2])
PARALLEL = make_trace(
    (PREFILL, 20, 0, 9),
    (DRAFT, 20, 10, 30),
    (VERIFY, 3, 40, 70),
    (DRAFT, 3, 80, 90),
    (VERIFY, 2, 95, 120),
    messages=[(1, 0, 31, 39, 8), (0, 1, 71, 79, 8), (1, 0, 91, 94, 8)],
)


def test_each_forward_has_the_context_of_its_model():
    recording = RecordedForwards.from_trace(PARALLEL, TWO_STEPS)
    assert [each.rows for each in recording.prefill] == [(SequenceRows(20, 0, True),)]
    before = [(each.model, each.rows[0].new, each.rows[0].before) for each in recording.decoding]
    assert before == [("draft", 20, 0), ("target", 3, 20), ("draft", 3, 20), ("target", 2, 22)]
    assert [message.sent for message in recording.messages] == [31, 71, 91]


def test_forwards_and_messages_before_decoding_are_ignored():
    recording = RecordedForwards.from_trace(PARALLEL, TWO_STEPS, since=35)
    assert [each.start for each in recording.decoding] == [40, 80, 95]
    timeline = replay(recording, lambda forward: 10.0, HostGaps(latency=5.0))
    assert timeline.last_used == 10 + 5 + 10 + 5 + 10  # the first message has already arrived


def test_costs_and_latencies_can_be_replaced_in_a_replay():
    recording = RecordedForwards.from_trace(PARALLEL, TWO_STEPS)
    measured = replay(recording, MedianCosts({}), HostGaps())
    assert measured.last_used == 20 + 30 + 10 + 25
    separate = replay(recording, MedianCosts({}))
    assert separate.workers == {0: 30 + 25, 1: 20 + 10}
    assert separate.busiest == 30 + 25
    probed = replay(recording, TableCosts(make_costs()))
    assert probed.workers == {0: 3020 + 2022, 1: 200 + 150 + 20}
    flat = replay(recording, lambda forward: 7.0)
    assert flat.busiest == 14


def test_a_cancelled_forward_keeps_its_worker_busy_but_does_not_end_the_decoding():
    trace = make_trace((PREFILL, 20, 0, 9), (VERIFY, 1, 10, 20), (VERIFY, 4, 20, 50), unused=[2])
    timeline = replay(RecordedForwards.from_trace(trace), MedianCosts({}))
    assert (timeline.busiest, timeline.last_used) == (40, 10)


def test_an_empty_recording_takes_no_time():
    timeline = replay(RecordedForwards.from_trace(Trace()), TableCosts(make_costs()))
    assert (timeline.busiest, timeline.last_used) == (0, 0)


def test_a_batch_costs_one_forward_over_all_rows_plus_host_time():
    two = [SequenceRows(3, 20, False), SequenceRows(1, 28, False)]
    context = (3 * 20 + 28) / 4
    costs = BatchCosts(make_costs())
    assert costs(ForwardWork("target", two)) == pytest.approx(4000 + context + 2 * 100 + 2)
    assert costs(ForwardWork("draft", two)) == pytest.approx(200 + context + 2 * 10)
    assert (
        costs(ForwardWork("target", [SequenceRows(20, 0, True), SequenceRows(30, 0, True)]))
        == 200 + 300
    )
    assert (costs.forwards, costs.extrapolated) == (2, 0)
    assert not costs.batches_probed


def test_probed_batches_give_the_cost_of_further_sequences_and_steps():
    batch = BatchCost(most=8, beside={"target": 40.0}, step=500, sequence=60, draft=7, node=3)
    costs = BatchCosts(make_costs().model_copy(update={"batch": batch}))
    rows = [SequenceRows(3, 20, False), SequenceRows(1, 20, False), SequenceRows(4, 20, True)]
    host = 2 * 40 + 500 + 2 * 60 + 2 * 3
    assert costs(ForwardWork("target", rows)) == pytest.approx(8000 + 20 + host)
    assert costs(ForwardWork("draft", rows)) == pytest.approx(400 + 20 + 2 * 7)
    assert costs.batches_probed


def test_forwards_beyond_the_cost_table_are_counted():
    costs = BatchCosts(make_costs())
    costs(ForwardWork("target", [SequenceRows(9, 20, False)]))
    assert (costs.forwards, costs.extrapolated) == (1, 1)


def test_load_simulation_uses_the_same_costs_for_each_request():
    scripts = [ScriptedRequest((at, 1), (3, 4, 5), (False,) * 3, 3) for at in (7, 8)]
    vanilla = registry.build("vanilla", {})
    found = replay_scripts(vanilla, scripts, lambda work: 10.0, policy=None)
    assert found == [RequestTimeline(10, 30, 3, 3), RequestTimeline(40, 60, 3, 3)]
    # The shortest probed prompt and the shortest probed context have 16 tokens.
    first_request = replay_scripts(vanilla, scripts[:1], TableCosts(make_costs()), policy=None)
    assert first_request == [RequestTimeline(160, 160 + 2 * 1016, 3, 3)]
