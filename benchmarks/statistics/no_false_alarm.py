"""Check that no lossless method is reported as broken, under every rule and in two dtypes.

    OMP_NUM_THREADS=1 python benchmarks/statistics/no_false_alarm.py FOLDER [PROMPTS [TOKENS]]

Run the embedded pair once for each seed, rule and dtype, each in its own folder. Finished runs are
not repeated. Print one line per run. The exit code is 1 if a method is broken or an output failed.
Methods that draft trees cannot run under `block`, and are left out of the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from specbench_cli import registry
from specbench_cli.judge.broken import (
    compute_likelihood_deviation,
    count_near_ties,
    find_broken_methods,
)
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Record

WARPS = {
    0: ("--temperature", "0.8"),
    1: ("--temperature", "0.8", "--top-p", "0.9"),
    2: ("--temperature", "1.0", "--top-k", "50", "--top-p", "0.95"),
}
"""Temperature and truncation options, by seed."""
RULES = ("greedy", "coupled", "rejection", "block")
DTYPES = ("float32", "bfloat16")
TREES = "takes chains"
HEADING = "run                     outputs  near-ties  unexplained  least p  deviations  broken"


def main(folder: Path, prompts: int = 48, tokens: int = 12) -> int:
    """Run what is missing, print the table, and return the exit code."""
    sys.stdout.write(HEADING + "\n")
    failed_runs = 0
    for seed, rule, dtype in product(WARPS, RULES, DTYPES):
        path = folder / f"{rule}-{dtype}-{seed}"
        _run(path, seed, rule, dtype, prompts, tokens)
        failed_runs |= _print_run(path)
    return failed_runs


def _run(path: Path, seed: int, rule: str, dtype: str, prompts: int, tokens: int) -> None:
    specbench = [sys.executable, "-m", "specbench_cli", "run"]
    if (path / "manifest.json").exists():
        if RunDir.open(path).manifest["status"] == "finished":
            return
        order = [*specbench, "--resume", str(path)]
    else:
        methods = [name for name in registry.lossless_methods() if name != "vanilla"]
        sampling = () if rule == "greedy" else (*WARPS[seed], "--verify", rule)
        sizes = ("--limit", str(prompts), "--max-new-tokens", str(tokens), "--seed", str(seed))
        rest = (*sizes, *sampling, "--dtype", dtype, "--threads", "1", "--allow-noise")
        order = [*specbench, "-m", ",".join(methods), *rest, "--out", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(order, env=environment, capture_output=True, check=False)


def _print_run(path: Path) -> int:
    """Print the line of a run. Return 1 if a method is broken or an output failed."""
    run = RunDir.open(path)
    rows: dict[str, list[Record]] = {}
    for record in run.records():
        if record.error is None or TREES not in record.error:
            rows.setdefault(record.label, []).append(record)
    records = [record for own in rows.values() for record in own]
    reasons = find_broken_methods(records, run.manifest, lambda *_: None)
    failed = [record for record in records if record.error is not None]
    ties = [count_near_ties(own, run.manifest) for own in rows.values()]
    deviations = [
        found for own in rows.values() if (found := compute_likelihood_deviation(own)) is not None
    ]
    ps = [p for each in ties for p in (each.p, each.unexplained_p) if p is not None]
    smallest = min([*ps, *(p for _, p in deviations)], default=None)
    sys.stdout.write(
        f"{path.name:<23} {len(records):7} {sum(each.found for each in ties):10}"
        f" {sum(each.unexplained for each in ties):12} {_short(smallest)}"
        f" {max((abs(z) for z, _ in deviations), default=0.0):11.1f}"
        f"  {len(reasons)} of {len(rows)} rows, {len(failed)} outputs failed\n"
    )
    for label, why in reasons.items():
        sys.stdout.write(f"    {label}: {why}\n")
    for record in failed[:5]:
        sys.stdout.write(f"    {record.label} at {record.prompt_id}: {record.error}\n")
    sys.stdout.flush()
    return int(bool(reasons or failed))


def _short(p: float | None) -> str:
    return f"{'-' if p is None else f'{p:.2g}':>8}"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4):
        sys.exit((__doc__ or "").strip())
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
