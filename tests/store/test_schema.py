"""Tests of the record schema: reading, writing, and rejecting invalid records."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.errors import UsageError
from specbench_cli.stats.martingale import TILTS
from specbench_cli.store import manifest
from specbench_cli.store.invariants import validate
from specbench_cli.store.schema import (
    SCHEMA,
    DraftedTokens,
    ForwardKind,
    Likelihood,
    Ns,
    Steps,
    Trace,
    Verdict,
    from_json,
    to_json,
)

FIFTH = ("target_equivalents", "version", "batch", "worker")
"""The fields that schema 5 and later versions added."""


def test_a_written_record_is_read_back_unchanged(make_record):
    assert from_json(to_json(make_record())) == make_record()


@given(
    st.text(max_size=20), st.floats(0, 1), st.lists(st.integers(0, 5000), min_size=5, max_size=5)
)
def test_any_text_and_number_is_read_back_unchanged(make_record, text, score, ids):
    record = make_record(category=text, score=score, output_ids=ids)
    line = to_json(record)
    assert "\n" not in line
    assert from_json(line) == record


def test_keys_have_a_fixed_order(make_record):
    data = json.loads(to_json(make_record()))
    assert list(data) == [
        *("schema", "prompt_id", "cluster", "task", "family", "category", "turn", "method"),
        *("label", "peer", "params", "sampling", "guarantee", "pass", "seed", "output_ids"),
        *("origin", "n_tokens", "finish", "steps", "drafts", "extra"),
        *("target_forwards", "draft_forwards", "target_equivalents", "version", "batch"),
        "worker",
        *(
            "forwards",
            "ns",
            "peak_bytes",
            "energy_j",
            "other_cpu",
            "verdict",
            "log_likelihood",
            "likelihood",
            "log_probs",
            "score",
            "valid",
            "synthetic",
            "void",
        ),
        "error",
    ]
    assert list(data["steps"]) == ["levels", "nodes", "tested", "accepted", "committed", "relaxed"]
    assert list(data["ns"]) == ["total", "prefill", "decode", "draft", "verify", "host", "learn"]
    assert list(data["verdict"]) == ["kind", "position", "gap", "expected", "rounding"]


def test_record_of_the_first_schema_is_read(make_record):
    data = json.loads(to_json(make_record(schema=1)))
    for name in ("log_likelihood", "likelihood", "log_probs", "drafts", "extra", *FIFTH):
        del data[name]
    del data["steps"]["relaxed"], data["ns"]["learn"]
    for kind in data["forwards"]["kinds"]:
        del kind["share"]
    del data["verdict"]["rounding"], data["params"]["source"], data["forwards"]["messages"]
    assert from_json(json.dumps(data)) == make_record(schema=1)


def test_fields_of_schema_4_are_read_back_unchanged(make_record):
    record = make_record(
        drafts=[DraftedTokens([6, 7], None, [0, 1]), DraftedTokens([9, 3], [-1, -1], [])],
        extra={"reused": 41, "share": 0.5},
        log_probs=[-0.125, 0.0, -2.0, -1.5, -0.75],
    )
    record.forwards.messages = [[0, 1, 5, 9, 64], [1, 0, 40, 41, 8]]
    validate(record)
    assert from_json(to_json(record)) == record


def test_nan_is_not_written(make_record):
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(make_record(other_cpu=float("nan")))


def test_newer_schema_is_rejected_with_a_hint(make_record):
    line = to_json(make_record(schema=SCHEMA + 1))
    with pytest.raises(
        UsageError, match=f"schema {SCHEMA + 1}; this specbench reads up to {SCHEMA}"
    ) as caught:
        from_json(line)
    assert "pip install --upgrade" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "not JSON: EOF"),
        ("{", "not JSON: EOF"),
        ("[" * 10_000, "not JSON: recursion limit"),
        ("[]", "it must be a mapping"),
        ("7", "it must be a mapping"),
        ('{"prompt_id": "mini/1"}', "cluster is missing"),
        ('{"schema": 1}', "prompt_id is missing"),
    ],
)
def test_invalid_text_is_an_error_with_a_reason(line, why):
    with pytest.raises(ValueError, match=why):
        from_json(line)


def test_a_number_larger_than_any_float_is_rejected(make_record):
    line = to_json(make_record(extra={"reused": 7}))
    with pytest.raises(ValueError, match=r"extra\.reused"):
        from_json(line.replace('"reused":7', f'"reused":{10**400}'))


def test_unknown_field_is_an_error_with_its_name(make_record):
    data = json.loads(to_json(make_record())) | {"speed": 3}
    with pytest.raises(ValueError, match="speed is not known"):
        from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["family"], "poetry", "family must be one of"),
        (["score"], float("nan"), "score must be"),
        (["n_tokens"], -1, "n_tokens must be at least 0, got -1"),
        (["n_tokens"], True, "n_tokens must be a whole number, got True"),
        (["n_tokens"], 5.0, "n_tokens must be a whole number"),
        (["n_tokens"], "5", "n_tokens must be a whole number"),
        (["turn"], 0, "turn must be at least 1"),
        (["seed"], 2**64, "seed must be below"),
        (["other_cpu"], 1.5, "other_cpu must be at most 1"),
        (["label"], "sps\x1b[31m", "label must be text without control characters"),
        (["label"], "", "label must be text"),
        (["output_ids", 3], -7, r"output_ids\[3\] must be at least 0"),
        (["steps", "nodes", 1], 1.5, r"steps.nodes\[1\] must be a whole number"),
        (["forwards", "kinds", 0, "layers"], [0], r"forwards.kinds\[0\].layers\[1\] is missing"),
        (["forwards", "kinds", 0, "share"], 1.25, r"share must be at most 1"),
        (["ns", "decode"], -80, "ns.decode must be at least 0"),
        (["params", "passed"], {"x": float("inf")}, "params.passed.x"),
        (["verdict"], "fine", "verdict must be a mapping"),
    ],
)
def test_invalid_value_is_an_error_with_its_path(make_record, path, value, message):
    data = json.loads(to_json(make_record()))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        from_json(json.dumps(data))


def trace(**changes):
    """Return the trace of the record with some columns changed."""
    kinds = [
        ForwardKind("target", "verify", 0, 1, (0, 8)),
        ForwardKind("draft", "draft", 0, 1, (0, 2)),
    ]
    columns = {
        "kind": [0, 1, 0, 0],
        "n_tokens": [3, 1, 3, 3],
        "t0_ns": [0, 40, 60, 80],
        "t1_ns": [30, 50, 80, 95],
    }
    return Trace(kinds, **columns | changes)


def test_deleted_entries_of_a_trace_are_detected(make_record):
    record = make_record()
    for column in ("kind", "n_tokens", "t0_ns", "t1_ns"):
        del getattr(record.forwards, column)[3]
    with pytest.raises(ValueError, match=r"^target_forwards: 3, but the trace has 2"):
        validate(record)
    record.target_forwards = 2
    with pytest.raises(ValueError, match=r"^target_forwards: 2, but prefill and steps need 3"):
        validate(record)


def test_valid_record_passes(make_record):
    validate(make_record())


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("finish", {"finish": "tired"}),
        ("finish", {"finish": "error"}),
        ("finish", {"error": "boom"}),
        ("guarantee", {"guarantee": "hope"}),
        ("verdict", {"verdict": None}),
        ("verdict.kind", {"verdict": Verdict("fine")}),
        ("verdict.gap", {"verdict": Verdict("near-tie", 0, float("inf"), 1)}),
        ("log_likelihood", {"log_likelihood": float("-inf")}),
        ("likelihood", {"likelihood": Likelihood(float("nan"), 1.0, [0.0] * len(TILTS))}),
        ("likelihood", {"likelihood": Likelihood(1.0, -1.0, [0.0] * len(TILTS))}),
        ("likelihood", {"likelihood": Likelihood(1.0, 1.0, [0.0])}),
        ("log_probs", {"log_probs": [-1.0] * 4}),
        ("log_probs", {"log_probs": [-1.0, -1.0, 0.1, -1.0, -1.0]}),
        ("extra", {"extra": {"reused": float("nan")}}),
        ("drafts", {"drafts": []}),
        ("drafts", {"drafts": [DraftedTokens([], None, [])], "steps": None, "peer": True}),
        (
            "drafts.tokens",
            {"drafts": [DraftedTokens([6], None, []), DraftedTokens([9, 3], None, [])]},
        ),
        (
            "drafts.parents",
            {"drafts": [DraftedTokens([6, 7], [-1], []), DraftedTokens([9, 3], None, [])]},
        ),
        (
            "drafts.parents",
            {"drafts": [DraftedTokens([6, 7], [-1, 1], []), DraftedTokens([9, 3], None, [])]},
        ),
        (
            "drafts.path",
            {"drafts": [DraftedTokens([6, 7], None, [2]), DraftedTokens([9, 3], None, [])]},
        ),
        (
            "drafts.path",
            {"drafts": [DraftedTokens([6, 7], None, []), DraftedTokens([9, 3], None, [0, 1])]},
        ),
        ("score", {"score": 1.5}),
        ("n_tokens, output_ids", {"n_tokens": None}),
        ("output_ids", {"n_tokens": 6}),
        ("origin", {"origin": ["prefill"]}),
        ("origin", {"origin": None}),
        ("steps", {"steps": None}),
        ("steps.tested", {"steps": Steps([2, 2], [2, 2], [2], [2, 0], [3, 1])}),
        ("steps.nodes", {"steps": Steps([2, 2], [2, 1], [2, 1], [2, 0], [3, 1])}),
        ("steps.tested", {"steps": Steps([2, 2], [2, 2], [2, 3], [2, 0], [3, 1])}),
        ("steps.tested", {"steps": Steps([2, 2], [2, 2], [1, 1], [2, 0], [3, 1])}),
        ("steps.committed", {"steps": Steps([2, 2], [2, 2], [2, 2], [2, 2], [3, 1])}),
        ("steps.committed", {"steps": Steps([2, 2], [2, 2], [2, 1], [2, 0], [3, 2])}),
        ("origin", {"origin": ["accepted", "accepted", "accepted", "bonus", "recovered"]}),
        ("origin", {"origin": ["prefill", "bonus", "accepted", "accepted", "recovered"]}),
        ("steps.accepted", {"origin": ["prefill", "accepted", "accepted", "accepted", "plain"]}),
        ("steps.accepted", {"steps": Steps([2, 2], [2, 2], [2, 1], [2, 1], [3, 1])}),
        ("steps.accepted", {"steps": Steps([4], [4], [4], [3], [4])}),
        ("steps.levels", {"steps": Steps([2, 0], [2, 2], [2, 0], [2, 0], [3, 1])}),
        ("steps.tested", {"steps": Steps([2, 2], [2, 2], [2, 2], [2, 0], [3, 1])}),
        ("target_forwards", {"target_forwards": 2}),
        ("draft_forwards", {"draft_forwards": 0}),
        ("steps.nodes", {"steps": Steps([2, 2], [8, 8], [2, 1], [2, 0], [3, 1])}),
        ("forwards.kind", {"forwards": trace(kind=[0, 1, 0, 7])}),
        ("forwards.unused", {"forwards": trace(unused=[4])}),
        ("forwards.t1_ns", {"forwards": trace(t1_ns=[30, 50, 80, 79])}),
        ("forwards.n_tokens", {"forwards": trace(n_tokens=[3, 1, 3])}),
        ("forwards", {"forwards": None}),
        ("ns.total", {"ns": Ns()}),
        ("ns.host", {"ns": Ns(100, 20, 80, 10, 65, None)}),
        ("ns.total", {"ns": Ns(101, 20, 80, 10, 65, 5)}),
        ("ns.decode", {"ns": Ns(100, 20, 80, 10, 65, 6)}),
        ("ns.total", {"ns": Ns(100, 20, 80, 10, 65, 5, 40)}),
        ("ns.learn", {"ns": Ns(60, 20, 80, 10, 65, 5, -40)}),
        ("version", {"version": -1}),
    ],
)
def test_broken_invariant_is_an_error_with_its_field(make_record, field, changes):
    with pytest.raises(ValueError, match=f"^{field.replace('.', '[.]')}: "):
        validate(make_record(**changes))


@pytest.mark.parametrize(("work", "share", "holds"), [
    (3.0, 1.0, True), (2.25, 0.75, True), (None, 0.75, True), (1, 0.75, False), (3.75, 1.25, False),
])  # fmt: skip
def test_target_equivalents_are_the_sum_of_the_shares(make_record, work, share, holds):
    record = make_record(target_equivalents=work)
    target, draft = record.forwards.kinds
    record.forwards.kinds = [replace(target, share=share), replace(draft, share=0.9)]
    if holds:
        validate(record)
        return
    with pytest.raises(ValueError, match=r"^(target_equivalents|forwards\.kinds\.share): "):
        validate(record)


def test_share_of_older_records_is_computed_from_the_layers():
    half = ForwardKind("target", "verify", 0, 1, (4, 8))
    assert half.share_of(8) == 0.5
    assert half.share_of(None) == 1
    assert replace(half, share=0.6).share_of(8) == 0.6
    assert ForwardKind("target", "verify", 0, 1, (0, 8)).share_of(8) == 1


def test_other_engines_may_leave_fields_null(make_record):
    missing = dict.fromkeys(("origin", "steps", "target_forwards", "draft_forwards", "forwards"))
    validate(make_record(peer=True, ns=Ns(total=100), **missing))


def test_other_engines_must_have_the_total_time(make_record):
    with pytest.raises(ValueError, match=r"^ns\.total: missing"):
        validate(make_record(peer=True, ns=Ns(prefill=20)))


def test_failed_output_has_its_error_and_nulls(make_record):
    nulls = dict.fromkeys(
        ("output_ids", "origin", "n_tokens", "steps", "target_forwards", "draft_forwards")
    )
    validate(
        make_record(**nulls, forwards=None, ns=Ns(), verdict=None, finish="error", error="boom")
    )


def test_noisy_output_may_have_no_times(make_record):
    validate(make_record(void=True, ns=Ns()))


def test_energy_is_rejected_for_noisy_and_failed_outputs(make_record):
    validate(make_record(energy_j=0.5))
    failed = {"verdict": None, "finish": "error", "error": "boom"}
    for without_time in ({"void": True, "ns": Ns()}, failed):
        with pytest.raises(ValueError, match="energy_j: given for a noisy or failed output"):
            validate(make_record(energy_j=0.5, **without_time))


def test_busy_times_of_overlapping_workers_need_not_add_up(make_record):
    kinds = [ForwardKind("target", "verify", 0, 1, (0, 8)), ForwardKind("d", "draft", 1, 1, (0, 2))]
    trace = Trace(kinds, [0, 0, 0, 1], [1, 4, 4, 1], [0, 9, 20, 0], [9, 20, 70, 60], [])
    validate(make_record(forwards=trace, ns=Ns(100, 20, 80, 60, 70, 2)))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ([0, 1, 5, 9], "not .from, to, sent, read, bytes."),
        ([0, 1, 5, 9, -1], "a negative number"),
        ([1, 1, 5, 9, 8], "from a worker to itself"),
        ([0, 1, 9, 5, 8], "read before it was sent"),
    ],
)
def test_impossible_message_is_an_error(make_record, message, why):
    record = make_record()
    trace = Trace(record.forwards.kinds, [], [], [], [], [], [message])
    with pytest.raises(ValueError, match=f"^forwards[.]messages: {why}"):
        validate(make_record(forwards=trace))


def test_trace_packs_forwards_by_kind_and_keeps_their_order():
    def forward(model: str, role: str, t0: int, used: bool = True) -> SimpleNamespace:
        return SimpleNamespace(
            model=model, role=role, worker=0, batch=1, n_tokens=3, layers=(0, 8), share=1.0,
            t0_ns=t0, t1_ns=t0 + 5, used=used,
        )  # fmt: skip

    sent = SimpleNamespace(sender=0, receiver=1, t0_ns=3, t1_ns=4, nbytes=64)
    trace = Trace.pack(
        [forward("t", "prefill", 0), forward("t", "verify", 9), forward("t", "prefill", 20, False)],
        [sent],
    )
    assert trace.messages == [[0, 1, 3, 4, 64]]
    assert [kind.role for kind in trace.kinds] == ["prefill", "verify"]
    assert trace.kind == [0, 1, 0]
    assert trace.t1_ns == [5, 14, 25]
    assert trace.unused == [2]
    assert trace.workers == 1


def test_error_of_an_older_run_is_truncated_to_one_line(make_record):
    record = make_record(error="a\n" + "x" * 100_000)
    read = from_json(to_json(record)).error
    assert read.startswith("a xxx")
    assert read.endswith("more characters cut)")
    assert len(read) < 3000


def test_a_name_that_is_too_long_is_rejected(make_record):
    with pytest.raises(ValueError, match="label must be at most 4000 characters long"):
        from_json(to_json(make_record(label="x" * 5000)))


def test_texts_of_a_manifest_are_truncated_except_compared_ones():
    endless = "x" * 100_000
    own = {
        "status": "finished",
        "rows": [{"label": "a"}],
        "dropped": {"a": endless},
        "machine": {"gpu": [endless]},
    }
    own |= {"program": {"setting raw": endless}, "config": {"effective": {"note": endless}}}
    found = manifest.parse(json.dumps(own))
    assert len(json.dumps([found["dropped"], found["machine"]])) < 6000
    assert found["program"] == own["program"]
    assert found["config"] == own["config"]
