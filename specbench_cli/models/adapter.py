"""Models that are stored as differences from a base model. They are merged at first use.

A LoRA adapter in PEFT's format is added to its base model: W becomes W + (alpha / r) B A (Hu et
al., ICLR 2022, arXiv:2106.09685; https://huggingface.co/docs/peft/developer_guides/checkpoint). A
draft model that was made from its target (`specbench train draft --layers`) is stored as its own
layers. It gets the target's embeddings and some rows of the target's output matrix. The cache
contains the merged model under the hashes of both parts. A merged adapter has the dtype of the base
model, and a draft model has the dtype of its layers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specbench_cli import files
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.files import cache_folder
from specbench_cli.tasks.source import create_once

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYERS, RECORD = "layers.safetensors", "alignment.json"
"""Layers of a draft, and the record of its training, which names the target."""
EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
SUPPORTED_CONFIG = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "target_parameters": (None, []),
    "use_qalora": (False,),
    "lora_bias": (False,),
}
"""Supported values of keys in adapter_config.json, if they are present."""
MAX_HEADER_BYTES = 100_000_000
"""Maximum size of a header in bytes, as in the safetensors library."""
MAX_SCALE = 1e6
"""Upper bound of the rank and alpha of an adapter."""

_FETCH = "download the folder again, or save the fine-tuning again with peft (save_pretrained)"

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

Array = NDArray[Any]


def is_adapter(folder: Path) -> bool:
    """Return True if a folder contains an adapter or only the layers of a draft model."""
    return (folder / CONFIG).is_file() or is_draft(folder)


def is_draft(folder: Path) -> bool:
    """Return True if a folder contains only the layers of a draft model."""
    return (folder / LAYERS).is_file()


def find_base_model(folder: Path) -> str:
    """Return the name of the base model of an adapter or of a draft model's layers.

    Raises:
        UsageError: the kind of adapter is not supported, or the files of a draft model do not name
            its target.
    """
    if is_draft(folder):
        try:
            target = json.loads(files.read_text(folder / RECORD, 16 * files.MB))["target"]
        except (OSError, ValueError, KeyError, TypeError):
            target = None
        if not isinstance(target, str) or Path(target) == folder:
            raise UsageError(
                f"{folder.name} has the layers of a draft ({LAYERS}), but no {RECORD} that names"
                " its target",
                f'create {RECORD} with {{"target": MODEL}}, the model that the draft was made from',
            )
        return target
    facts = _facts(folder)
    key = next(
        (key for key, known in SUPPORTED_CONFIG.items() if facts.get(key, known[0]) not in known),
        None,
    )
    if key is not None:
        raise UsageError(
            f"{folder.name}/{CONFIG} has {key} {facts[key]!r}; only plain LoRA adapters are"
            f" supported ({key} {SUPPORTED_CONFIG[key][0]!r})",
            "merge it with peft (merge_and_unload, save_pretrained), and use the merged folder",
        )
    base = facts.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"{folder.name}/{CONFIG} names no model (base_model_name_or_path is {base!r})",
            "set it to the hub id or the folder of the model that was fine-tuned",
        )
    return base


def _facts(folder: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Raises:
        UsageError: the file is invalid.
    """
    try:
        facts = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise UsageError(f"{folder.name}/{CONFIG} cannot be read: {fault}", _FETCH) from fault
    if not isinstance(facts, dict):
        raise UsageError(f"{folder.name}/{CONFIG} is not a JSON object", _FETCH)
    if not (folder / WEIGHTS).is_file():
        raise UsageError(f"{folder.name} has a {CONFIG} but no {WEIGHTS}", _FETCH)
    found: dict[str, Any] = facts
    return found


def merge_adapter(folder: Path, base: Path) -> Path:
    """Return the folder of the merged model. The first call creates it.

    Args:
        folder: folder of the adapter or of the draft model's layers.
        base: folder of the base model.

    Raises:
        UsageError: the adapter does not fit the matrices of the base model, or the width or
            vocabulary of a draft model's layers does not fit the base model.
        EnvironmentFault: the cache cannot be written.
    """
    layers = is_draft(folder)
    own_files = ("config.json", LAYERS) if layers else (CONFIG, WEIGHTS)
    names = [*(folder / name for name in own_files), *sorted(base.glob("*.safetensors"))]
    merged = cache_folder() / "merged" / _sha256(names)

    def write(part: Path) -> None:
        if layers:
            _complete_draft(folder, base, part)
            return
        shutil.copytree(base, part, ignore=_list_not_copied)
        _add_adapter(folder, part)

    try:
        return create_once(merged, write)
    except OSError as fault:
        raise EnvironmentFault(
            f"{folder.name} cannot be added to its model in the cache {merged.parent}:"
            f" {fault.strerror or fault}",
            "free space there, or set SPECBENCH_CACHE to a folder with room",
        ) from fault


def _list_not_copied(folder: str, names: list[str]) -> list[str]:
    """Return the names in a folder that are links or special files."""
    paths = {name: Path(folder) / name for name in names}
    return [
        name
        for name, path in paths.items()
        if not path.is_file() and (path.is_symlink() or not path.is_dir())
    ]


