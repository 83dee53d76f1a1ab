"""Tests of lanes, which show the trace by worker and step, and of their Chrome trace."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from specbench_cli.predict.lanes import make_lanes
from specbench_cli.report.timeline.chrome_trace import write_trace
from specbench_cli.store.schema import ForwardKind, Steps, Trace

PREFILL = ForwardKind("target", "prefill", 0, 1, (0, 8))
VERIFY = ForwardKind("target", "verify", 0, 1, (0, 8))
EXIT = ForwardKind("target", "verify", 0, 1, (0, 4))
DRAFT = ForwardKind("draft", "draft", 1, 1, (0, 2))


@pytest.fixture
def record(synthetic):
    """A record of two steps with two workers. Drafting in the second step is cancelled."""
    (own,) = synthetic.records([synthetic.sps], prompts=1)
    own.steps = Steps([2, 2], [2, 2], [2, 1], [2, 0], [3, 1])
    own.ns.prefill = 1_000
    own.forwards = Trace(
        kinds=[PREFILL, VERIFY, EXIT, DRAFT],
        kind=[0, 3, 2, 1, 3, 1],
        n_tokens=[9, 1, 3, 3, 1, 3],
        t0_ns=[0, 1_100, 1_050, 1_500, 1_600, 2_400],
        t1_ns=[1_000, 1_400, 1_500, 2_000, 1_900, 3_000],
        unused=[4],
        messages=[[0, 1, 1_020, 1_090, 24], [1, 0, 1_410, 2_010, 32]],
    )
    return own


def test_lanes_have_every_forward_and_message_by_worker(record):
    lanes = make_lanes(record)
    assert lanes.workers == {0: "target", 1: "draft"}
    assert len(lanes.spans) == 6
    roles = ["verify", "draft", "verify", "draft", "verify"]
    assert [s.role for s in lanes.decoding] == roles
    assert [s.used for s in lanes.spans if s.worker == 1] == [True, False]
    assert [(a.sender, a.receiver, a.sent, a.read, a.nbytes) for a in lanes.arrows] == [
        tuple(message) for message in record.forwards.messages
    ]


def test_steps_end_with_complete_verifications(record):
    steps = make_lanes(record).steps
    assert [(s.start, s.end, s.committed) for s in steps] == [(1_000, 2_000, 3), (2_000, 3_000, 1)]


def test_spans_and_chrome_trace_have_the_share_of_partial_forwards(record, tmp_path):
    record.forwards.kinds[2] = ForwardKind("target", "verify", 0, 1, (0, 4), 0.6)
    lanes = make_lanes(record)
    assert [s.share for s in lanes.spans] == [1, 0.6, 1, 1, 1, 1]
    events = json.loads(write_trace([lanes], tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["args"]["share"] for e in events if "share" in e.get("args", {})] == [
        s.share for s in lanes.spans
    ]


def test_output_without_a_trace_has_no_lanes(record):
    record.forwards = None
    assert make_lanes(record).spans == ()
    assert make_lanes(record).decoding == ()


def test_chrome_trace_has_one_complete_event_per_forward(record, tmp_path):
    lanes = make_lanes(record)
    document = json.loads(write_trace([lanes, lanes], tmp_path / "trace.json").read_text())
    events = document["traceEvents"]
    forwards = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and "tokens" in e["args"]]
    assert [(e["tid"], e["ts"], e["dur"], e["args"]["tokens"]) for e in forwards] == [
        (s.worker, s.start / 1e3, (s.end - s.start) / 1e3, s.n_tokens) for s in lanes.spans
    ]
    assert {e["pid"] for e in events} == {1, 2}
    names = {(e["name"], e["tid"]): e["args"] for e in events if e["ph"] == "M" and e["pid"] == 1}
    assert names["process_name", 0] == {"name": "sps, mini/0, turn 1, pass 0"}
    assert names["thread_name", 1] == {"name": "worker 1: draft"}
    steps = [e for e in events if e.get("cat") == "step" and e["pid"] == 1]
    assert [e["args"]["committed"] for e in steps] == [3, 1]


def test_flow_events_connect_the_two_ends_of_a_message(record, tmp_path):
    events = json.loads(write_trace([make_lanes(record)], tmp_path / "t.json").read_text())
    flows = defaultdict(dict)
    for event in events["traceEvents"]:
        if event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = event
    assert len(flows) == len(record.forwards.messages)
    for pair in flows.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert pair["s"]["name"] == pair["f"]["name"] and pair["s"]["cat"] == pair["f"]["cat"]
        assert pair["f"]["bp"] == "e"
        for end in pair.values():
            enclosing_events = [
                e
                for e in events["traceEvents"]
                if e["ph"] == "X"
                and e["tid"] == end["tid"]
                and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
            ]
            assert enclosing_events


def test_events_of_a_thread_nest(record, tmp_path):
    events = json.loads(write_trace([make_lanes(record)], tmp_path / "t.json").read_text())
    threads = defaultdict(list)
    for event in events["traceEvents"]:
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert start >= end - 1e-9


def test_learning_has_its_own_lane_before_all_events(record, tmp_path):
    assert make_lanes(record).learn == 0
    record.ns.learn = 250_000
    lanes = make_lanes(record)
    events = json.loads(write_trace([lanes], tmp_path / "t.json").read_text())["traceEvents"]
    (learning,) = [e for e in events if e.get("cat") == "learn"]
    assert (learning["ts"], learning["dur"]) == (0, 250)
    others = [e["ts"] for e in events if "ts" in e and e is not learning]
    assert min(others) == 250
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[learning["tid"]] == "learning"
