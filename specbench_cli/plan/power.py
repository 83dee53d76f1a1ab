"""What a planned run could tell apart, by the spread that an earlier run showed."""

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


def outlook(plan: Plan, runs: Path = RUNS) -> dict[str, Any]:
    """The smallest ratio between the speeds of two rows that would be found.

    Returns:
        ratio (None where no difference would be found), power, spread (standard deviation between
        questions of the log ratio of two rows' times), spread_from (a run of the same target, or
        "assumed").
    """
    spread, origin = _seen(plan.target.label, runs) or (SPREAD, ASSUMED)
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


def _seen(target: str, runs: Path) -> tuple[float, str] | None:
    """The spread of the newest finished run of a target, with the run's name."""
    for file in sorted(runs.glob("*/summary.csv"), reverse=True):  # names begin with the time
        try:
            manifest = json.loads(files.read_text(file.parent / "manifest.json", MOST_BYTES))
            lines = io.StringIO(files.read_text(file, MOST_BYTES))
            rows = [row for row in csv.DictReader(lines) if row["family"] == "all"]
            if manifest["status"] != "finished" or manifest["models"]["target"]["label"] != target:
                continue
            spreads = [_spread(row) for row in rows if row["speedup_low"] and row["speedup_high"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half a run, or one of another version: it tells nothing
        if spreads:
            return median(spreads), file.parent.name
    return None


def _spread(row: dict[str, str]) -> float:
    """From a speedup's interval back to the spread between its questions."""
    width = math.log(float(row["speedup_high"]) / float(row["speedup_low"]))
    return width / (2 * _Z) * math.sqrt(int(row["n_prompts"]))
