"""Baselines: what a comparison needs of runs, small enough to be committed, one file a machine.

`results/baselines/NAME/<machine id>.json` holds checksums, counters and times; no texts, no tokens,
no paths. Several runs of one program are several processes of one baseline.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from specbench_cli import files
from specbench_cli.comparison.baselines.file import dump, parse
from specbench_cli.comparison.baselines.join import join
from specbench_cli.comparison.cell import Cell
from specbench_cli.comparison.side import Side
from specbench_cli.errors import UsageError

ROOT = Path("results/baselines")
"""Where baselines are, one folder a name."""

MOST_BYTES = 256 * files.MB
"""Maximum size of a baseline file in bytes."""
_NO_TIMES = ("no times are kept, ids and counters alone: noisy, as the runs are labelled",)
_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)


def save(
    name: str,
    runs: Sequence[Path],
    *,
    root: Path = ROOT,
    tell: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write a baseline, in place of the one that this machine had by that name. Times of runs that
    are labelled noisy are not kept.

    Args:
        runs: of one program on one machine, with the same outputs; at least one.
        tell: who is told of runs whose times are not kept.

    Returns:
        Its file.

    Raises:
        UsageError: the runs are unfinished, do not belong together, or did not all come to the same
            where steps do not depend on timing; names what differs.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a baseline: letters, digits and . _ + - are",
            hint="specbench compare --save ci last",
        )
    side = _join(name, runs)
    if side.machine is None or not _NAME.fullmatch(side.machine):
        raise UsageError(
            f"{runs[0]} does not say what machine it was run on, which baselines go by",
            hint="run it anew: specbench run",
        )
    path = root / name / f"{side.machine}.json"
    try:
        files.write_own(path, dump(side), _is_baseline)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    for sentence in side.left_out:
        tell(sentence)
    return path


def _is_baseline(content: bytes) -> bool:
    """Return True if the content is a baseline of any version."""
    return {"schema", "machine", "rows", "prompts"} <= files.json_object(content).keys()


def load(path: Path) -> Side:
    """The side that a baseline is. Raises UsageError where there is none or it is damaged."""
    try:
        return parse(files.read_text(path, MOST_BYTES))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="specbench compare --save NAME RUN"
        ) from error
    except (ValueError, TypeError, LookupError) as error:
        raise UsageError(
            f"{path} is no baseline, or a damaged one: {error}",
            hint=f"git checkout -- {shlex.quote(str(path))}, or specbench compare --save NAME RUN",
        ) from error


def names(root: Path = ROOT) -> list[str]:
    """All baselines."""
    return sorted({path.parent.name for path in root.glob("*/*.json")})


def find(name: str, root: Path = ROOT) -> Path | None:
    """The file of a baseline: this machine's, else the first; null where there is none."""
    files = sorted((root / name).glob("*.json")) if _NAME.fullmatch(name) else []
    if len(files) < 2:
        return files[0] if files else None
    # Asking what machine this is takes torch, and seconds.
    from specbench_cli.measure.machine import fingerprint

    own = f"{fingerprint()['id']}.json"
    return next((file for file in files if file.name == own), files[0])


def _join(name: str, runs: Sequence[Path]) -> Side:
    """Runs as one side, without what is not to be kept."""
    if not runs:
        raise UsageError(
            "a baseline is made of a run", hint=f"specbench compare --save {name} last"
        )
    side = join(name, runs)
    return replace(
        side,
        cells={key: _bare(cell, side.noisy) for key, cell in side.cells.items()},
        processes=tuple(
            tuple(_bare(cell, side.noisy) for cell in process) for process in side.processes
        ),
        left_out=_NO_TIMES if side.noisy else side.left_out,
    )


def _bare(cell: Cell, noisy: bool) -> Cell:
    """A cell without times that nothing is compared with, and with its error's kind alone: the text
    may hold paths."""
    if noisy:
        cell = replace(cell, times=None)
    if cell.error is None:
        return cell
    kind = cell.error.partition(":")[0]
    return replace(cell, error=kind if kind.isidentifier() else "failed")
