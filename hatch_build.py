"""Description of the package on PyPI: README with links that work outside of the repository."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "SPECBENCH_REPOSITORY"
"""Environment variable with the address of the repository, for builds that are published."""
_LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Metadata hook of hatchling that makes the description from README."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description of the package."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        version = re.search(
            r'__version__ = "(.+)"', (Path(self.root) / "specbench_cli/__init__.py").read_text()
        )
        assert version is not None
        repository = os.environ.get(REPOSITORY, "")
        described = description(text, repository, f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": described}


def description(readme: str, repository: str, tag: str) -> str:
    """Return README with absolute links to the files at a tag of the repository.

    Without a repository, links become their text, and pictures are left out.
    """

    def absolute(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        if not repository:
            return "" if image else words
        way = "raw" if image else "blob"
        return f"{image}[{words}]({posixpath.join(repository, way, tag, target)})"

    return _LINK.sub(absolute, readme)
