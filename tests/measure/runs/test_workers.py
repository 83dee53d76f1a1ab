"""Runs of methods whose drafter is a process of its own: what they write, and what they survive."""

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
"""Questions: records are told of late, and work must be left by then."""


def workers():
    """The drafters' processes of this one."""
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


@pytest.fixture
def start(log, tmp_path, monkeypatch):
    """Begins a run; its pass is to be run here, as `--only-pass 1` does."""
    monkeypatch.setenv("SPECBENCH_WORKER_TIMEOUT", str(TIMEOUT_S))

    def begin(view=None, **config):
        rows = [{"name": "vanilla"}, {"name": "pearl"}, {"name": "pld"}]
        settings = {"limit": 3, "category": ["qa"], "max_new_tokens": 12, "allow_noise": True}
        asked = RunConfig.model_validate({"methods": rows, **settings, **config})
        return execute.start_run(asked, {}, tmp_path / "run", view or log())

    return begin


@pytest.fixture
def striker(log):
    """A view that sends the drafter's process a signal once it was told of a record of pearl."""

    class Striker(log):
        def __init__(self, blow):
            super().__init__()
            self.blow, self.struck_s, self.told_s = blow, None, None

        def show_record(self, record):
            super().show_record(record)
            if record.label == "pearl" and self.struck_s is None:
                (worker,) = workers()
                worker.send_signal(self.blow)
                self.struck_s = time.monotonic()

        def note(self, text):
            super().note(text)
            self.told_s = time.monotonic()

    return Striker


def by_label(run_dir):
    found = {}
    for record in RunDir.open(run_dir.path).records():
        found.setdefault(record.label, []).append(record)
    return found


def lose(plan, run_dir, view):
    """Run a pass that loses its worker; returns what is said of it."""
    with pytest.raises(WorkerLost) as caught:
        execute.measure_run(plan, run_dir, view, only_pass=1)
    assert caught.value.hint == f"specbench run --resume {run_dir.path}"
    assert len(view.notes) == 1, view.notes
    (note,) = view.notes
    assert note.startswith("pearl is left out of the rest of pass 1: ")
    assert f"specbench run --resume {run_dir.path}" in note
    assert view.told_s - view.struck_s < 20  # 5 on a machine that nobody else uses
    assert workers() == []
    assert RunDir.open(run_dir.path).manifest["status"] == "interrupted"
    return caught.value.message


@pytest.mark.long
def test_a_killed_worker_ends_its_row_the_others_go_on_and_the_rest_is_resumed(start, striker, log):
    view = striker(signal.SIGKILL)
    plan, run_dir = start(view, limit=MANY)
    says = lose(plan, run_dir, view)
    assert says.startswith("pearl could not be measured to the end: ")
    assert "was killed by SIGKILL" in says
    kept = by_label(run_dir)
    assert (len(kept["vanilla"]), len(kept["pld"])) == (MANY, MANY)
    before = {record.key for record in kept["pearl"]}
    assert 1 <= len(before) < MANY

    rest = log()
    plan, run_dir = execute.resume_run(run_dir.path, rest)
    execute.measure_run(plan, run_dir, rest, only_pass=1)
    assert {label for _, _, label, _ in rest.cells} == {"pearl"}
    assert not before & set(rest.cells)
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
    assert pearl > pld  # the drafter's process holds memory too


def check_lanes(record):
    trace, ns = record.forwards, record.ns
    assert trace.workers == 2
    assert 0 <= ns.host <= ns.decode - max(ns.draft, ns.verify)
    for worker in (0, 1):  # nobody computes two things at once
        mine = [i for i, kind in enumerate(trace.kind) if trace.kinds[kind].worker == worker]
        spans = sorted((trace.t0_ns[i], trace.t1_ns[i]) for i in mine)
        assert spans[0][0] >= 0
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert {(sender, receiver) for sender, receiver, *_ in trace.messages} == {(0, 1), (1, 0)}
    assert record.target_forwards == 1 + len(record.steps.levels)


def test_an_interruption_leaves_no_worker(start, log):
    view = log(interrupt_after=1)
    plan, run_dir = start(view, limit=1)
    with pytest.raises(KeyboardInterrupt):
        execute.measure_run(plan, run_dir, view, only_pass=1)
    assert workers() == []
    assert RunDir.open(run_dir.path).manifest["status"] == "interrupted"
