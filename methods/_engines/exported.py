"""Files that an engine reads in place of a module of transformers': made at first use, gone with
the module or at the program's end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, finalize

_folders: WeakKeyDictionary[Any, dict[Hashable, Path]] = WeakKeyDictionary()


def folder_of(module: Any, kind: Hashable, write: Callable[[Path], None]) -> Path:
    """The folder of a module's files.

    Args:
        kind: which files; the same module may have several.
        write: makes them, in an empty folder.
    """
    made = _folders.setdefault(module, {})
    if kind not in made:
        folder = Path(tempfile.mkdtemp(prefix="specbench-engine-"))
        finalize(module, shutil.rmtree, folder, ignore_errors=True)
        write(folder)
        made[kind] = folder
    return made[kind]
