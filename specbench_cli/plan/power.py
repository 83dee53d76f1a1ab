"""Statistical power of a planned run, estimated from the spread of an earlier run."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from specbench_cli import files
from specbench_cli.plan.plan import Plan
from specbench_cli.stats.bootstrap import LEVEL
from specbench_cli.stats.detectable import POWER, SPREAD, estimate_detectable_ratio
from specbench_cli.store.run_dir import MOST_BYTES, RUNS

ASSUMED = "assumed"
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def estimate_power(plan: Plan, runs: Path = RUNS) -> dict[str, Any]:
    """Return the smallest speed ratio between two methods that the run can detect.

    Returns:
        ratio: None if no difference can be detected.
        power: probability to detect it.
        spread: standard deviation between questions of the log ratio of two methods' times.
        spread_from: a run with the same target, or "assumed".
    """
    spread, origin = _measured_spread(plan.target.label, runs) or (SPREAD, ASSUMED)
    clusters = {(question.task, question.cluster) for question in plan.questions}
    families = {question.family for question in plan.questions}
    ranked = [method_run for method_run in plan.method_runs if not method_run.declared.upper_bound]
    ratio = None
    if len(ranked) > 1 and clusters:
        ratio = estimate_detectable_ratio(
            len(clusters), len(ranked), spread, families=len(families)
        )
    return {
        "ratio": None if ratio is None else round(ratio, 3),
        "power": POWER,
        "spread": round(spread, 3),
        "spread_from": origin,
    }


def _measured_spread(target: str, runs: Path) -> tuple[float, str] | None:
    """Return the spread of the newest finished run of a target, with the name of the run."""
    for file in sorted(runs.glob("*/summary.csv"), reverse=True):  # names start with the time
        try:
            manifest = json.loads(files.read_text(file.parent / "manifest.json", MOST_BYTES))
            lines = io.StringIO(files.read_text(file, MOST_BYTES))
            rows = [row for row in csv.DictReader(lines) if row["family"] == "all"]
            if manifest["status"] != "finished" or manifest["models"]["target"]["label"] != target:
                continue
            spreads = [
                _compute_spread(row) for row in rows if row["speedup_low"] and row["speedup_high"]
            ]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an incomplete run, or one of another version
        if spreads:
            return median(spreads), file.parent.name
    return None


def _compute_spread(row: dict[str, str]) -> float:
    """Compute the spread between questions from the confidence interval of a speedup."""
    width = math.log(float(row["speedup_high"]) / float(row["speedup_low"]))
    return width / (2 * _Z) * math.sqrt(int(row["n_prompts"]))
