"""Removal of private paths from settings and messages: a folder's name stays, its path does not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench_cli.errors import truncate

_PATH = re.compile(r"(?<![\w.:/])~?/(?:[^\s/:;,'\"()]+/)+(?=[^\s/:;,'\"()])")


def redact_paths(text: str) -> str:
    """Return a text with the last name in place of each path from the root or the home folder."""
    return _PATH.sub("", text)


def redact_setting(value: Any) -> Any:
    """Return a setting, however nested, with names in place of paths."""
    if isinstance(value, Mapping):
        return {key: redact_setting(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact_setting(part) for part in value]
    if isinstance(value, str):  # it may be a list of several paths
        parts = truncate(value).split(",")
        return ",".join(Path(part).name if _is_path(part) else part for part in parts)
    return value


def _is_path(text: str) -> bool:
    try:
        path = Path(text).expanduser()
        return path.is_absolute() or (len(path.parts) > 1 and path.is_dir())
    except (OSError, RuntimeError):  # the name is too long, or the home directory is unknown
        return False
