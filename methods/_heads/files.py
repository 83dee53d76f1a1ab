"""Loading of draft heads from a folder with config.json and safetensors files.

Several projects write such folders. The result is always a `LoadedHead`. Loading fails if the head
does not fit the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from methods._heads.layouts import Layout, find_layout, rename_tensors
from specbench_cli.api import (
    ROPE_TYPES,
    Decoder,
    EnvironmentFault,
    Weights,
    config_of,
    pickle_fault,
    sha256_of,
)

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head's layers. The fields have the names that transformers' configs use."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    num_hidden_layers: int = 1
    model_type: str = "llama"


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """Tensors and settings of a draft head, loaded from files or generated at random.

    Attributes:
        source: Folder and format of the head, for error messages.
        tensors: Tensors of the head. Their names are listed in `methods/_heads/layouts.py`.
        shape: Sizes of the layer.
        rope: Settings of the rotary embedding, named as in transformers' configs.
        hidden_first: Order of the concatenated input of the matrix `fc`: True for [features,
            embedding], False for [embedding, features].
        config: Content of config.json.
    """

    source: str
    tensors: Mapping[str, Tensor]
    shape: HeadShape
    rope: Mapping[str, Any] = field(default_factory=dict)
    hidden_first: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def find_captured_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the target layers whose outputs an EAGLE-3 or DFlash head reads, counted from 0.

        config.json of the head usually lists the layers. Heads of the speculators project count as
        vLLM does: number n is the input of layer n, which is the output of layer n - 1. If
        config.json lists no layers, return the three layers that EAGLE-3's code reads.

        Raises:
            EnvironmentFault: The target has no layer with such a number.
        """
        config, ids = self.config, "eagle_aux_hidden_state_layer_ids"
        numbers = (config.get("specbench") or {}).get("taps")
        numbers = numbers or (config.get("eagle_config") or {}).get(ids)
        numbers = numbers or (config.get("dflash_config") or config).get("target_layer_ids")
        if numbers is None and config.get(ids):
            numbers = [layer - 1 for layer in config[ids]]
        captured_layers = tuple(numbers or official_layers(n_layers))
        if not all(0 <= layer < n_layers for layer in captured_layers):
            raise EnvironmentFault(
                f"{self.source} reads the outputs of target layers {list(captured_layers)}, counted"
                f" from 0; this target has {n_layers} layers",
                "specbench list models",
            )
        return captured_layers

    def check_supported(
        self,
        settings: Mapping[str, Any],
        supported: Mapping[str, Any],
        supported_items: Mapping[str, set[str]],
    ) -> None:
        """Raise EnvironmentFault if a setting has a value that is not implemented.

        Args:
            settings: Settings of the head.
            supported: The only implemented value of each setting.
            supported_items: For settings that are lists: the items that are implemented.
        """
        for name, value in supported.items():
            if settings.get(name) not in (None, value):
                raise head_mismatch(
                    self, f"{name} is {settings[name]!r}; only {value!r} is supported"
                )
        for name, known in supported_items.items():
            if odd := sorted({*(settings.get(name) or ())} - known):
                found = f"{name} contains {odd[0]!r}; supported: {', '.join(known)}"
                raise head_mismatch(self, found)

    def read_token_id(self, settings: Mapping[str, Any], name: str, target: Decoder) -> int:
        """Return the token id that the setting `name` contains.

        Raises:
            EnvironmentFault: The target has no such token id.
        """
        token = settings.get(name)
        if not isinstance(token, int) or not 0 <= token < target.vocab_size:
            raise head_mismatch(self, f"{name} is {token}; token ids are below {target.vocab_size}")
        return token

    def check_target(self, target: Decoder) -> None:
        """Raise EnvironmentFault if the head was trained for another target."""
        trained_for = (self.config.get("specbench") or {}).get("target_sha256")
        if trained_for is None:
            return
        loaded = sha256_of(target)
        if loaded is not None and loaded != trained_for:
            raise EnvironmentFault(
                f"{self.source} was trained for a target whose weights have SHA-256"
                f" {trained_for[:12]}...; the target of this run has {loaded[:12]}...",
                "specbench train --help",
            )


