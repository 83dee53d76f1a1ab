"""Tests of splitting the time of an output into its parts, with one and several workers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine.types import Forward
from specbench_cli.measure.phases import split_time, union_length
from specbench_cli.store.schema import ForwardKind, Ns, Trace

WHOLE_PREFILL = ForwardKind("target", "prefill", 0, 1, (0, 8))
WHOLE = ForwardKind("target", "verify", 0, 1, (0, 8))
FIRST = ForwardKind("target", "verify", 0, 1, (0, 4), 0.6)
SECOND = ForwardKind("target", "verify", 0, 1, (4, 8), 0.5)
PAST = ForwardKind("target", "draft", 0, 1, (0, 8), 0.7)
DRAFT_PREFILL = ForwardKind("draft", "prefill", 0, 1, (0, 2), 0.9)
DRAFT = ForwardKind("draft", "draft", 0, 1, (0, 2))


def forward(role, worker, t0, t1):
    return Forward("model", role, worker, 1, 1, (0, 2), t0, t1)


def test_times_of_one_worker_add_up():
    trace = [
        forward("prefill", 0, 0, 18),
        forward("draft", 0, 20, 30),
        forward("aux", 0, 30, 33),
        forward("verify", 0, 40, 90),
    ]
    assert split_time(trace, 100, 20) == Ns(100, 20, 80, 13, 50, 17)


def test_drafting_before_the_first_token_counts_as_prefill():
    """Hidden Transfer and SPACE process their mask tokens in the target right after the prompt."""
    trace = [
        forward("prefill", 0, 0, 18),
        forward("draft", 0, 18, 60),
        forward("verify", 0, 61, 90),
        forward("draft", 0, 90, 98),
    ]
    assert split_time(trace, 100, 60) == Ns(100, 60, 40, 8, 29, 3)
    joined = [forward("prefill", 0, 0, 18), forward("draft", 0, 20, 30), *trace[2:]]
    assert split_time(joined, 100, 40, decode_start=0) == Ns(
        100, 40, 60, 18, 29, 13
    )  # decoding starts at 0


def test_drafting_by_parts_of_the_target_counts_as_drafting():
    trace = [
        forward("prefill", 0, 0, 18),
        replace(forward("draft", 0, 20, 30), model="target", layers=(0, 1), share=0.5),
        replace(forward("verify", 0, 40, 90), model="target"),
    ]
    assert split_time(trace, 100, 20) == Ns(100, 20, 80, 10, 50, 20)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        # vanilla: a prefill and two steps
        ([WHOLE_PREFILL, WHOLE, WHOLE], (3, 0, 3.0)),
        # a draft model, whose prefill returns no logits
        ([DRAFT_PREFILL, WHOLE_PREFILL, DRAFT, WHOLE], (2, 2, 2.0)),
        # a verification in two halves
        ([WHOLE_PREFILL, FIRST, SECOND], (2, 0, 2.1)),
        # drafting by parts of the target: an early exit, skipped layers, and a separate KV cache
        ([WHOLE_PREFILL, replace(FIRST, role="draft"), PAST, WHOLE], (2, 2, 3.3)),
        ([replace(FIRST, role="prefill"), WHOLE_PREFILL, WHOLE], (2, 1, 2.6)),
        ([replace(PAST, role="prefill"), WHOLE_PREFILL, WHOLE], (2, 1, 2.7)),
    ],
)  # fmt: skip
def test_forwards_are_counted_by_role(kinds, expected):
    n = len(kinds)
    trace = Trace(kinds, list(range(n)), [1] * n, [0] * n, [0] * n)
    assert trace.count_forwards(8) == expected


def test_host_time_is_the_time_without_a_forward():
    trace = [
        forward("prefill", 0, 0, 20),
        forward("verify", 0, 30, 70),
        forward("draft", 1, 50, 90),
    ]
    assert split_time(trace, 100, 20) == Ns(100, 20, 80, 40, 40, 20)


def test_forward_times_are_cut_to_the_decode_phase():
    trace = [
        forward("prefill", 0, 0, 20),
        forward("prefill", 1, 5, 25),  # the draft model's prefill ends after the first token
        forward("verify", 0, 20, 100),
        forward("draft", 1, 90, 130),  # ends after the last token
    ]
    assert split_time(trace, 100, 20) == Ns(100, 20, 80, 15, 80, 0)


def test_learning_is_added_only_to_the_total():
    trace = [forward("prefill", 0, 0, 20), forward("verify", 0, 30, 70)]
    assert split_time(trace, 100, 20, learn=300) == Ns(400, 20, 80, 0, 40, 40, 300)
    with_draft = [*trace, forward("draft", 1, 90, 130)]
    assert split_time(with_draft, 100, 20, learn=300) == Ns(400, 20, 80, 10, 40, 30, 300)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8))
def test_union_length_counts_overlaps_once(spans):
    moments = {moment for t0, t1 in spans for moment in range(t0, t1)}
    assert union_length(spans) == len(moments)
