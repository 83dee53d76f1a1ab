"""Conversion of GGUF files (llama.cpp's format) to dequantised checkpoints in transformers' format.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The cache contains the result
under the file's SHA-256, so later and parallel runs use the same folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_cli.errors import (
    EnvironmentFault,
    SpecbenchError,
    UsageError,
    is_library_error,
    reason_of,
)
from specbench_cli.files import cache_folder
from specbench_cli.models.gguf_tokenizer import tokenizer_files
from specbench_cli.tasks.source import create_once

SUFFIX = ".gguf"
FORMAT = 1
"""Version of the conversion. Folders of other versions are not used."""

SHARD = 1 << 31
"""Size in bytes after which a new file of weights starts."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary scaling of all Llama 3 checkpoints. A GGUF file contains only the resulting factors
(`rope_freqs`), whose maximum is the scaling factor."""

EOS_KINDS = ("eos", "eot", "eom")
"""Kinds of tokens in the metadata that end a text."""

Array = NDArray[Any]
Facts = Mapping[str, Any]

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEADS_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {  # Gemma 2 and 3: norms before and after both parts of a layer
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI2 = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCKS = {
    "llama": _BLOCK,
    "qwen2": _BLOCK,
    "qwen3": {**_BLOCK, **_HEADS_NORM},
    "gemma": _BLOCK,
    "gemma2": _SANDWICH,
    "gemma3": {**_SANDWICH, **_HEADS_NORM},
    "phi2": _PHI2,
    "phi3": _PHI3,
}
"""Names of a layer's tensors in GGUF and in transformers, by architecture."""


def is_gguf(path: Path) -> bool:
    """Return True if the file extension or the first bytes show that a path is a GGUF file."""
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def convert_gguf(path: Path) -> Path:
    """Return a folder with the converted model: config.json, safetensors and tokenizer.

    The first call converts the GGUF file.

    Values do not change: quantised tensors become float32, and float16 stays float16.

    Raises:
        UsageError: the architecture, quantisation or tokenizer is not supported.
        EnvironmentFault: the file is damaged, or the cache cannot be written.
    """
    folder = cache_folder() / "gguf" / f"v{FORMAT}" / _sha256(path)

    def write(part: Path) -> None:
        part.mkdir()
        try:
            _write(path, part)
        except (SpecbenchError, OSError):
            raise
        except BaseException as fault:  # invalid values make the libraries raise any exception
            if not is_library_error(fault):
                raise
            raise EnvironmentFault(
                f"{path.name} is damaged and cannot be converted: {reason_of(fault)}",
                "download it again",
            ) from fault

    try:
        return create_once(folder, write)
    except OSError as fault:
        raise EnvironmentFault(
            f"{path.name} cannot be dequantised into the cache {folder.parent}:"
            f" {fault.strerror or fault}",
            "free space there, or set SPECBENCH_CACHE to a folder with room",
        ) from fault


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        raise UsageError(
            f"{path} cannot be read: {fault.strerror or fault}", "specbench list models"
        ) from fault


