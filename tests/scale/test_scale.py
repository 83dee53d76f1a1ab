"""A test that large runs are planned and read quickly."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

from specbench_cli.config.run import RunConfig
from specbench_cli.plan.plan import make_plan

BOUND_S = 4.0
"""Largest CPU time for 480 prompts x 45 methods, in seconds. A quiet machine needs less than 1 s.
"""


def test_480_prompts_of_45_methods_are_planned_and_read_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    write = importlib.import_module("synthetic").write
    run = write(tmp_path / "run", 108, 10, 1)
    write(tmp_path / "warm", 1, 1, 1).read_output_ids()
    rows = [{"name": "vanilla", "label": "vanilla"}]
    rows += [{"name": "sps", "label": f"sps-{n}", "params": {"length": 1 + n}} for n in range(44)]
    config = RunConfig(methods=rows, tasks=["mini"], verify="greedy")
    start = time.process_time()
    done = set(run.read_output_ids())
    read = time.process_time() - start
    plan = make_plan(config)
    schedule = list(plan.schedule(1))
    planned = time.process_time() - start - read
    assert len(done) == 1080
    assert (len(schedule), sum(len(method_runs) for _, method_runs in schedule)) == (480, 480 * 45)
    assert 20 * read + planned < BOUND_S