def head_mismatch(files: LoadedHead, what: str) -> EnvironmentFault:
    """Return the exception for a head that does not match the target.

    `what` describes the mismatch.
    """
    return EnvironmentFault(f"{files.source}: {what}", "specbench list models")


def check_tensors(
    source: str,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    kind: str,
    *,
    exact: bool = True,
) -> dict[str, Tensor]:
    """Return the tensors with the names in `shapes`, after checking them.

    Args:
        source: Name of the file or folder, for error messages.
        tensors: Tensors of the head, by name.
        shapes: Required shape of each tensor.
        kind: Kind of the head, for error messages.
        exact: Whether tensors that are not in `shapes` are an error.

    Raises:
        EnvironmentFault: A tensor is missing, unexpected, of another shape, or not finite.
    """
    missing = [name for name in shapes if name not in tensors]
    unexpected = [name for name in tensors if exact and name not in shapes]
    problems = [("missing tensors:", missing), ("unexpected tensors:", unexpected)]
    what = "; ".join(f"{word} {', '.join(names[:4])}" for word, names in problems if names)
    found: dict[str, Tensor] = {}
    for name, size in () if what else shapes.items():
        tensor = found[name] = tensors[name]
        if tuple(tensor.shape) != tuple(size):
            what = f"{name} has shape {list(tensor.shape)}; this target needs {list(size)}"
        elif not tensor.isfinite().all():
            what = f"{name} contains numbers that are not finite"
        if what:
            break
    if what:
        raise EnvironmentFault(
            f"{source}: {what}",
            f"use another head: --set {kind}.head=DIR, or train one: specbench train {kind}",
        )
    return found


@torch.no_grad()
def copy_tensors(
    destinations: Mapping[str, Tensor], weights: Mapping[str, Tensor], source: str, kind: str
) -> None:
    """Copy the tensors of a checkpoint into the parameters of a head.

    Args:
        destinations: Parameters of the head, by their names in the checkpoint.
        weights: Tensors of the checkpoint.
        source: Name of the checkpoint, for error messages.
        kind: Kind of the head, for error messages.

    Raises:
        EnvironmentFault: A tensor is missing, unexpected, of another shape, or not finite.
    """
    shapes = {name: tuple(place.shape) for name, place in destinations.items()}
    for name, tensor in check_tensors(source, weights, shapes, kind).items():
        destinations[name].copy_(tensor)


