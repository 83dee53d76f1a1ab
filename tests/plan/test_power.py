"""Tests of the smallest difference that a planned run can detect."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from specbench_cli.plan.power import estimate_power
from specbench_cli.stats.detectable import SPREAD, estimate_detectable_ratio

COLUMNS = "family,label,speedup_low,speedup_high,n_prompts"


@dataclass(frozen=True)
class _Question:
    task: str
    cluster: str
    family: str


def _plan(questions: int = 24, methods: int = 3):
    method_run = SimpleNamespace(declared=SimpleNamespace(upper_bound=False))
    return SimpleNamespace(
        method_runs=(method_run,) * methods,
        questions=tuple(
            _Question("mini", f"mini/{i}", f"family {i % 6}") for i in range(questions)
        ),
        target=SimpleNamespace(label="embedded-7m"),
    )


def _write_earlier_run(
    folder, name: str, rows: str, target: str = "embedded-7m", status: str = "finished"
):
    run = folder / name
    run.mkdir()
    manifest = {"status": status, "models": {"target": {"label": target}}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "summary.csv").write_text(f"{COLUMNS}\n{rows}")


def test_spread_is_assumed_without_an_earlier_run(tmp_path):
    found = estimate_power(_plan(), tmp_path)
    assert (found["spread"], found["spread_from"]) == (SPREAD, "assumed")
    assert found["ratio"] == pytest.approx(estimate_detectable_ratio(24, 3, families=6), abs=1e-3)


def test_spread_comes_from_the_newest_finished_run_of_the_target(tmp_path):
    _write_earlier_run(tmp_path, "2026a", "all,sps,1.0,4.0,16\n")
    _write_earlier_run(
        tmp_path, "2026b", "all,vanilla,,,16\nall,sps,1.0,1.48,16\nqa,sps,1.0,9.0,4\n"
    )
    _write_earlier_run(tmp_path, "2026c", "all,sps,1.0,2.0,16\n", target="another")
    _write_earlier_run(tmp_path, "2026d", "all,sps,1.0,2.0,16\n", status="interrupted")
    _write_earlier_run(tmp_path, "2026e", "all,sps,none,2.0,16\n")
    found = estimate_power(_plan(), tmp_path)
    assert (found["spread"], found["spread_from"]) == (0.4, "2026b")
    assert found["ratio"] > estimate_power(_plan(), tmp_path / "empty")["ratio"]


@pytest.mark.parametrize(("questions", "methods"), [(1, 3), (24, 1)])
def test_one_question_or_method_has_no_detectable_ratio(tmp_path, questions, methods):
    assert estimate_power(_plan(questions, methods), tmp_path)["ratio"] is None