def _add_adapter(folder: Path, model: Path) -> None:
    """Add an adapter to the matrices in a model's files, in place."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    facts = _facts(folder)
    try:
        parts = load_file(folder / WEIGHTS)
    except SafetensorError as fault:
        raise UsageError(f"{folder.name}/{WEIGHTS} cannot be read: {fault}", _FETCH) from fault
    scale = _scale(folder, facts)
    remaining = {name.removesuffix(A).removeprefix(PREFIX) for name in parts if name.endswith(A)}
    _check_parts(folder, parts, remaining, facts["r"])
    for file in sorted(model.glob("*.safetensors")):
        entries = _entries(file)
        for at in sorted(remaining):
            entry = entries.get(f"{at}.weight")
            if entry is None:
                continue
            remaining.discard(at)
            b, a = (parts[PREFIX + at + end].astype(np.float64) for end in (B, A))
            if (len(b), a.shape[1]) != tuple(entry["shape"]) or entry["dtype"] not in DTYPES:
                raise UsageError(
                    f"{folder.name} has an update of shape {[len(b), a.shape[1]]} for {at}, which"
                    f" has shape {entry['shape']} and dtype {entry['dtype']}",
                    f"use the adapter with the model that it was trained for; {CONFIG} names"
                    " another one",
                )
            matrix = _map_matrix(file, entry, "r+")
            added = scale * (b @ a)
            matrix[:] = _round_to(_read(matrix) + added, DTYPES[entry["dtype"]])
            matrix.flush()
    if remaining:
        raise UsageError(
            f"{folder.name} has updates for {len(remaining)} matrices that the model does not"
            f" have, such as {min(remaining)}",
            f"use the adapter with the model that it was trained for; {CONFIG} names another one",
        )


def _scale(folder: Path, facts: dict[str, Any]) -> float:
    """Return the scale lora_alpha / r of an adapter.

    Raises:
        UsageError: a value is invalid.
    """
    alpha: Any = facts.get("lora_alpha")
    rank: Any = facts.get("r")
    for name, value in (("lora_alpha", alpha), ("r", rank)):
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not -MAX_SCALE < value < MAX_SCALE or (name == "r" and value < 1):
            least = "1" if name == "r" else f"-{MAX_SCALE:g}"
            raise UsageError(
                f"{folder.name}/{CONFIG} has {name} {value!r}; it must be a number from {least} to"
                f" {MAX_SCALE:g}",
                "get the config from the author of the adapter",
            )
    return float(alpha) / float(rank)


def _check_parts(folder: Path, parts: dict[str, Array], places: set[str], rank: int) -> None:
    """Check the tensors of an adapter: each updated matrix needs A and B of the configured rank.

    Raises:
        UsageError: a tensor is missing or unexpected, or has another rank.
    """
    pairs = {PREFIX + at + end for at in places for end in (A, B)}
    wrong = [f"has {name}, which is not a LoRA matrix" for name in sorted(parts.keys() - pairs)]
    wrong += [f"lacks {name}" for name in sorted(pairs - parts.keys())]
    wrong += [
        f"has {name} of rank {len(parts[name])}, and {CONFIG} says {rank}"
        for name in sorted(pairs & parts.keys())
        if name.endswith(A) and len(parts[name]) != rank
    ]
    if wrong:
        raise UsageError(
            f"{folder.name}/{WEIGHTS} {wrong[0]}",
            "merge it with peft (merge_and_unload, save_pretrained), and use the merged folder",
        )


def _complete_draft(folder: Path, base: Path, model: Path) -> None:
    """Write a complete draft model: its layers, and the target's embeddings and output matrix."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file, save_file

    try:
        tensors = load_file(folder / LAYERS)
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wanted = [facts["vocab_size"], facts["hidden_size"]]
        output_ids = np.arange(len(tensors["d2t"])) + tensors["d2t"]
    except (SafetensorError, ValueError, KeyError, TypeError) as fault:
        raise UsageError(
            f"{folder.name}: {LAYERS} and config.json are not of a draft with a cut output"
            f" ({fault})",
            "specbench train draft --layers 2 --vocabulary 8192 makes one",
        ) from fault
    shared = {
        name: (file, entry)
        for file in sorted(base.glob("*.safetensors"))
        for name, entry in _entries(file).items()
        if name in (EMBEDDINGS, OUTPUT)
    }
    for name, rows in ((EMBEDDINGS, slice(None)), (OUTPUT, output_ids)):
        file, entry = shared.get(name) or shared.get(EMBEDDINGS) or (base, {})  # tied output matrix
        if entry.get("shape") != wanted or entry["dtype"] not in DTYPES:
            raise UsageError(
                f"{folder.name}: its target's embeddings are {entry.get('shape', 'not there')},"
                f" and its layers are for {wanted}",
                f"it is not of the model that {RECORD} names",
            )
        tensors[name] = _read(_map_matrix(file, entry, "r")[rows]).astype(np.float16)
    model.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, model)
    shutil.copy(folder / "config.json", model)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def _entries(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file.

    Each entry contains the offset of the tensor's data.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(min(size, MAX_HEADER_BYTES)))
            return {name: {**entry, "from": 8 + size} for name, entry in header.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as fault:
            raise UsageError(
                f"{file.name} has no valid safetensors header: {fault}", _FETCH
            ) from fault


def _map_matrix(
    file: Path, entry: dict[str, Any], mode: Literal["r", "r+"]
) -> np.memmap[Any, np.dtype[Any]]:
    """Return a memory map of a matrix in a safetensors file."""
    place = entry["from"] + entry["data_offsets"][0]
    return np.memmap(file, DTYPES[entry["dtype"]], mode, place, tuple(entry["shape"]))


def _read(matrix: Array) -> Array:
    if matrix.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        matrix = (matrix.astype(np.uint32) << 16).view(np.float32)
    return matrix.astype(np.float64)


def _round_to(matrix: Array, kind: str) -> Array:
    if kind != DTYPES["BF16"]:
        return matrix.astype(kind)
    bits = matrix.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # round half to even


def _sha256(files: list[Path]) -> str:
    known = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            known.update(hashlib.file_digest(opened, "sha256").digest())
    return known.hexdigest()
