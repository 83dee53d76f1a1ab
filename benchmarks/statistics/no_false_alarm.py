"""Whether honest methods are ever called broken: every landed one, under every rule, in two dtypes.

    OMP_NUM_THREADS=1 python benchmarks/statistics/no_false_alarm.py FOLDER [PROMPTS [TOKENS]]

A run of the embedded pair for each seed, rule and dtype, in a folder of its own; what is finished
there is not run again. Prints a line a run. Exit code 1 where a row broke or a cell failed; under
`block` methods that draft trees cannot run, and are left out of the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from specbench_cli import registry
from specbench_cli.judge.broken import broken, near_ties, surprise
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Record

CUTS = {
    0: ("--temperature", "0.8"),
    1: ("--temperature", "0.8", "--top-p", "0.9"),
    2: ("--temperature", "1.0", "--top-k", "50", "--top-p", "0.95"),
}
"""By seed, what a distribution is warped by."""
RULES = ("greedy", "coupled", "rejection", "block")
DTYPES = ("float32", "bfloat16")
TREES = "takes chains"
HEADING = "run                     outputs  near-ties  unexplained  least p  deviations  broken"


def main(folder: Path, prompts: int = 48, tokens: int = 12) -> int:
    """Run what is missing and print the table; returns the exit code."""
    sys.stdout.write(HEADING + "\n")
    bad = 0
    for seed, rule, dtype in product(CUTS, RULES, DTYPES):
        path = folder / f"{rule}-{dtype}-{seed}"
        _run(path, seed, rule, dtype, prompts, tokens)
        bad |= _line(path)
    return bad


def _run(path: Path, seed: int, rule: str, dtype: str, prompts: int, tokens: int) -> None:
    specbench = [sys.executable, "-m", "specbench_cli", "run"]
    if (path / "manifest.json").exists():
        if RunDir.open(path).manifest["status"] == "finished":
            return
        order = [*specbench, "--resume", str(path)]
    else:
        methods = [name for name in registry.lossless() if name != "vanilla"]
        sampled = () if rule == "greedy" else (*CUTS[seed], "--verify", rule)
        sizes = ("--limit", str(prompts), "--max-new-tokens", str(tokens), "--seed", str(seed))
        rest = (*sizes, *sampled, "--dtype", dtype, "--threads", "1", "--allow-noise")
        order = [*specbench, "-m", ",".join(methods), *rest, "--out", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(order, env=environment, capture_output=True, check=False)


def _line(path: Path) -> int:
    """Print what became of a run; returns whether any of it is bad."""
    run = RunDir.open(path)
    rows: dict[str, list[Record]] = {}
    for record in run.records():
        if record.error is None or TREES not in record.error:
            rows.setdefault(record.label, []).append(record)
    kept = [record for own in rows.values() for record in own]
    whys = broken(kept, run.manifest, lambda *_: None)
    failed = [record for record in kept if record.error is not None]
    ties = [near_ties(own, run.manifest) for own in rows.values()]
    drawn = [found for own in rows.values() if (found := surprise(own)) is not None]
    ps = [p for each in ties for p in (each.p, each.unexplained_p) if p is not None]
    least = min([*ps, *(p for _, p in drawn)], default=None)
    sys.stdout.write(
        f"{path.name:<23} {len(kept):7} {sum(each.found for each in ties):10}"
        f" {sum(each.unexplained for each in ties):12} {_short(least)}"
        f" {max((abs(z) for z, _ in drawn), default=0.0):11.1f}"
        f"  {len(whys)} of {len(rows)} rows, {len(failed)} cells failed\n"
    )
    for label, why in whys.items():
        sys.stdout.write(f"    {label}: {why}\n")
    for record in failed[:5]:
        sys.stdout.write(f"    {record.label} at {record.prompt_id}: {record.error}\n")
    sys.stdout.flush()
    return int(bool(whys or failed))


def _short(p: float | None) -> str:
    return f"{'-' if p is None else f'{p:.2g}':>8}"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4):
        sys.exit((__doc__ or "").strip())
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
