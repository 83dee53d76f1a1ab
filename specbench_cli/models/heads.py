"""Search for trained modules, such as draft heads: in specbench, in the hub's cache, or in a
folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbench_cli import files
from specbench_cli.errors import UsageError
from specbench_cli.models.aliases import HERE
from specbench_cli.models.hub import HubDownload, cached_snapshot, download
from specbench_cli.models.resolve import HUB_ID, Checkpoint

AUTO = "auto"
"""Source name of the module that belongs to the target."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Files of a trained module on this machine.

    Attributes:
        label: name for output and records: a short name, a hub id, or the name of the folder.
        path: folder of the files. Records never contain it.
    """

    label: str
    path: Path


def resolve_head(
    source: str, kind: str, target: Checkpoint, *, in_target: bool, hint: str = ""
) -> HeadFiles:
    """Find a trained module, such as a draft head. Download it from the hub if necessary.

    Args:
        source: a hub id (`org/name`), a folder, or `AUTO` for the known module of the target.
        in_target: whether the target's files may contain the module.
        hint: hint in the error message if no module is known. Modules other than draft heads set
            it.

    Raises:
        UsageError: the folder does not exist, or no module of the kind is known for the target.
        EnvironmentFault: the module is not on this machine and cannot be downloaded.
    """
    found = _find_head(source, kind, target, in_target=in_target, hint=hint)
    files.check_model_folder(found.path)
    return found


def _find_head(
    source: str, kind: str, target: Checkpoint, *, in_target: bool, hint: str = ""
) -> HeadFiles:
    if source != AUTO:
        return _find_by_name(source, kind, hint)
    check_head(source, kind, target, in_target=in_target, hint=hint)
    known = target.heads.get(kind)
    if known is None:
        return HeadFiles(target.label, target.path)
    shipped = HERE / known
    if shipped.is_dir():
        return HeadFiles(shipped.name, shipped)
    return _find_by_name(known, kind, hint)


def check_head(
    source: str, kind: str, target: Checkpoint, *, in_target: bool, hint: str = ""
) -> None:
    """Check that a trained module is on this machine, or that the hub may contain it.

    No files are loaded.

    The arguments are those of `resolve_head`.

    Raises:
        UsageError: the folder does not exist, or no module of the kind is known for the target.
    """
    if source != AUTO:
        local = _local(source, kind, hint)
        if local is not None:
            files.check_model_folder(local.path)
    elif not in_target and kind not in target.heads:
        others = f"; known for it: {', '.join(target.heads)}" if target.heads else ""
        raise UsageError(
            f"no {_describe_kind(kind, hint)} is known for {target.label}{others}",
            hint=hint
            or "--set METHOD.head=FOLDER (or a hub id), or train one: specbench train --help;"
            " specbench list methods says which need none",
        )


def _describe_kind(kind: str, hint: str) -> str:
    return kind if hint else f"{kind} head"


def _find_by_name(source: str, kind: str, hint: str) -> HeadFiles:
    here = _local(source, kind, hint)
    if here is not None:
        return here
    found = cached_snapshot(source)
    instead = "or give the folder of another: --set METHOD.head=FOLDER"
    return HeadFiles(source, found or download(source, HubDownload(source), None, instead))


def _local(source: str, kind: str, hint: str) -> HeadFiles | None:
    """Return the module in a folder or the shipped module with this name.

    Return None for a hub id.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return HeadFiles(folder.resolve().name, folder)
    if (HERE / "embedded" / source).is_dir():
        return HeadFiles(source, HERE / "embedded" / source)
    if not HUB_ID.match(source):
        raise UsageError(
            f"no such {_describe_kind(kind, hint)}: {source}",
            hint=hint or "--set METHOD.head=FOLDER with config.json and *.safetensors, or a hub id",
        )
    return None
