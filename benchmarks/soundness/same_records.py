"""Compare the ids and counters of runs by two versions of specbench, record by record.

    python benchmarks/soundness/same_records.py BEFORE AFTER

BEFORE and AFTER are run folders, or folders of run folders that are paired by name. Both versions
must have used the same settings. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COUNTERS = ("output_ids", "origin", "n_tokens", "finish", "target_forwards", "draft_forwards")


def main(before: Path, after: Path) -> int:
    """Print a line per run and the first differences, and return the exit code."""
    names = [""] if (before / "records.jsonl").is_file() else sorted(_runs(before) & _runs(after))
    exit_code = 0
    for name in names:
        old, new = _records(before / name), _records(after / name)
        shared = [key for key in old if key in new]
        different = [key for key in shared if old[key] != new[key]]
        rows = {key[2] for key in shared}
        sys.stdout.write(
            f"{name or after.name}: {len(shared)} records of {len(rows)} rows,"
            f" {len(shared) - len(different)} equal; {len(old.keys() ^ new.keys())} on one side\n"
        )
        for key in different[:5]:
            parts = [part for part in old[key] if old[key][part] != new[key][part]]
            sys.stdout.write(f"  {key}: {', '.join(parts)}\n")
        exit_code |= bool(different) or not shared
    return int(exit_code)


def _runs(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/records.jsonl")}


def _records(run: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return dict(_iterate_records(run))


def _iterate_records(run: Path) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for line in (run / "records.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        steps = {k: v for k, v in (record["steps"] or {}).items() if v is not None}
        trace = record["forwards"] or {"kinds": [], "kind": [], "n_tokens": []}
        kinds = [(k["model"], k["role"], k["worker"], *k["layers"]) for k in trace["kinds"]]
        forwards = sorted(
            (*kinds[kind], n) for kind, n in zip(trace["kind"], trace["n_tokens"], strict=True)
        )
        key = (record["prompt_id"], record["turn"], record["label"], record["pass"])
        yield (
            key,
            {name: record[name] for name in COUNTERS}
            | {f"steps.{name}": column for name, column in steps.items()}
            | {"forwards": forwards, "extra": record.get("extra")},
        )


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
