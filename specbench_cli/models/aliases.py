"""Entries of aliases.yaml, which describe known checkpoints.

Some checkpoints are not downloaded yet.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

HERE = Path(__file__).parent
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number by dtype."""

UNITS = {"B": 1e9, "M": 1e6}


class Alias(BaseModel):
    """Entry of aliases.yaml. Exactly one of `same_as`, `folder` and `hub` locates the checkpoint.

    The top of aliases.yaml explains the fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    same_as: str | None = None
    folder: str | None = None
    hub: str | None = None
    revision: str | None = None
    package: str | None = None
    file: str | None = None
    draft: str | None = None
    heads: dict[str, str] = {}
    parameters: str | None = Field(None, pattern=r"^\d+(\.\d+)?[BM]$")
    download_gb: float | None = None
    dtype: str | None = None
    template: str | None = None
    licence: str | None = None
    gated: bool = False
    note: str | None = None
    cite: str | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Alias:
        if (self.same_as, self.folder, self.hub).count(None) != 2:
            raise ValueError("give exactly one of same_as, folder and hub")
        if (self.package is None) != (self.file is None):
            raise ValueError("a package comes with the file in it, and a file with its package")
        return self

    @property
    def installed_file(self) -> Path | None:
        """Weights file in an installed package, or None."""
        if self.file is None:
            return None
        module, _, name = self.file.partition("/")
        spec = find_spec(module)  # not imported, because dependencies of the package may be missing
        places = (spec.submodule_search_locations if spec else None) or ()
        return next((path for place in places if (path := Path(place) / name).is_file()), None)

    @property
    def download_size_gb(self) -> float | None:
        """Download size in GB. None if nothing is downloaded or the size is unknown."""
        if self.download_gb or not self.hub:
            return self.download_gb
        return self._gb(self.dtype or "")

    @property
    def memory_gb(self) -> dict[str, float] | None:
        """Size of the weights in GB. The key is the dtype."""
        sizes = {dtype: self._gb(dtype) for dtype in ("float32", "bfloat16")}
        return {dtype: size for dtype, size in sizes.items() if size is not None} or None

    def template_text(self) -> str | None:
        """Return the chat template, for a tokenizer that contains none.

        None if no template is needed.
        """
        if self.template is None:
            return None
        return (HERE / "templates" / f"{self.template}.jinja").read_text(encoding="utf-8").rstrip()

    def _gb(self, dtype: str) -> float | None:
        if not self.parameters or dtype not in BYTES:
            return None
        numbers = float(self.parameters[:-1]) * UNITS[self.parameters[-1]]
        return _rounded(numbers * BYTES[dtype] / 1e9)


@cache
def aliases() -> dict[str, Alias]:
    """Return the entries of aliases.yaml in the order of the file. The key is the short name."""
    entries = yaml.safe_load((HERE / "aliases.yaml").read_text(encoding="utf-8"))
    return {name: Alias.model_validate(entry) for name, entry in entries.items()}


def find_alias(hub_id: str) -> Alias | None:
    """Return the entry of aliases.yaml with a hub id, or None."""
    return next((alias for alias in aliases().values() if alias.hub == hub_id), None)


def _rounded(size: float) -> float:
    """Round a size in GB to three significant digits, and at most five decimals."""
    return round(size, max(0, min(5, 2 - math.floor(math.log10(size)))))