def official_layers(n_layers: int) -> tuple[int, ...]:
    """Return the three target layers whose outputs EAGLE-3's code reads, of N = `n_layers` layers.

    The layers are 1, N/2 - 1 and N - 4, counted from 0. For targets with fewer than five layers,
    the numbers are limited to existing layers.
    """
    layers = (1, n_layers // 2 - 1, n_layers - 4)
    return tuple(min(max(layer, 0), n_layers - 1) for layer in layers)


def read_head(
    folder: Path, kind: str, layouts: Sequence[Layout], target: Decoder | None = None
) -> LoadedHead:
    """Read a draft head from a folder, in any known layout.

    Args:
        kind: Required kind of the head, such as "eagle", "eagle3" or "mtp".
        layouts: Known layouts, of all kinds.
        target: The number of attention heads is read from the target's config.json if the head's
            config.json lacks it.

    Raises:
        EnvironmentFault: The folder has no config.json or no safetensors, the layout is unknown,
            the head is of another kind, or its layer is not a Llama layer.
    """
    config = read_head_config(folder)
    weights = Weights(folder)
    layout, layer_number = find_layout(folder, weights, layouts)
    if layout.kind != kind:
        raise EnvironmentFault(
            f"{folder} contains a head of kind {layout.kind} ({layout.name}); the method needs a"
            f" head of kind {kind}",
            f"specbench run -m {layout.kind} --set {layout.kind}.head={folder}",
        )
    tensors = rename_tensors(folder, layout, layer_number, weights)
    inner = config.get("transformer_layer_config") or config.get("text_config") or config
    if "num_attention_heads" not in inner:
        inner = {**(config_of(target) if target is not None else {}), **inner}
    if "num_attention_heads" not in inner:
        raise EnvironmentFault(
            f"{folder}: num_attention_heads is missing in the head's and the target's config.json",
            "add it to the head's config.json",
        )
    return LoadedHead(
        source=f"{folder} ({layout.name})",
        tensors=tensors,
        shape=_read_shape(folder, inner, tensors),
        rope=read_rope(folder, inner),
        hidden_first=layout.hidden_first,
        config=config,
    )


def read_head_by_config(folder: Path, target: Decoder) -> LoadedHead:
    """Read a draft head that specbench stored: config.json contains all sizes, and no tensor is
    renamed.

    Raises:
        EnvironmentFault: The folder has no config.json or no safetensors, a size is missing, or the
            head is for another target.
    """
    config = read_head_config(folder)
    sizes = {name: config[name] for name in HeadShape.__dataclass_fields__ if name in config}
    try:
        shape = HeadShape(**sizes)
    except TypeError:
        missing = sorted(HeadShape.__dataclass_fields__.keys() - sizes.keys())
        raise EnvironmentFault(
            f"{folder.name}: {', '.join(missing)} missing in config.json", "specbench list methods"
        ) from None
    weights = Weights(folder)
    weights.check_layers(shape)
    files = LoadedHead(folder.name, weights, shape, read_rope(folder, config), config=config)
    files.check_target(target)
    if shape.hidden_size != target.hidden_size:
        found = f"hidden size {shape.hidden_size}; the target's is {target.hidden_size}"
        raise head_mismatch(files, found)
    return files


def read_head_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise EnvironmentFault(
            f"{folder} contains no draft head: config.json is missing", "specbench list methods"
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt"))
    if pickles and not any(folder.glob("*.safetensors")):
        raise pickle_fault(folder, pickles[0])
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if config.get("layernorms"):
        raise EnvironmentFault(
            f"{folder}: `layernorms` is true in config.json; EAGLE-1 heads with norms around the"
            " layer are not supported",
            "use a head without these norms",
        )
    return config


def _read_shape(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> HeadShape:
    """Return the sizes of the head's transformer layer, from its tensors and config.json."""
    heads = config["num_attention_heads"]
    rows = {part: len(tensors[f"layer.self_attn.{part}_proj.weight"]) for part in "qkv"}
    hidden, mixed = tensors["layer.self_attn.o_proj.weight"].shape
    head_dim = mixed // heads
    act = config.get("hidden_act", "silu")
    if act != "silu" or rows["q"] != mixed or mixed % heads or rows["k"] % head_dim:
        raise EnvironmentFault(
            f"{folder}: not a Llama layer: {heads} attention heads, q_proj with {rows['q']} rows,"
            f" k_proj with {rows['k']} rows, o_proj with {mixed} columns, hidden_act {act};"
            " supported are layers with silu and as many q_proj rows as o_proj columns",
            "specbench list methods",
        )
    return HeadShape(
        hidden_size=hidden,
        intermediate_size=len(tensors["layer.mlp.gate_proj.weight"]),
        num_attention_heads=heads,
        num_key_value_heads=rows["k"] // head_dim,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
    )


def read_rope(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = {key: config[key] for key in _ROPE if config.get(key) is not None}
    scaling = rope.get("rope_parameters") or rope.get("rope_scaling") or {}
    variant = scaling.get("rope_type", scaling.get("type", "default"))
    share = rope.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    if variant not in ROPE_TYPES or share != 1.0:
        raise EnvironmentFault(
            f"{folder}: rotary embedding of type {variant!r} with partial_rotary_factor {share:g};"
            f" supported are {', '.join(ROPE_TYPES)} with factor 1",
            "specbench list methods",
        )
    return rope
