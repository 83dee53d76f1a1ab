"""Digests with which specbench detects that another program changed the files of a run.

The manifest of an unfinished run has a digest of each line. If a user deletes a line, its output is
measured again. If a line was changed, specbench raises an error. The manifest of a finished run has
one SHA-256 per file.
"""

from __future__ import annotations

from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

FOREIGN_LINE = "0" * 16
"""Digest that marks a line which another program wrote. No line really has this digest."""

FileSeal = dict[str, Any]
"""Size in bytes and SHA-256 of a finished file."""


def short_digest(value: object) -> str:
    """Return a digest with 16 hexadecimal digits, of a line or of the key of a record or prompt."""
    return blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def seal(path: Path) -> FileSeal | None:
    """Return the size and the SHA-256 of a file. Return None if the file does not exist."""
    try:
        with path.open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
            return {"bytes": file.tell(), "sha256": found}
    except (FileNotFoundError, IsADirectoryError):
        return None
