"""Runs small enough for tests: a pair, a few questions, a few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench_cli.config.run import RunConfig
from specbench_cli.execute import passes
from specbench_cli.execute import run as execute
from specbench_cli.store.run_dir import RunDir

HERE = {"isolation": "none"}
"""Plug-ins of tests are run by this process: a process of their own takes seconds to start."""


class Log:
    """A view that remembers what it was shown, and may interrupt after some cells."""

    def __init__(self, interrupt_after=None):
        self.interrupt_after = interrupt_after
        self.facts = None
        self.notes = []
        self.cells = []
        self.said = []

    def planned(self, facts):
        self.facts = facts

    def started(self, cells, done, run_dir):
        self.total, self.done = cells, done

    def stage(self, text):
        self.said.append(text)

    def prompt(self, progress):
        self.said.append(progress)

    def window(self, other_cpu, text):
        pass

    def cell(self, record):
        self.cells.append(record.key)
        if len(self.cells) == self.interrupt_after:
            raise KeyboardInterrupt

    def note(self, text):
        self.notes.append(text)

    def handed_over(self):
        pass

    def flags(self):
        return []


class Outcome:
    """What a run came to."""

    def __init__(self, result, log):
        self.path: Path = result.run_dir
        self.exit_code = result.exit_code
        self.log = log
        run_dir = RunDir.open(result.run_dir)
        self.manifest = run_dir.manifest
        self.prompts = list(run_dir.prompts())
        self.records = list(run_dir.records())

    def by_label(self, label):
        return [record for record in self.records if record.label == label]


@pytest.fixture(scope="session")
def log():
    """The class of views that remember."""
    return Log


@pytest.fixture
def specbench(tmp_path, monkeypatch):
    """Run a configuration through plan, cells and records; returns an `Outcome`."""
    monkeypatch.setattr(passes, "WARM_UP_ROUNDS", 1)
    made = []

    def run(*methods, log=None, resume=None, **config):
        log = log or Log()
        if resume is not None:
            plan, run_dir = execute.reopen(resume, log)
        else:
            made.append(None)
            rows = [
                {"name": "vanilla"},
                *({"name": m} if isinstance(m, str) else m for m in methods),
            ]
            settings = {"limit": 2, "max_new_tokens": 12, "allow_noise": True, **HERE, **config}
            checked = RunConfig.model_validate({"methods": rows, **settings})
            plan, run_dir = execute.start(checked, {}, tmp_path / f"run{len(made)}", log)
        return Outcome(execute.run(plan, run_dir, log), log)

    run.log = Log
    run.path = lambda n: tmp_path / f"run{n}"
    return run
