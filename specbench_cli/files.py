"""Safe reading of the user's files, and safe writing into the user's folders.

Reading: a path may be a device that never ends, or a pipe that sends no data. So reads are limited
in bytes and in time.

Writing: this module writes, replaces and removes all files of specbench. Each file is written
completely or not at all. Links in an output folder are not followed. A file that specbench did not
write is replaced only with `--overwrite`.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import select
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from specbench_cli.errors import UsageError

MB = 1_000_000

WAIT_S = 30.0
"""Maximum number of seconds to wait for data from a pipe."""

_CHUNK = 1 << 16

OVERWRITE = "--overwrite"
"""Option that allows replacing files that specbench did not write."""

FILE_LIST = ".specbench.json"
"""Name of the file in an output folder that lists the files of specbench with their SHA-256."""

_ABOUT = "files that specbench wrote in this folder"
_MARK, _FILES, _LIST = "about", "files", "list"
"""Names inside a temporary folder of `staging_folder`: marker file, folder of the new files, and
new `FILE_LIST`."""
_ABOUT_STAGING = "temporary files of specbench, removed by its next command\n"
"""Content of the marker file in a temporary folder."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.new")
"""Names of the temporary files of `replace`. A killed process may leave one."""
_CONFIG = "config.json"
"""File that makes a folder a model. It is removed first and written last, so that an interruption
leaves no half-written model."""
_CONFIGS = {_CONFIG, "adapter_config.json", "generation_config.json", "tokenizer_config.json"}
_TEXTS = {".jinja", ".json", ".model", ".txt"}
_MOST_CONFIG, _MOST_TEXT = 16 * MB, 256 * MB
"""Maximum sizes in bytes of a model's config and of its other text files. The largest known file,
a tokenizer.json, has 35 MB."""
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_SAFE = _NOFOLLOW | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags for `os.open`. With O_NONBLOCK, opening a named pipe does not wait for its other end."""
_NO_FILE = frozenset({errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO})
"""Errors of `os.open` for a link, a folder or a socket."""
_MAX_READ = 1 << 28
"""Maximum size in bytes of a file that specbench wrote. The largest are baselines."""


def cache_folder() -> Path:
    """Return the cache folder: $SPECBENCH_CACHE, or `specbench` in the user's cache folder
    (XDG)."""
    if own := os.environ.get("SPECBENCH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specbench"


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file, which may also be a device (`/dev/zero`) or a pipe.

    Args:
        path: The file.
        max_bytes: Maximum size in bytes.

    Raises:
        OSError: the file cannot be read, is too large, or is a pipe that sends no data in time.
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    parts: list[bytes] = []
    try:
        held = 0
        while part := _read_chunk(number, path):
            parts.append(part)
            held += len(part)
            if held > max_bytes:
                raise OSError(errno.EFBIG, f"it has more than {max_bytes / MB:g} MB", str(path))
    finally:
        os.close(number)
    return b"".join(parts)


def read_text(path: Path, max_bytes: int) -> str:
    """Return the UTF-8 text of a file, with `\\n` as line ends.

    Raises:
        OSError: the file cannot be read, is larger than `max_bytes`, or is a pipe that sends no
            data.
        UnicodeDecodeError: the file is not UTF-8 text.
    """
    text = read_bytes(path, max_bytes).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_chunk(number: int, path: Path) -> bytes:
    """Return the next bytes of an open file, or b"" at its end."""
    while True:
        try:
            return os.read(number, _CHUNK)
        except BlockingIOError:  # a pipe, or a terminal
            if not select.select([number], [], [], WAIT_S)[0]:
                silent = f"nothing was written to it for {WAIT_S:g} s"
                raise OSError(errno.ETIMEDOUT, silent, str(path)) from None


def check_model_folder(folder: Path) -> None:
    """Raise UsageError if reading the folder of a model, adapter or head might never end.

    Call this before a library such as transformers reads the folder. A link to a regular file is
    allowed, because the cache of the Hugging Face hub consists of links.

    Raises:
        UsageError: The folder contains a pipe, a device or a socket, or a link to one. Also raised
            for a file that is much larger than its format needs.
    """
    for place in (folder, folder / "additional_chat_templates"):
        try:
            entries = sorted(place.iterdir())
        except OSError:
            continue  # the reader of the folder reports it
        for path in entries:
            _check_readable(path)


def check_regular(path: Path) -> os.stat_result | None:
    """Raise UsageError if the path is a pipe, a device or a socket, or a link to one.

    Returns:
        The status of the file or folder, or None if there is none.
    """
    try:
        held = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(held.st_mode) and not stat.S_ISDIR(held.st_mode):
        raise UsageError(
            f"{path} is not a regular file: reading a pipe or a device might never end",
            "replace it with a regular file, or remove it",
        )
    return held


def _check_readable(path: Path) -> None:
    held = check_regular(path)
    if held is None:
        return
    most = _MOST_CONFIG if path.name in _CONFIGS else _MOST_TEXT
    if path.suffix in _TEXTS and stat.S_ISREG(held.st_mode) and held.st_size > most:
        raise UsageError(
            f"{path} has {held.st_size / MB:,.0f} MB; at most {most / MB:g} MB are allowed",
            "download the folder again, or remove the file",
        )


def open_own(path: Path, flags: int) -> int:
    """Open a file that belongs to specbench, and return its file descriptor.

    The file must be a regular file. Links are not followed, so that no file elsewhere changes.

    Args:
        flags: flags of `os.open`.

    Raises:
        UsageError: the path is a link, a folder or a device, or the file has a second hard link.
        OSError: the file cannot be opened for another reason.
    """
    try:
        fd = os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _link_error(path) from error
        raise
    held = os.fstat(fd)
    if not stat.S_ISREG(held.st_mode) or held.st_nlink > 1:
        os.close(fd)
        raise _link_error(path)
    return fd


def read_own(path: Path) -> bytes | None:
    """Return the content of a file that belongs to specbench. Return None if it does not exist.

    Raises:
        UsageError: the path is a link, a folder or a device, or the file has a second hard link.
    """
    try:
        fd = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(_MAX_READ)


def json_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object. Return {} if the content is not a JSON object."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def replace(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old or the new content, never a mixture.

    If the path is a link, the new file replaces the link. The file to which the link pointed does
    not
    change.

    Raises:
        OSError: the file cannot be written. The error contains the file's name.
    """
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def is_temporary(path: Path) -> bool:
    """Return True if the path is a temporary file that a killed process left while it wrote a
    file.
    """
    return _TEMPORARY.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)


