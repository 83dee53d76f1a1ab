"""Where a trained module that goes with a model lies: shipped, in the hub's cache, or a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbench_cli import files
from specbench_cli.errors import UsageError
from specbench_cli.models.aliases import HERE
from specbench_cli.models.hub import Wanted, cached_snapshot, download
from specbench_cli.models.resolve import HUB_ID, Checkpoint

OWN = "auto"
"""The source that stands for the module that belongs to the target."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A trained module's files on this machine.

    label: what may be printed and stored: a short name, a hub id, or the folder's own name.
    path: the folder. Never stored.
    """

    label: str
    path: Path


def resolve_head(
    source: str, kind: str, target: Checkpoint, *, inside: bool, hint: str = ""
) -> HeadFiles:
    """Find a module of a kind, downloading it from the hub if need be.

    Args:
        source: `OWN`, a hub id (`org/name`), or a folder.
        inside: whether the target's own files may hold it.
        hint: of what is no head: what to type where there is none.

    Raises:
        UsageError: no such folder, or nothing of this kind is known for the target.
        EnvironmentFault: not on this machine and not to be had from the hub.
    """
    found = _found(source, kind, target, inside=inside, hint=hint)
    files.check_model_folder(found.path)
    return found


def _found(
    source: str, kind: str, target: Checkpoint, *, inside: bool, hint: str = ""
) -> HeadFiles:
    if source != OWN:
        return _named(source, kind, hint)
    check_head(source, kind, target, inside=inside, hint=hint)
    known = target.heads.get(kind)
    if known is None:
        return HeadFiles(target.label, target.path)
    shipped = HERE / known
    if shipped.is_dir():
        return HeadFiles(shipped.name, shipped)
    return _named(known, kind, hint)


def check_head(source: str, kind: str, target: Checkpoint, *, inside: bool, hint: str = "") -> None:
    """Raise UsageError if a module is neither on this machine nor downloadable. Loads no files.

    For the arguments see `resolve_head`.

    Raises:
        UsageError: no such folder, or nothing of this kind is known for the target.
    """
    if source != OWN:
        local = _local(source, kind, hint)
        if local is not None:
            files.check_model_folder(local.path)
    elif not inside and kind not in target.heads:
        others = f"; known for it: {', '.join(target.heads)}" if target.heads else ""
        raise UsageError(
            f"no {_called(kind, hint)} is known for {target.label}{others}",
            hint=hint
            or "--set METHOD.head=FOLDER (or a hub id), or train one: specbench train --help;"
            " specbench list methods says which need none",
        )


def _called(kind: str, hint: str) -> str:
    return kind if hint else f"{kind} head"


def _named(source: str, kind: str, hint: str) -> HeadFiles:
    here = _local(source, kind, hint)
    if here is not None:
        return here
    found = cached_snapshot(source)
    instead = "or give the folder of another: --set METHOD.head=FOLDER"
    return HeadFiles(source, found or download(source, Wanted(source), None, instead))


def _local(source: str, kind: str, hint: str) -> HeadFiles | None:
    """The module in a folder, or a shipped one by its name; None for a hub id."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return HeadFiles(folder.resolve().name, folder)
    if (HERE / "embedded" / source).is_dir():
        return HeadFiles(source, HERE / "embedded" / source)
    if not HUB_ID.match(source):
        raise UsageError(
            f"no such {_called(kind, hint)}: {source}",
            hint=hint or "--set METHOD.head=FOLDER with config.json and *.safetensors, or a hub id",
        )
    return None
