"""Learning while decoding: the audit, acceptance over time, versions, and resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench_cli import registry
from specbench_cli.audit.checks import distribution as checks_distribution
from specbench_cli.audit.runner import CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.config.run import RunConfig
from specbench_cli.measure import repeat
from specbench_cli.measure import run as execute
from specbench_cli.store.invariants import validate
from specbench_cli.store.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("small_pair")

LEARNER = Path(__file__).parent / "plugins" / "learner.py"
QUESTIONS, ROUNDS = ("How much is 2 + 2?", "Name the capital of a country."), 3
LEARNING = {"name": "learner", "label": "learning"}
FROZEN = {"name": "learner", "label": "frozen", "params": {"rate": 0}}


class View:
    """Progress view that shows nothing, and interrupts the run after `last` records."""

    def __init__(self, last=None):
        self.last, self.num_records = last, 0

    def show_record(self, record):
        self.num_records += 1
        if self.num_records == self.last:
            raise KeyboardInterrupt

    def flags(self):
        return []

    def __getattr__(self, name):
        return lambda *_: None


def measure_records(folder, *rows, last=None, **settings):
    """Return the records of a run in which the same questions repeat."""
    folder.mkdir()
    task, run = folder / "stream.jsonl", folder / "run"
    task.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS * ROUNDS))
    config = RunConfig(
        methods=[{"name": "vanilla"}, *rows], tasks=[str(task)], plugins=[str(LEARNER)],
        **{"max_new_tokens": 24, "threads": 1, "allow_noise": True, "isolation": "none", **settings}
    )  # fmt: skip
    return finished(*execute.start_run(config, {}, run, View()), View(last))


def finished(plan, run_dir, view):
    execute.measure_run(plan, run_dir, view)
    return list(RunDir.open(run_dir.path).records())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Records of an uninterrupted run on a quiet machine."""
    return measure_records(tmp_path_factory.mktemp("learner") / "whole", FROZEN, LEARNING)


def select_method(records, label):
    """Return the records of one method, in the order of the prompts."""
    return [record for record in records if record.label == label]


def list_counters(records):
    """Return all counters, which must not depend on the machine."""
    return {
        r.key: (r.output_ids, r.steps, r.target_forwards, r.draft_forwards, r.version)
        for r in records
    }


def acceptance_rate(records):
    """Return accepted draft tokens per drafted token."""
    return sum(sum(r.steps.accepted) for r in records) / sum(sum(r.steps.levels) for r in records)


def test_the_method_imports_only_the_api():
    lines = LEARNER.read_text().splitlines()
    imports = [line.split()[1] for line in lines if line.startswith(("import", "from"))]
    assert imports == ["torch", "specbench_cli.api"]


def test_it_passes_the_audit(monkeypatch):
    monkeypatch.setattr(checks_distribution, "MAX_OUTCOMES", 1_000)  # its steps have many outcomes
    registry.load_plugin(str(LEARNER))
    found = run_checks(AuditSubject.from_method("learner", registry.load("learner")), CHECKS)
    assert [finding for finding in found if not finding.passed] == []
    assert {"distribution", "tokens", "order", "states", "model", "caches"} <= {
        f.check for f in found
    }


def test_acceptance_rises_while_the_text_stays_vanillas(whole):
    for record in whole:
        validate(record)
        kind = "reference" if record.label == "vanilla" else "identical"
        assert record.verdict.kind == kind
    rounds = range(0, ROUNDS * len(QUESTIONS), len(QUESTIONS))
    learning, frozen = (
        [acceptance_rate(select_method(whole, label)[at : at + len(QUESTIONS)]) for at in rounds]
        for label in ("learning", "frozen")
    )
    assert len(set(frozen)) == 1
    assert all(later > frozen[0] + 0.05 for later in learning[1:]), (learning, frozen)


def test_records_hold_the_version_and_what_learning_took(whole):
    for label in ("learning", "frozen"):
        own = select_method(whole, label)
        assert [record.version for record in own] == list(range(len(own)))
        assert own[0].ns.learn == 0
        assert all(record.ns.learn > 0 for record in own[1:])
        assert all(r.ns.total == r.ns.learn + r.ns.prefill + r.ns.decode for r in own)
    assert {(r.version, r.ns.learn) for r in select_method(whole, "vanilla")} == {(None, None)}


def test_an_interrupted_run_is_resumed_with_the_same_result(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measure_records(tmp_path / "cut", LEARNING, last=7)
    plan, run_dir = execute.resume_run(tmp_path / "cut" / "run", View())
    assert 7 <= len(list(run_dir.records())) < 2 * ROUNDS * len(QUESTIONS)
    assert list_counters(
        select_method(finished(plan, run_dir, View()), "learning")
    ) == list_counters(select_method(whole, "learning"))


class Noise:
    """Noise meter of a machine that is busy in some windows. Each measurement fills one window."""

    def __init__(self, busy):
        self.busy, self.window = busy, 0

    def open(self):
        self.window += 1

    def is_full(self):
        return True

    def close(self):
        return 0.9 if self.window in self.busy else 0.0


def test_a_repeated_measurement_begins_with_the_same_version(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(repeat, "NoiseMeter", lambda *_: Noise(busy=range(1, 400, 2)))
    again = measure_records(tmp_path / "again", LEARNING, allow_noise=False)
    assert not any(record.void for record in again)
    assert list_counters(select_method(again, "learning")) == list_counters(
        select_method(whole, "learning")
    )


def test_learning_on_a_busy_machine_makes_the_next_prompt_noisy(tmp_path, monkeypatch):
    monkeypatch.setattr(repeat, "NoiseMeter", lambda *_: Noise(busy=range(4, 10)))
    records = measure_records(tmp_path / "run", LEARNING, allow_noise=False, max_new_tokens=4)
    vanilla, own = select_method(records, "vanilla"), select_method(records, "learning")
    assert [r.void for r in vanilla] == [r.other_cpu > 0 for r in vanilla]
    busy = [r.other_cpu > 0 for r in own]
    assert sum(busy) == 1 and not busy[-1]
    assert [r.void for r in own] == [
        now or before for now, before in zip(busy, [False, *busy[:-1]], strict=True)
    ]
    assert all((r.ns.total is None) == r.void for r in own)
