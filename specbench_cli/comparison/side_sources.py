"""Sides from command-line arguments: a run, several runs, or a baseline by file or name."""

from __future__ import annotations

from pathlib import Path

from specbench_cli.comparison.baselines import baseline
from specbench_cli.comparison.baselines.from_run import read_run
from specbench_cli.comparison.baselines.join import join_runs
from specbench_cli.comparison.side import Side
from specbench_cli.errors import UsageError
from specbench_cli.store.run_dir import find_run


def load_side(source: str, *, root: Path = baseline.ROOT) -> Side:
    """Load the side of a comparison that an argument of `specbench compare` names.

    Args:
        source: a run's folder, `last`, a folder of runs of one program, a baseline file, or the
            name or folder of a baseline in `root`. A baseline's name selects its file for this
            machine if there is one, else its first file.
        root: parent folder of the baselines.

    Raises:
        UsageError: there is no such run or baseline, or it is damaged.
    """
    path = find_run(source)
    if path.is_file():
        return baseline.load(path)
    if path.is_dir() and (path / "manifest.json").exists():
        return read_run(path)
    if runs := find_run_folders(source):
        return join_runs(path.resolve().name, runs)
    name, where = (path.name, path.parent) if path.parent != Path() else (source, root)
    if (file := baseline.find_file(name, where)) is not None:
        return baseline.load(file)
    known = ", ".join(baseline.list_names(root)) or "none yet"
    raise UsageError(
        f"{source} is not a run, a folder of runs, or a baseline (in {root}: {known})",
        hint="specbench list runs; to create a baseline: specbench compare --save NAME RUN",
    )


def find_run_folders(source: str) -> list[Path]:
    """Return the run folders that an argument names: the folder itself, or those inside it."""
    path = find_run(source)
    if (path / "manifest.json").exists():
        return [path]
    return sorted(file.parent for file in path.glob("*/manifest.json"))