def _write(path: Path, folder: Path) -> None:
    """Write the converted model to a folder.

    Raises:
        OSError: a file cannot be written.
        UsageError: the architecture, quantisation or tokenizer is not supported.
        EnvironmentFault: the GGUF file is damaged.
    """
    reader = _open_reader(path)
    try:
        facts = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, LookupError, TypeError) as fault:
        raise EnvironmentFault(
            f"{path.name} is damaged: its metadata cannot be read, {fault}", "download it again"
        ) from fault
    model = _GgufModel(path.name, facts, {tensor.name: tensor for tensor in reader.tensors})
    free, needed = shutil.disk_usage(folder).free, model.nbytes
    if free < needed:
        raise OSError(f"{needed / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB are free")
    files: dict[str, Any] = {"config.json": model.config, **tokenizer_files(path.name, facts)}
    files["generation_config.json"] = {
        key: value for key, value in model.special.items() if value is not None
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    _save(model.tensors(), folder)


def _save(tensors: Iterator[tuple[str, Array]], folder: Path) -> None:
    """Write tensors as safetensors. A new file begins after every `SHARD` bytes.

    Raises:
        OSError: a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    at: dict[str, str] = {}
    shard: dict[str, Array] = {}
    shards: list[str] = []

    def flush() -> None:
        shards.append(f"model-{len(shards) + 1:05}.safetensors")
        try:
            save_file(shard, folder / shards[-1], metadata={"format": "pt"})
        except SafetensorError as fault:  # it wraps errors of the system
            raise OSError(str(fault)) from fault
        at.update(dict.fromkeys(shard, shards[-1]))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = np.ascontiguousarray(tensor)
        if sum(each.nbytes for each in shard.values()) >= SHARD:
            flush()
    if shard:
        flush()
    if len(shards) == 1:
        (folder / shards[0]).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": at}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _open_reader(path: Path) -> Any:
    """Open a file with the gguf library's reader.

    Raises:
        UsageError: the library does not know the quantisation.
        EnvironmentFault: the file is damaged.
    """
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """GGUF reader that raises an error at the end of the file.

        The library's reader returns empty arrays.
        """

        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **more: Any) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends before what its header announces")
            return super()._get(int(offset), dtype, int(count), *args, **more)

    try:
        return Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        says = str(error.args[0]) if error.args else type(error).__name__
        if "GGMLQuantizationType" in says:
            code = re.findall(r"\d+", says)[-1]  # "np.uint32(777) is not a valid ..."
            raise UsageError(
                f"{path.name} holds tensors of the quantisation type {code}, which is unknown",
                "pip install --upgrade gguf, or take the model in another quantisation (Q4_K_M,"
                " Q8_0, F16)",
            ) from error
        raise EnvironmentFault(
            f"{path.name} is damaged or no GGUF file: {says}", "download it again"
        ) from error


class _GgufModel:
    """Model of a GGUF file in transformers' format.

    Args:
        name: name of the file for messages.
        facts: metadata of the file.
        stored: tensors by name, as read by the gguf library.

    Raises:
        UsageError: the kind of model is not supported.
        EnvironmentFault: required metadata or tensors are missing.
    """

    def __init__(self, name: str, facts: Facts, stored: Mapping[str, Any]) -> None:
        self._name, self._facts, self._stored = name, facts, stored
        self.architecture = str(facts.get("general.architecture", "none"))
        if self.architecture not in BLOCKS or self._get_value("expert_count", 0):
            kind = self.architecture + (" with experts" if self.architecture in BLOCKS else "")
            raise UsageError(
                f"{name}: GGUF files of the architecture {kind} are not supported; supported are"
                f" {', '.join(BLOCKS)}",
                "give transformers' folder of the model (config.json and safetensors), or its hub"
                " id",
            )
        self._layers = int(self._get_value("block_count"))
        if self._layers > len(stored):
            raise EnvironmentFault(
                f"{name} is damaged: its metadata say {self._layers} blocks, and it holds"
                f" {len(stored)} tensors",
                "download it again",
            )
        self._hidden = int(self._get_value("embedding_length"))
        self._heads = int(self._get_value("attention.head_count"))
        self._kv_heads = int(self._get_value("attention.head_count_kv", self._heads))
        self._rotated = self._get_value("rope.dimension_count", self._hidden // self._heads)
        self._head_dim = int(
            self._get_value(
                "attention.key_length",
                self._hidden // self._heads if self.architecture == "phi2" else self._rotated,
            )
        )
        self.special = self._special()
        self.config = self._config()
        self._names = self._all_names()

    @property
    def nbytes(self) -> int:
        """Size of the converted weights in bytes."""
        return sum(
            tensor.n_elements * (2 if tensor.tensor_type.name == "F16" else 4)
            for name, tensor in self._stored.items()
            if name in self._names
        )

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Yield each weight as (transformers' name, array [out, in]), in float16 or float32.

        Raises:
            UsageError: the gguf library cannot read the quantisation.
            EnvironmentFault: a tensor has a wrong shape or numbers that are not finite.
        """
        for name, theirs in self._names.items():
            weight = self._numbers(name)
            if not np.isfinite(weight).all():
                raise EnvironmentFault(
                    f"{self._name} is damaged: {name} holds numbers that are not finite",
                    "download it again",
                )
            if self.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
                if weight.shape[0] % (2 * max(1, self._head_dim // 2)):
                    raise EnvironmentFault(
                        f"{self._name} is damaged: {name} has {weight.shape[0]} rows, and a head"
                        f" {self._head_dim}",
                        "download it again",
                    )
                weight = _side_by_side_to_halves(weight, self._head_dim)
            if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
                weight = weight - 1  # transformers' modules add 1
            yield from self._parts(theirs, weight)

    def _parts(self, name: str, weight: Array) -> Iterator[tuple[str, Array]]:
        """Yield a tensor. Older files of Phi 2 store three tensors as one, which is split."""
        if ".attn_qkv." not in name:
            yield name, weight
            return
        q, kv = self._heads * self._head_dim, self._kv_heads * self._head_dim
        for part, of in zip(np.split(weight, [q, q + kv]), "qkv", strict=True):
            yield name.replace("attn_qkv", f"self_attn.{of}_proj"), part

    def _numbers(self, name: str) -> Array:
        from gguf import dequantize

        tensor = self._stored[name]
        kind = tensor.tensor_type
        if kind.name in ("F32", "F16"):
            return np.asarray(tensor.data)
        try:
            numbers: Array = dequantize(tensor.data, kind)
        except NotImplementedError as error:
            raise UsageError(
                f"{self._name}: {name} is quantised as {kind.name}, which cannot be read here",
                "take the model in another quantisation (Q4_K_M, Q8_0, F16)",
            ) from error
        return numbers

    def _all_names(self) -> dict[str, str]:
        """Return transformers' names of the weights in the file."""
        final = "final_layernorm" if self.architecture == "phi2" else "norm"
        known = {
            "token_embd": "model.embed_tokens",
            "output_norm": f"model.{final}",
            "output": "lm_head",
        }
        block = BLOCKS[self.architecture]
        if self.architecture == "phi2":
            block = {**block, "attn_qkv": "attn_qkv"}
        for layer in range(self._layers):
            for ours, theirs in block.items():
                known[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
        names: dict[str, str] = {}
        for name in self._stored:
            stem, _, kind = name.rpartition(".")
            if stem in known:
                names[name] = f"{known[stem]}.{kind}"
            elif stem != "rope_freqs":
                raise UsageError(
                    f"{self._name} holds the tensor {name}, which no {self.architecture} model has"
                    " that is known here",
                    "give transformers' folder of the model (config.json and safetensors)",
                )
        absent = [
            f"{stem}.weight"
            for stem in known
            if f"{stem}.weight" not in self._stored and stem != "output"
        ]
        if self.architecture == "phi2":
            fused = any("attn_qkv" in name for name in self._stored)
            left = ("attn_q.", "attn_k.", "attn_v.") if fused else ("attn_qkv.",)
            absent = [name for name in absent if not any(part in name for part in left)]
        if absent:
            raise EnvironmentFault(
                f"{self._name} is damaged or no whole model: it lacks {absent[0]}"
                + (f" and {len(absent) - 1} more" if len(absent) > 1 else ""),
                "download it again; files that are split in parts have to be joined first"
                " (llama-gguf-split --merge)",
            )
        return names

    def _special(self) -> dict[str, Any]:
        """Return the token ids of BOS, EOS and padding."""
        tokens = "tokenizer.ggml.{}_token_id"
        ends = [self._facts.get(tokens.format(kind)) for kind in EOS_KINDS]
        return {
            "bos_token_id": self._facts.get(tokens.format("bos")),
            "eos_token_id": sorted({int(end) for end in ends if end is not None}) or None,
            "pad_token_id": self._facts.get(tokens.format("padding")),
        }

    def _config(self) -> dict[str, Any]:
        """Return the content of transformers' config.json."""
        common = {
            "hidden_size": self._hidden,
            "num_hidden_layers": self._layers,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "intermediate_size": int(self._get_value("feed_forward_length")),
            "max_position_embeddings": int(self._get_value("context_length")),
            "vocab_size": self._vocabulary(),
            "tie_word_embeddings": "output.weight" not in self._stored,
            "dtype": "float32",
            **self.special,
        }
        make: Callable[[], dict[str, Any]] = {
            "gemma": self._gemma,
            "gemma2": self._gemma,
            "gemma3": self._gemma,
            "phi2": self._phi2,
            "phi3": self._phi3,
        }.get(self.architecture, self._llama)
        return {**common, **make()}

    def _vocabulary(self) -> int:
        embedding = self._stored.get("token_embd.weight")
        if embedding is None:
            raise EnvironmentFault(
                f"{self._name} is no whole model: it lacks token_embd.weight", "download it again"
            )
        return int(embedding.shape[1])

    def _llama(self) -> dict[str, Any]:
        """Return the entries of config.json for Llama, Qwen2 and Qwen3."""
        classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        return {
            "model_type": self.architecture,
            "architectures": [f"{classes[self.architecture]}ForCausalLM"],
            "hidden_act": "silu",
            "rms_norm_eps": self._rms_eps(),
            "head_dim": self._head_dim,
            "rope_parameters": self._rope(),
        }

    def _gemma(self) -> dict[str, Any]:
        eps = {"rms_norm_eps": self._rms_eps(), "head_dim": self._head_dim}
        if self.architecture == "gemma":
            return {
                "model_type": "gemma",
                "architectures": ["GemmaForCausalLM"],
                "hidden_act": "gelu_pytorch_tanh",
                "rope_parameters": self._rope(),
                **eps,
            }
        # The largest model of Gemma 2 and of Gemma 3 (27B) scales attention by hidden size / number
        # of heads. Smaller models scale it by the head dimension.
        largest = {"gemma2": 46, "gemma3": 62}[self.architecture]
        wide = self._hidden // self._heads if self._layers == largest else self._head_dim
        second = self.architecture == "gemma2"
        turns = 2 if second else 6
        kinds = [
            "full_attention" if (layer + 1) % turns == 0 else "sliding_attention"
            for layer in range(self._layers)
        ]
        theta = float(self._get_value("rope.freq_base_swa", 10000.0))
        local = {"rope_type": "default", "rope_theta": theta}
        return {
            "model_type": "gemma2" if second else "gemma3_text",
            "architectures": ["Gemma2ForCausalLM" if second else "Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": wide,
            "sliding_window": int(self._get_value("attention.sliding_window")),
            "layer_types": kinds,
            "attn_logit_softcapping": self._get_value(
                "attn_logit_softcapping", 50.0 if second else None
            ),
            "final_logit_softcapping": self._get_value(
                "final_logit_softcapping", 30.0 if second else None
            ),
            "rope_parameters": self._rope()
            if second
            else {"sliding_attention": local, "full_attention": self._rope()},
            **eps,
        }

    def _phi2(self) -> dict[str, Any]:
        return {
            "model_type": "phi",
            "architectures": ["PhiForCausalLM"],
            "hidden_act": "gelu_new",
            "layer_norm_eps": float(self._get_value("attention.layer_norm_epsilon")),
            "tie_word_embeddings": False,
            "rope_parameters": {
                **self._rope(),
                "partial_rotary_factor": self._rotated / self._head_dim,
            },
        }

    def _phi3(self) -> dict[str, Any]:
        whole = self._hidden // self._heads
        window = self._get_value("attention.sliding_window", 0)
        return {
            "model_type": "phi3",
            "architectures": ["Phi3ForCausalLM"],
            "hidden_act": "silu",
            "rms_norm_eps": self._rms_eps(),
            "sliding_window": int(window) or None,
            "rope_parameters": {**self._rope(), "partial_rotary_factor": self._rotated / whole},
        }

    def _rms_eps(self) -> float:
        # The config value was rounded to float32 in the file. The shortest decimal that gives this
        # float32 is the original value.
        return float(str(np.float32(self._get_value("attention.layer_norm_rms_epsilon"))))

    def _rope(self) -> dict[str, Any]:
        """Return the rotary embedding settings of the layers with full attention."""
        theta = float(self._get_value("rope.freq_base", 10000.0))
        kind = self._get_value("rope.scaling.type", "none")
        if "rope_freqs.weight" in self._stored:
            return self._llama3(theta)
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        rope = {"rope_type": kind, "rope_theta": theta}
        if kind in ("linear", "yarn"):
            rope["factor"] = float(self._get_value("rope.scaling.factor"))
        if kind == "yarn":
            positions = int(self._get_value("rope.scaling.original_context_length"))
            rope["original_max_position_embeddings"] = positions
        if kind not in ("linear", "yarn"):
            raise UsageError(
                f"{self._name} scales its rotary frequencies by {kind}; supported are none, linear,"
                " yarn, and Llama 3's",
                "give transformers' folder of the model (config.json and safetensors)",
            )
        return rope

    def _llama3(self, theta: float) -> dict[str, Any]:
        """Return the rotary scaling of Llama 3. The file contains one factor per frequency."""
        stored = np.asarray(self._numbers("rope_freqs.weight"), dtype=np.float64)
        factor = float(stored.max())
        waves = 2 * math.pi * theta ** (np.arange(0, self._head_dim, 2) / self._head_dim)
        low, high, old = LLAMA3.values()
        smooth = np.clip((old / waves - low) / (high - low), 0, 1)
        if stored.shape != waves.shape or not np.allclose(
            stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3
        ):
            raise UsageError(
                f"{self._name} scales its rotary frequencies in an unsupported way (rope_freqs)",
                "give transformers' folder of the model (config.json and safetensors)",
            )
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3}

    def _get_value(self, key: str, default: Any = ...) -> Any:
        """Return a metadata value for the architecture of the model.

        Raises:
            EnvironmentFault: the value is missing and there is no default.
        """
        found = self._facts.get(f"{self.architecture}.{key}", default)
        if found is ...:
            raise EnvironmentFault(
                f"{self._name} is damaged or incomplete: its metadata lack"
                f" {self.architecture}.{key}",
                "download it again",
            )
        if isinstance(found, list):
            if len(set(found)) != 1:
                raise UsageError(
                    f"{self._name}: {self.architecture}.{key} differs between layers, which cannot"
                    " be read here",
                    "give transformers' folder of the model (config.json and safetensors)",
                )
            return found[0]
        return found


def _side_by_side_to_halves(weight: Array, head_dim: int) -> Array:
    """Reorder rows [heads * head_dim, ...] from llama.cpp's to transformers' rotary layout.

    The rotary embedding rotates pairs of rows. In llama.cpp the two rows of a pair are neighbours.
    In transformers they are half a head apart.
    """
    by_head = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return by_head.swapaxes(1, 2).reshape(weight.shape)
