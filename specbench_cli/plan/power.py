"""Statistical power of a planned run, estimated from the results of an earlier run."""

from __future__ import annotations

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
from specbench_cli.store.summary_file import SUMMARY, read_summary_rows

ASSUMED = "assumed"
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def estimate_power(plan: Plan, runs: Path = RUNS) -> dict[str, Any]:
    """Return the smallest speed difference between two methods that the run will probably detect.

    Returns:
        ratio: Smallest detectable ratio of speeds. None if no difference can be detected.
        power: Probability that the run detects this ratio.
        spread: Standard deviation, over questions, of the logarithm of the ratio between the times
            of two methods.
        spread_from: Name of the earlier run with the same target from which `spread` comes. If
            there is none, "assumed".
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
    """Return the spread (see `estimate_power`) in the newest finished run with a target.

    Also return the name of this run. Return None if there is no such run.
    """
    for file in sorted(runs.glob(f"*/{SUMMARY}"), reverse=True):  # folder names begin with the time
        try:
            manifest = json.loads(files.read_text(file.parent / "manifest.json", MOST_BYTES))
            if manifest["status"] != "finished" or manifest["models"]["target"]["label"] != target:
                continue
            spreads = [
                _compute_spread(row)
                for row in read_summary_rows(file.parent)
                if row["speedup_low"] and row["speedup_high"]
            ]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an incomplete run, or one of another version
        if spreads:
            return median(spreads), file.parent.name
    return None


def _compute_spread(row: dict[str, str]) -> float:
    """Return the spread over questions that a method's speedup interval implies.

    Args:
        row: Row of the method in the summary of a run.
    """
    width = math.log(float(row["speedup_high"]) / float(row["speedup_low"]))
    return width / (2 * _Z) * math.sqrt(int(row["n_prompts"]))
