"""Tests of runs of a method that drafts in another process, also when that process is killed."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

import psutil
import pytest

from specbench_cli.config.run import RunConfig
from specbench_cli.errors import WorkerLost
from specbench_cli.measure import run as execute
from specbench_cli.store.invariants import validate
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

TIMEOUT_S = 1
MANY = 6
"""Number of questions: records are reported late, and some must still be unmeasured then."""


def workers():
    """Return the draft processes of this process."""
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


@pytest.fixture
def start(log, tmp_path, monkeypatch):
    """Return a function that starts a run. The test measures its pass, as `--only-pass 1` does."""
    monkeypatch.setenv("SPECBENCH_WORKER_TIMEOUT", str(TIMEOUT_S))

    def begin(view=None, **config):
        rows = [{"name": "vanilla"}, {"name": "pearl"}, {"name": "pld"}]
        settings = {"limit": 3, "category": ["qa"], "max_new_tokens": 12, "allow_noise": True}
        run_config = RunConfig.model_validate({"methods": rows, **settings, **config})
        return execute.start_run(run_config, {}, tmp_path / "run", view or log())

    return begin


@pytest.fixture
def signalling_view(log):
    """A view class that sends a signal to the draft process at the first record of pearl."""

    class SignallingView(log):
        def __init__(self, signal_number):
            super().__init__()
            self.signal, self.signalled_s, self.noted_s = signal_number, None, None

        def show_record(self, record):
            super().show_record(record)
            if record.label == "pearl" and self.signalled_s is None:
                (worker,) = workers()
                worker.send_signal(self.signal)
                self.signalled_s = time.monotonic()

        def note(self, text):
            super().note(text)
            self.noted_s = time.monotonic()

    return SignallingView


def by_label(run_dir):
    found = {}
    for record in RunDir.open(run_dir.path).records():
        found.setdefault(record.label, []).append(record)
    return found


def measure_with_loss(plan, run_dir, view):
    """Run a pass that loses its draft process, and return the error message."""
    with pytest.raises(WorkerLost) as caught:
        execute.measure_run(plan, run_dir, view, only_pass=1)
    assert caught.value.hint == f"specbench run --resume {run_dir.path}"
    assert len(view.notes) == 1, view.notes
    (note,) = view.notes
    assert note.startswith("pearl is left out of the rest of pass 1: ")
    assert f"specbench run --resume {run_dir.path}" in note
    assert view.noted_s - view.signalled_s < 20  # about 5 s on a quiet machine
    assert workers() == []
    assert RunDir.open(run_dir.path).manifest["status"] == "interrupted"
    return caught.value.message


@pytest.mark.long
def test_a_killed_draft_process_ends_only_its_method_and_the_run_can_be_resumed(
    start, signalling_view, log
):
    view = signalling_view(signal.SIGKILL)
    plan, run_dir = start(view, limit=MANY)
    message = measure_with_loss(plan, run_dir, view)
    assert message.startswith("pearl could not be measured to the end: ")
    assert "was killed by SIGKILL" in message
    kept = by_label(run_dir)
    assert (len(kept["vanilla"]), len(kept["pld"])) == (MANY, MANY)
    before = {record.key for record in kept["pearl"]}
    assert 1 <= len(before) < MANY

    rest = log()
    plan, run_dir = execute.resume_run(run_dir.path, rest)
    execute.measure_run(plan, run_dir, rest, only_pass=1)
    assert {label for _, _, label, _ in rest.record_keys} == {"pearl"}
    assert not before & set(rest.record_keys)
    assert workers() == []
    records = by_label(run_dir)
    assert len(records["pearl"]) == MANY
    assert all(record.forwards.messages == [] for record in records["vanilla"])
    for record in records["pearl"]:
        validate(record)
        assert record.verdict.kind == "identical"
        check_lanes(record)
    manifest = RunDir.open(run_dir.path).manifest
    assert manifest["memory"]["again"]["draft"] > 0
    assert set(manifest["config"]["effective"]["devices"]) == {"target", "draft"}
    pearl, pld = (max(r.peak_bytes for r in records[label]) for label in ("pearl", "pld"))
    assert pearl > pld  # the memory of the draft process is included


def check_lanes(record):
    trace, ns = record.forwards, record.ns
    assert trace.workers == 2
    assert 0 <= ns.host <= ns.decode - max(ns.draft, ns.verify)
    for worker in (0, 1):  # a worker computes one forward at a time
        worker_forwards = [
            i for i, kind in enumerate(trace.kind) if trace.kinds[kind].worker == worker
        ]
        spans = sorted((trace.t0_ns[i], trace.t1_ns[i]) for i in worker_forwards)
        assert spans[0][0] >= 0
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert {(sender, receiver) for sender, receiver, *_ in trace.messages} == {(0, 1), (1, 0)}
    assert record.target_forwards == 1 + len(record.steps.levels)


def test_an_interruption_leaves_no_draft_process(start, log):
    view = log(interrupt_after=1)
    plan, run_dir = start(view, limit=1)
    with pytest.raises(KeyboardInterrupt):
        execute.measure_run(plan, run_dir, view, only_pass=1)
    assert workers() == []
    assert RunDir.open(run_dir.path).manifest["status"] == "interrupted"
