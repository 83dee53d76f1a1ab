"""A model's name to a checkpoint on disk: alias, hub id or local folder. Loads no weights."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.models.hub import cached_snapshot, download

HERE = Path(__file__).parent
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
INSTEAD = "or run what is shipped: specbench run --target embedded"


class Alias(BaseModel):
    """An entry of aliases.yaml; exactly one of `same_as`, `folder` and `hub` says where it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    same_as: str | None = None
    folder: str | None = None
    hub: str | None = None
    draft: str | None = None
    parameters: str | None = None
    download_gb: float | None = None
    dtype: str | None = None
    licence: str | None = None
    note: str | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Alias:
        if (self.same_as, self.folder, self.hub).count(None) != 2:
            raise ValueError("give exactly one of same_as, folder and hub")
        return self


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is on this machine.

    Attributes:
        name: as the user gave it.
        label: what may be printed and stored: the alias, the hub id, or the folder's own name.
        path: folder with config.json, *.safetensors and the tokenizer. Never stored.
        hub_id, revision: where it came from; the revision is a commit.
        draft: name of the customary draft model.
        dtype: the dtype it is published in, where it is known.
        embedded: whether it is one of the shipped models.
    """

    name: str
    label: str
    path: Path
    hub_id: str | None = None
    revision: str | None = None
    draft: str | None = None
    dtype: str | None = None
    embedded: bool = False


@cache
def aliases() -> dict[str, Alias]:
    """The entries of aliases.yaml."""
    entries = yaml.safe_load((HERE / "aliases.yaml").read_text(encoding="utf-8"))
    return {name: Alias.model_validate(entry) for name, entry in entries.items()}


def model_names() -> list[str]:
    """The short names, in the order of aliases.yaml."""
    return list(aliases())


def describe(name: str) -> dict[str, Any]:
    """An alias's facts and whether it is on this machine; downloads nothing.

    Raises:
        UsageError: not an alias.
    """
    label, alias = _alias(name)
    facts = {"name": name, **alias.model_dump(exclude_none=True)}
    if alias.folder:
        available = "shipped" if (HERE / alias.folder).is_dir() else "missing"
    else:
        available = "cached" if cached_snapshot(alias.hub or "") else "not downloaded"
    return {**facts, "available": available} | ({"same_as": label} if label != name else {})


def resolve(name: str) -> Checkpoint:
    """Find a checkpoint, downloading it from the hub if need be.

    An alias comes first, then a folder, then a hub id (`org/name`), first in the local hub cache.

    Raises:
        UsageError: an unknown short name, or a folder that holds no checkpoint.
        EnvironmentFault: not on this machine and not to be had from the hub.
    """
    if name in aliases():
        return _from_alias(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if missing := _missing(folder):
            raise UsageError(f"{name}: no {missing} in this folder", _needs(name))
        return Checkpoint(name=name, label=folder.resolve().name, path=folder)
    if HUB_ID.match(name):
        known = next((key for key, alias in aliases().items() if alias.hub == name), None)
        return _from_hub(name, name, name, aliases()[known] if known else Alias(hub=name))
    if "/" in name or name.startswith((".", "~")):
        raise UsageError(f"no such folder: {name}", "specbench list models")
    return _from_alias(name)


def _alias(name: str) -> tuple[str, Alias]:
    """The entry that a name stands for in the end, with that entry's own name."""
    known = aliases()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        raise UsageError(
            f"unknown model {name!r}" + (f", did you mean {near[0]!r}?" if near else ""),
            f"one of {', '.join(known)}, a hub id (org/name), or a folder",
        )
    same_as = known[name].same_as
    return _alias(same_as) if same_as else (name, known[name])


def _from_alias(name: str) -> Checkpoint:
    label, alias = _alias(name)
    if alias.hub:
        return _from_hub(name, label, alias.hub, alias)
    folder = HERE / (alias.folder or label)
    if missing := _missing(folder):
        raise EnvironmentFault(
            f"{name}: this installation has no {missing} of {label}",
            "reinstall specbench-cli, or train it: specbench train pair",
        )
    return Checkpoint(name, label, folder, draft=alias.draft, dtype=alias.dtype, embedded=True)


def _from_hub(name: str, label: str, hub_id: str, alias: Alias) -> Checkpoint:
    folder = cached_snapshot(hub_id)
    if folder is None:
        size = f"about {alias.download_gb:g} GB" if alias.download_gb else "size not known"
        folder = download(name, hub_id, size, INSTEAD)
    if missing := _missing(folder):
        raise EnvironmentFault(f"{hub_id}: no {missing} in what the hub has", _needs(hub_id))
    return Checkpoint(
        name=name,
        label=label,
        path=folder,
        hub_id=hub_id,
        revision=folder.name,
        draft=alias.draft,
        dtype=alias.dtype,
    )


def _missing(folder: Path) -> str | None:
    """The first thing that a checkpoint's folder lacks."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any(folder.glob("*.safetensors")):
        return "*.safetensors"
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return f"tokenizer ({', '.join(TOKENIZER_FILES)})"
    return None


def _needs(name: str) -> str:
    """What to do about a checkpoint in another format; pickled weights are never loaded here."""
    copy = Path(name).name + "-safetensors"
    return (
        "needed: config.json, *.safetensors and a tokenizer. To convert pickled weights once: "
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[c.from_pretrained('{name}').save_pretrained('{copy}') for c in (M, T)]\", "
        f"then give ./{copy}; {INSTEAD}"
    )
