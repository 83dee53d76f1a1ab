"""Reader of checkpoint folders in the format of transformers: config.json and safetensors files."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor

from specbench_cli.errors import (
    EnvironmentFault,
    SpecbenchError,
    UsageError,
    is_library_error,
    reason_of,
)
from specbench_cli.files import check_model_folder

_CHUNK = 1 << 24
_MAX_HEADER_BYTES = 100_000_000
"""Maximum header size in bytes, as in the safetensors library."""
_RANDOM_BLOCK, _INIT_STD = 1 << 20, 0.02
"""Numbers drawn per random tensor, and their standard deviation (the transformers default)."""

_LAYERS = re.compile(r"(num_.*|n_|.*_)layers?")
_MAX_LAYERS = 10_000
"""Maximum layer count of a config.

transformers builds a list of that length before it builds the model."""

PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes of transformers that need only tokenizer.json."""

OUTPUT_ID_TENSORS = ("d2t", "t2d")
"""Tensors that map the rows of an output matrix to token ids: see `read_output_ids`."""


class Weights(Mapping[str, Tensor]):
    """Tensors of a checkpoint folder by name. Each access reads from disk, without a cache.

    Args:
        folder: Folder with one of these: model.safetensors; shards that are listed in
            model.safetensors.index.json; or one safetensors file of another name.

    Raises:
        EnvironmentFault: The folder has no safetensors file, a listed shard is missing, or the
            folder has two sets of weights.
    """

    def __init__(self, folder: Path) -> None:
        check_model_folder(folder)
        self.files = _weight_files(folder)
        self._file_of: dict[str, Path] = {}
        self._headers: dict[str, dict[str, Any]] = {}
        for path in self.files:
            for name, header in _read_header(path).items():
                if name in self._file_of:
                    raise EnvironmentFault(
                        f"{folder.name} holds the tensor {name} twice: in"
                        f" {self._file_of[name].name} and in {path.name}",
                        hint="delete the file that does not belong to these weights",
                    )
                self._file_of[name], self._headers[name] = path, header
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._headers[name]["shape"])

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor under its safetensors name, e.g. "F16"."""
        return str(self._headers[name]["dtype"])

    def size(self, name: str) -> int:
        """Return the number of elements of a tensor."""
        return prod(self.shape(name))

    @cached_property
    def parameters(self) -> int:
        """Number of stored parameters. The tensors in `OUTPUT_ID_TENSORS` do not count."""
        return sum(self.size(name) for name in self if name not in OUTPUT_ID_TENSORS)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Safetensors dtypes of the stored parameters, e.g. "F16"."""
        kinds = {
            header["dtype"]
            for name, header in self._headers.items()
            if name not in OUTPUT_ID_TENSORS
        }
        return tuple(sorted(kinds))

    def check_names(self, known: Collection[str], hint: str) -> None:
        """Raise EnvironmentFault if the folder has a tensor whose name is not in `known`."""
        if odd := sorted(name for name in self if name not in known):
            raise EnvironmentFault(
                f"{self.files[0].parent.name} holds the tensor {odd[0]}, which nothing reads"
                f" ({len(odd)} such)",
                hint,
            )

    def check_layers(self, config: Any) -> None:
        """Raise EnvironmentFault if the config names more layers than the folder has tensors."""
        count, kinds = layer_count(config), getattr(config, "layer_types", None)
        if not 1 <= count <= max(len(self), 1) or (kinds is not None and len(kinds) != count):
            raise EnvironmentFault(
                f"{self.files[0].parent.name}/config.json: {count} layers cannot be: there are"
                f" {len(self)} tensors"
                + ("" if kinds is None else f", and {len(kinds)} kinds of layers are listed"),
                hint="specbench list models",
            )

    def sha256(self) -> str:
        """Return the SHA-256 hash of the weight files, in the order of their names."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        return digest.hexdigest()


class RandomWeights(Weights):
    """Random tensors for a model shape, which is a folder with only a config.json.

    The config has the key `specbench`, so that no other folder is taken for a shape.

    The tensor shapes come from the transformers module of the config. Each access draws the same
    numbers. A tensor repeats one block of normal random numbers, because costs do not depend on the
    values. Norm weights are ones.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.files = [folder / "config.json"]
        config = read_config(folder)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        self._headers = {
            name: {"shape": tuple(part.shape), "dtype": "drawn"}
            for name, part in module.state_dict().items()
            if name not in tied
        }
        self._file_of = dict.fromkeys(self._headers, self.files[0])

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        size = prod(shape)
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        block = torch.randn(min(size, _RANDOM_BLOCK), generator=generator) * _INIT_STD
        return block.repeat(-(-size // len(block)))[:size].view(shape)


def open_weights(folder: Path) -> Weights:
    """Return the weights of a folder. If it only describes a model shape, the weights are random.

    Raises:
        EnvironmentFault: The folder has no weights, incomplete weights, or two sets of weights.
    """
    check_model_folder(folder)
    return RandomWeights(folder) if is_shape(folder) else Weights(folder)


def is_shape(folder: Path) -> bool:
    """Return True if a folder's config.json describes a model shape without weights."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    own = values.get("specbench") if isinstance(values, dict) else None
    return isinstance(own, dict) and "shape" in own


def read_output_ids(tensors: Mapping[str, Tensor], size: int, source: str) -> Tensor | None:
    """Return the token id [r] of each row of an output matrix, or None if it has all ids in order.

    EAGLE-3 checkpoints store the ids in two forms (Li et al., arXiv:2503.01840). `d2t` is the
    offset of each id from its row number. `t2d` is a mask of the ids that have a row.

    Args:
        tensors: Tensors of a checkpoint. If they lack `lm_head.weight`, the head uses the output
            matrix of another model.
        size: Vocabulary size.
        source: Name of the checkpoint in messages.

    Raises:
        EnvironmentFault: The ids are outside the vocabulary, `d2t` and `t2d` disagree, or the
            number of ids differs from the number of matrix rows.
    """
    offsets, mask = (tensors.get(name) for name in OUTPUT_ID_TENSORS)
    if offsets is None and mask is None:
        return None
    matrix = tensors.get("lm_head.weight")
    if offsets is None:
        assert mask is not None
        ids = mask.flatten().nonzero()[:, 0]
    else:
        ids = torch.arange(offsets.numel()) + offsets.flatten().to(torch.int64)
    rows = len(ids) if matrix is None else len(matrix)
    known = bool(((ids >= 0) & (ids < size)).all()) and len(ids.unique()) == len(ids) > 0
    if not known or rows != len(ids):
        raise EnvironmentFault(
            f"{source}: d2t names {len(ids)} ids up to {max(ids.tolist(), default=0)}, the output"
            f" matrix has {rows} rows, the target {size} ids",
            "specbench list models",
        )
    if mask is not None and not torch.equal(mask.flatten().nonzero()[:, 0], ids.sort().values):
        raise EnvironmentFault(f"{source}: d2t and t2d name different ids", "specbench list models")
    return None if torch.equal(ids, torch.arange(size)) else ids


def output_id_tensors(ids: Tensor, size: int) -> dict[str, Tensor]:
    """Return the tensors that store output ids [r], in the form that `read_output_ids` reads."""
    mask = torch.zeros(size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Facts about a checkpoint that are available before it is loaded.

    Attributes:
        eos: End-of-text ids, from generation_config.json or else from config.json.
        parameters: Number of stored parameters. Tied parameters count once.
        dtype: Dtypes on disk, joined by "+".
        sha256: Hash of the weight files.
    """

    family: str
    vocab_size: int
    n_layers: int
    hidden_size: int
    max_positions: int
    eos: frozenset[int]
    parameters: int
    dtype: str
    sha256: str


_POSITIVE_INTS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""Keys of a Llama's config.json that must be positive integers."""
_ROPE_KEYS = {"rope_type", "rope_theta"}
_INCOMPLETE_KEYS = {
    "auto_map",
    "layer_types",
    "partial_rotary_factor",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
}
"""Keys of older files, and of models that need more than a `CompleteConfig`."""


class CompleteConfig(SimpleNamespace):
    """The config.json of a Llama model, if it contains every value that a decoder reads."""

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self | None:
        """Return the config, or None if only transformers can read it.

        Other model families, other RoPE variants and older files rely on the defaults, checks or
        key names of transformers.
        """
        rope = values.get("rope_parameters")
        whole = (
            values.get("model_type") == "llama"
            and all(type(values.get(name)) is int and values[name] > 0 for name in _POSITIVE_INTS)
            and values["hidden_size"] % values["num_attention_heads"] == 0
            and type(d := values.get("head_dim", 1)) is int
            and d > 0
            and values.get("hidden_act") == "silu"
            and type(values.get("rms_norm_eps")) is float
            and type(values.get("tie_word_embeddings")) is bool
            and "eos_token_id" in values
            and values.keys().isdisjoint(_INCOMPLETE_KEYS)
            and isinstance(rope, dict)
            and rope.keys() == _ROPE_KEYS
            and rope["rope_type"] == "default"
            and type(rope["rope_theta"]) is float
        )
        return cls(**values) if whole else None


def read_decoder_config(folder: Path) -> Any:
    """Return the part of a folder's config that a decoder reads.

    If config.json is complete, the function reads it without transformers, because importing
    transformers takes more than a second. Otherwise it calls `read_config`.
    """
    check_model_folder(folder)
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        whole = CompleteConfig.from_values(values)
    except (OSError, ValueError, AttributeError, RecursionError):
        return read_config(folder)  # raises the specific error
    if whole is None:
        return read_config(folder)
    _check_counts(folder, values)
    _check_kernels(folder, values)
    return whole


def read_config(folder: Path) -> Any:
    """Return the transformers config of a folder.

    Raises:
        EnvironmentFault: The folder has no config, transformers does not know the model family, or
            the config has too many layers.
    """
    from transformers import AutoConfig

    file = folder / "config.json"
    check_model_folder(folder)
    if not file.is_file():
        raise EnvironmentFault(
            f"{folder} is no model folder: it has no config.json",
            hint="specbench list models",
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        _check_counts(folder, values)
        _check_kernels(folder, values)
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except SpecbenchError:
        raise
    except Exception as error:  # transformers raises any exception for a bad config
        raise EnvironmentFault(
            f"transformers cannot read {file}: {error}",
            hint="pip install --upgrade transformers",
        ) from error


def disable_progress_bars() -> None:
    """Turn off the progress bars of transformers, which would mix with specbench's output."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def read_tokenizer(folder: Path, label: str | None = None) -> Any:
    """Load the transformers tokenizer of a folder.

    Args:
        label: Name of the model in messages. None uses the folder name.

    Raises:
        EnvironmentFault: The folder has no tokenizer, or its files are damaged.
    """
    import transformers as hub

    check_model_folder(folder)
    # AutoTokenizer takes more than a second to import. Use it only if the tokenizer needs another
    # class.
    kind: Any = hub.PreTrainedTokenizerFast if _is_plain(folder) else hub.AutoTokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as fault:  # these libraries raise any exception for damaged files
        if not is_library_error(fault):
            raise
        raise EnvironmentFault(
            f"the tokenizer of {label or folder.name} does not load: {reason_of(fault)}",
            hint="put the tokenizer files of the model into the folder of its weights",
        ) from fault


def _is_plain(folder: Path) -> bool:
    """Return True if the folder's tokenizer can be loaded from tokenizer.json alone."""
    try:
        values = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        plain = values["tokenizer_class"] in PLAIN_TOKENIZERS and "auto_map" not in values
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return plain and (folder / "tokenizer.json").is_file()


def max_positions(config: Any) -> int:
    """Return the maximum context length in tokens.

    Return sys.maxsize if the model family sets no limit.
    """
    most = int(getattr(config, "max_position_embeddings", sys.maxsize))
    fixed = rotary_limit(config)
    return most if fixed is None else min(most, fixed.positions)


@dataclass(frozen=True, slots=True)
class RotaryLimit:
    """Context length up to which RoPE frequencies do not depend on the length of the text.

    Attributes:
        kind: Name of the RoPE scaling in transformers.
        positions: The context length, in positions.
    """

    kind: str
    positions: int


def rotary_limit(config: Any) -> RotaryLimit | None:
    """Return the context length beyond which RoPE frequencies change. None if they never change.

    Beyond this length, all cached keys would have to be recomputed. A draft that crosses it would
    change the tokens before the draft.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    found = [
        RotaryLimit(kind, int(each["original_max_position_embeddings"]))
        if kind == "longrope"
        else RotaryLimit(kind, int(config.max_position_embeddings))
        for each in (rope, *rope.values())  # some families have parameters per layer type
        if isinstance(each, dict)
        and isinstance(kind := each.get("rope_type"), str)
        and (kind == "longrope" or "dynamic" in kind)
    ]
    return min(found, key=lambda each: each.positions, default=None)


def text_config(config: Any) -> Any:
    """Return the config of a multimodal model's text decoder. For other models, return the config
    itself.
    """
    return config if isinstance(config, CompleteConfig) else config.get_text_config(decoder=True)


def layer_count(config: Any) -> int:
    """Return the number of layers of the text decoder."""
    return int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)


def read_checkpoint_facts(folder: Path) -> CheckpointFacts:
    """Return the facts about a checkpoint for the run's manifest.

    The function reads all weights once, to compute their hash.

    Raises:
        EnvironmentFault: The folder is not a model folder, or it has no safetensors file.
    """
    config = read_decoder_config(folder)
    text = text_config(config)
    for key in ("vocab_size", "hidden_size"):
        value = getattr(text, key, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EnvironmentFault(
                f"{folder.name}/config.json: {key} must be a whole number from 1, got {value!r}",
                hint="specbench list models",
            )
    _check_special(folder, text)
    weights = open_weights(folder)
    weights.check_layers(text)
    return CheckpointFacts(
        family=config.model_type,
        vocab_size=text.vocab_size,
        n_layers=layer_count(text),
        hidden_size=text.hidden_size,
        max_positions=max_positions(text),
        eos=_read_eos_ids(folder, config),
        parameters=weights.parameters,
        dtype="+".join(weights.dtypes),
        sha256=weights.sha256(),
    )


def _check_kernels(folder: Path, values: Any) -> None:
    """Raise UsageError if a config names a repository of kernels, at any nesting depth.

    transformers would download the repository and run its code without confirmation (package
    `kernels`).
    """
    if isinstance(values, list):
        for value in values:
            _check_kernels(folder, value)
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        if key.endswith("_implementation"):
            names = value.values() if isinstance(value, dict) else [value]
            repository = next((n for n in names if isinstance(n, str) and "/" in n), None)
            if repository is not None:
                raise UsageError(
                    f"{folder / 'config.json'}: {key} is {repository!r}, a repository whose code"
                    " transformers would download and run",
                    f"remove {key} from that file: the model is then computed by built-in code",
                )
        _check_kernels(folder, value)


def _check_counts(folder: Path, values: Any) -> None:
    """Raise EnvironmentFault if a config has a layer count above the maximum, at any
    nesting depth."""
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            _check_counts(folder, value)
        elif isinstance(value, int) and value > _MAX_LAYERS and _LAYERS.fullmatch(key):
            raise EnvironmentFault(
                f"{folder.name}/config.json: {key} is above {_MAX_LAYERS}; no model has so many",
                hint="specbench list models",
            )


def _check_special(folder: Path, text: Any) -> None:
    """Raise EnvironmentFault for special token ids with which transformers cannot
    build the model."""
    width = text.vocab_size
    for key in ("bos_token_id", "pad_token_id"):
        value = getattr(text, key, None)
        whole = isinstance(value, int) and not isinstance(value, bool)
        # The padding token's id is a row number of the embedding. Older Llamas use -1, the last
        # row.
        if value is None or (whole and (key != "pad_token_id" or -width <= value < width)):
            continue
        raise EnvironmentFault(
            f"{folder.name}/config.json: {key} {value!r} is no token of {width}",
            hint="correct it in config.json",
        )


def _read_eos_ids(folder: Path, config: Any) -> frozenset[int]:
    generation = folder / "generation_config.json"
    try:
        values = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
        ids = values.get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as fault:
        raise _damaged_fault(generation, "it is no JSON object") from fault
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        ids = getattr(text_config(config), "eos_token_id", None)
    if ids is None:
        return frozenset()
    found = ids if isinstance(ids, list) else [ids]
    width = text_config(config).vocab_size
    for each in found:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < width:
            raise EnvironmentFault(
                f"{folder.name}: eos_token_id {each!r} is no token of {width}",
                hint="correct it in generation_config.json or config.json",
            )
    return frozenset(found)


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    files = sorted(folder / name for name in _shard_names(index)) if index.is_file() else [single]
    if single.is_file() and single not in files:
        # With two sets of weights, transformers would read the first set and vLLM the second.
        raise EnvironmentFault(
            f"{folder.name} holds two sets of weights: {single.name}, and"
            f" {', '.join(path.name for path in files[:2])}{', ...' if len(files) > 2 else ''} of"
            f" {index.name}",
            hint="delete the set that config.json does not belong to",
        )
    missing = [path.name for path in files if not path.is_file()]
    if missing and not index.is_file() and len(named := [*folder.glob("*.safetensors")]) == 1:
        return named  # head checkpoints have their own file names: medusa_lm_head.safetensors
    if not missing:
        return files
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if heads := sorted(path.name for path in folder.glob("*_lm_head.pt")):
        raise pickle_fault(folder, heads[0])
    if pickles:
        raise EnvironmentFault(
            f"{folder} has its weights as {pickles[0]}, a pickle; only safetensors are read",
            hint="convert once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    raise EnvironmentFault(
        f"{folder} lacks {', '.join(missing)}",
        hint="needed: a folder with config.json and *.safetensors; specbench list models",
    )


def pickle_fault(folder: Path, file: str) -> EnvironmentFault:
    """Return the error for a draft head whose weights are a pickle file."""
    return EnvironmentFault(
        f"{folder} has its weights as {file}, a pickle; only safetensors are read",
        f"specbench train convert {folder} --out DIR --unpickle",
    )


def _shard_names(index: Path) -> set[str]:
    """Return the file names that an index file lists. Raise if a file is outside the index's
    folder.
    """
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = sorted(name for name in names if Path(name).name != name or "\0" in name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
        raise _damaged_fault(index, "it has no weight_map of tensors to files") from fault
    if outside:
        raise _damaged_fault(index, f"{outside[0]!r} is no file of this folder")
    return names


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the header of a safetensors file. The file begins with the header's length in 8 bytes,
    then the header as JSON.

    Raises:
        EnvironmentFault: The file has no header, or it ends before the end of its last tensor.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(path.stat().st_size, _MAX_HEADER_BYTES):
                raise ValueError("a header longer than the file or than safetensors allows")
            header: dict[str, dict[str, Any]] = json.loads(file.read(length).decode())
        header.pop("__metadata__", None)
        ends = [each["data_offsets"][1] for each in header.values()]
        due = 8 + length + max(ends, default=0)
        for each in header.values():
            shape, dtype, (first, end) = each["shape"], each["dtype"], each["data_offsets"]
            numbers = prod(shape, start=1)  # each takes at least one bit
            right = first >= 0 and 0 <= numbers <= 8 * (end - first)
            if not isinstance(dtype, str) or not right:
                raise ValueError("a tensor that cannot be")
    except (
        *(struct.error, ValueError, TypeError, LookupError, AttributeError),
        *(MemoryError, OverflowError, RecursionError),
    ) as fault:
        raise _damaged_fault(path, "it has no header of safetensors") from fault
    if path.stat().st_size != due:
        raise _damaged_fault(path, f"it has {path.stat().st_size} bytes of {due}")
    return header


def _damaged_fault(path: Path, what: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path.parent.name}/{path.name} is damaged: {what}", "download or copy it once more"
    )
