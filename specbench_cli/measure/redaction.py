"""Removal of private paths from settings and messages. Only the last part of each path is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench_cli.errors import truncate

_PATH = re.compile(r"(?<![\w.:/])~?/(?:[^\s/:;,'\"()]+/)+(?=[^\s/:;,'\"()])")


def redact_paths(text: str) -> str:
    """Return a text in which each absolute path is replaced by its last part."""
    return _PATH.sub("", text)


def redact_setting(value: Any) -> Any:
    """Return a setting in which each path is replaced by its last part.

    The setting may be nested in lists and dicts.
    """
    if isinstance(value, Mapping):
        return {key: redact_setting(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact_setting(part) for part in value]
    if isinstance(value, str):  # it may contain several paths, separated by commas
        parts = truncate(value).split(",")
        return ",".join(Path(part).name if _is_path(part) else part for part in parts)
    return value


def _is_path(text: str) -> bool:
    try:
        path = Path(text).expanduser()
        return path.is_absolute() or (len(path.parts) > 1 and path.is_dir())
    except (OSError, RuntimeError):  # the path is too long, or the home folder is unknown
        return False