def remove_own(path: Path, own: Callable[[bytes], bool] = lambda _: True) -> None:
    """Remove a file if specbench wrote it.

    Args:
        own: receives the file's content, and returns True if specbench wrote it.
    """
    with suppress(UsageError):
        content = read_own(path)
        if content is not None and own(content):
            path.unlink(missing_ok=True)


def check_no_link(path: Path) -> None:
    """Raise UsageError if a path is a symbolic link. Call this before writing to it."""
    if path.is_symlink():
        raise _link_error(path)


def write_own(
    path: Path,
    content: str | bytes,
    own: Callable[[bytes], bool],
    *,
    overwrite: bool | None = None,
) -> None:
    """Write a file atomically. Replace an existing file only if specbench wrote it.

    Args:
        own: receives the existing content, and returns True if specbench wrote it.
        overwrite: True replaces any existing file. None means that the command has no option
            `--overwrite`.

    Raises:
        UsageError: specbench did not write the existing file.
        OSError: the file cannot be written.
    """
    check_own(path, own, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, content)


def check_own(path: Path, own: Callable[[bytes], bool], *, overwrite: bool | None = None) -> None:
    """Raise UsageError if `write_own` would raise it. Call this before a long computation."""
    _check_no_folder(path)
    if overwrite:
        return
    try:
        content = read_own(path)
    except UsageError:
        raise _foreign_file_error([path], overwrite) from None
    if content is not None and not own(content):
        raise _foreign_file_error([path], overwrite)


def _check_no_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        raise UsageError(f"{path} is a folder, not a file", "choose another --out")


def write_listed(path: Path, content: str | bytes, *, overwrite: bool | None = None) -> None:
    """Write a file atomically, and add its name to `FILE_LIST` in its folder.

    `FILE_LIST` lists the files that specbench wrote, so that it may replace them later.

    Raises:
        UsageError: an existing file must not be replaced.
        OSError: the file cannot be written.
    """
    check_listed(path, overwrite=overwrite)
    with staging_folder(path.parent, overwrite=overwrite) as staging:
        replace(staging / path.name, content)


def check_listed(path: Path, *, overwrite: bool | None = None) -> None:
    """Raise UsageError if `write_listed` would raise it. Call this before a long computation."""
    _check_no_folder(path)
    if path.name == FILE_LIST:
        raise UsageError(
            f"{FILE_LIST} is the list of the files that specbench wrote in a folder",
            "choose another name",
        )
    known = _read_file_list(path.parent).get(path.name, "") if path.parent.is_dir() else ""
    if not _may_replace(path.parent, path.name, set(known.split()), overwrite):
        raise _foreign_file_error([path], overwrite)


@contextmanager
def staging_folder(
    folder: Path, *, overwrite: bool | None = False, not_replaced: list[Path] | None = None
) -> Iterator[Path]:
    """Yield a temporary folder, and move its files into `folder` at the end of the `with` block.

    An existing file is replaced if it has the same content. It is also replaced if specbench wrote
    it and nobody changed it since. For this check, `FILE_LIST` stores the checksums of the files
    that specbench wrote.

    Args:
        overwrite: True replaces any existing file. None means that the command has no option
            `--overwrite`.
        not_replaced: list that receives the existing files that must not be replaced. The other
            files
            are moved. If this is None, such a file raises an error instead, and no file is moved.

    Raises:
        UsageError: an existing file or a link must not be replaced.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale_staging(folder)
    with tempfile.TemporaryDirectory(
        dir=folder, prefix=f"{_staging_prefix()}{os.getpid()}-"
    ) as name:
        (Path(name) / _MARK).write_text(_ABOUT_STAGING, encoding="utf-8")
        new_files = Path(name) / _FILES
        new_files.mkdir()
        yield new_files
        known, new = _read_file_list(folder), dict[str, str]()
        for file in sorted(new_files.rglob("*")):
            if not file.is_dir():
                new[file.relative_to(new_files).as_posix()] = _sha256(file)
        wrong = {
            place
            for place, value in new.items()
            if not _may_replace(folder, place, {*known.get(place, "").split(), value}, overwrite)
        }
        if wrong and not_replaced is None:
            raise _foreign_file_error(
                [folder / place for place in new if place in wrong], overwrite
            )
        moved = {place: value for place, value in new.items() if place not in wrong}
        # List the old and the new checksum of each file until all files are moved. The process may
        # be killed in between.
        both = {place: f"{known.get(place, '')} {value}".strip() for place, value in moved.items()}
        _write_file_list(Path(name), folder, known | both)
        # Move config.json last. A killed process must not leave a new config.json with old weights.
        last = [place for place in moved if Path(place).name == _CONFIG]
        for place in last:
            (folder / place).unlink(missing_ok=True)
        for place in sorted(moved, key=last.count):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (new_files / place).replace(folder / place)
        _write_file_list(Path(name), folder, known | moved)
        if not_replaced is not None:
            not_replaced += [folder / place for place in new if place in wrong]


def _write_file_list(staging: Path, folder: Path, written: dict[str, str]) -> None:
    """Store the list of files that specbench wrote in a folder, with their SHA-256.

    The list is written into the temporary folder and then moved, so that it is never incomplete.
    """
    if written:
        listed = {"about": _ABOUT, "files": written}
        replace(staging / _LIST, json.dumps(listed, indent=1, sort_keys=True) + "\n")
        (staging / _LIST).replace(folder / FILE_LIST)


def _staging_prefix() -> str:
    """Return the prefix of this machine's temporary folder names. A process id follows the
    prefix.
    """
    return f".specbench-{sha256(platform.node().encode()).hexdigest()[:8]}-"


def _remove_stale_staging(folder: Path) -> None:
    """Remove temporary folders that killed processes of this machine left."""
    for left in folder.glob(f"{_staging_prefix()}*"):
        process = left.name.removeprefix(_staging_prefix()).partition("-")[0]
        if process.isdecimal() and _is_staging(left) and not _is_alive(int(process)):
            shutil.rmtree(left, ignore_errors=True)


def _is_staging(folder: Path) -> bool:
    """Return True if `staging_folder` created this folder, and no one added other files to it."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {each.name for each in folder.iterdir()}
    try:
        mark = read_own(folder / _MARK)
        # A process that was killed while it wrote this mark file has written no other files yet.
        empty = mark == b"" and not any((folder / _FILES).glob("*"))
        marked = mark == _ABOUT_STAGING.encode() or empty
    except UsageError:
        return False
    others = {name for name in names - {_MARK, _FILES, _LIST} if not _TEMPORARY.fullmatch(name)}
    return not names or (marked and not others)


def _is_alive(process: int) -> bool:
    """Return True if a process with this id exists, or if the id is too large to check."""
    import psutil

    try:
        return bool(psutil.pid_exists(process))
    except OverflowError:
        return True


def _read_file_list(folder: Path) -> dict[str, str]:
    """Return the files in `FILE_LIST` of a folder, each with its SHA-256.

    Raises:
        UsageError: specbench did not write the `FILE_LIST`.
    """
    file = folder / FILE_LIST
    content = read_own(file)
    if content is None:
        return {}
    try:
        listed = json.loads(content)
        if listed["about"] == _ABOUT:
            return {str(name): str(value) for name, value in listed["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise _foreign_file_error([file])


def _may_replace(folder: Path, place: str, hashes: set[str], overwrite: bool | None) -> bool:
    """Return True if a file may be written at a place in the folder.

    This is so if no file exists there, if its SHA-256 is in `hashes`, or if `overwrite` is true.
    """
    there = folder / place
    for parent in there.relative_to(folder).parents:
        above = folder / parent
        if above != folder and (above.is_symlink() or (above.exists() and not above.is_dir())):
            return False
    try:
        held = there.lstat()
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(held.st_mode):
        return False
    if overwrite:
        return True
    return stat.S_ISREG(held.st_mode) and _sha256(there) in hashes


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _link_error(path: Path) -> UsageError:
    return UsageError(
        f"{path} is a link, has a second hard link or is not a file: specbench writes only to its"
        " own files",
        "copy the folder, so that it contains the file itself, or choose another --out",
    )


def _foreign_file_error(paths: list[Path], overwrite: bool | None = False) -> UsageError:
    more = f", and {len(paths) - 1} more" if len(paths) > 1 else ""
    away = "choose another --out, move the file"
    return UsageError(
        f"{paths[0]}{more}: specbench did not write this file, or it was changed since",
        f"{away} or remove it" if overwrite is None else f"{away}, or replace it: {OVERWRITE}",
    )
