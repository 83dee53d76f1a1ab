"""Draft head files: tensors under our names, sizes, and the target of the head."""

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
    """Sizes of a head's layer, with the names of transformers' configs."""

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
    """A head loaded from files, or a random one.

    Attributes:
        source: Origin of the head, for messages.
        tensors: Tensors by our names; see `layouts`.
        shape: Sizes of its layer.
        rope: Rotary settings, with the names of transformers' configs.
        hidden_first: Whether `fc` reads the features before the embedding.
        config: Content of config.json.
    """

    source: str
    tensors: Mapping[str, Tensor]
    shape: HeadShape
    rope: Mapping[str, Any] = field(default_factory=dict)
    hidden_first: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def find_captured_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the target layers whose output an EAGLE-3 or DFlash head reads.

        specbench, SpecForge and z-lab number the layers by their output. vLLM, whose numbers
        speculators stores, numbers them by their input. Without numbers, the three layers of
        EAGLE-3's code are used.

        Raises:
            EnvironmentFault: A number is not that of a layer.
        """
        config, ids = self.config, "eagle_aux_hidden_state_layer_ids"
        leaving = (config.get("specbench") or {}).get("taps")
        leaving = leaving or (config.get("eagle_config") or {}).get(ids)
        leaving = leaving or (config.get("dflash_config") or config).get("target_layer_ids")
        if leaving is None and config.get(ids):
            leaving = [layer - 1 for layer in config[ids]]
        captured_layers = tuple(leaving or official_layers(n_layers))
        if not all(0 <= layer < n_layers for layer in captured_layers):
            raise EnvironmentFault(
                f"{self.source} reads rows that leave the layers {list(captured_layers)} (counted"
                " from 0);"
                f" the target has {n_layers}",
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
            supported: The implemented value of each setting.
            supported_items: The implemented items of each setting that is a list.
        """
        for name, value in supported.items():
            if settings.get(name) not in (None, value):
                raise head_mismatch(
                    self, f"{name} is {settings[name]!r}; computed is {value!r} alone"
                )
        for name, known in supported_items.items():
            if odd := sorted({*(settings.get(name) or ())} - known):
                raise head_mismatch(self, f"{name} has {odd[0]!r}; computed is {', '.join(known)}")

    def read_token_id(self, settings: Mapping[str, Any], name: str, target: Decoder) -> int:
        """Return the target's token id in a setting, or raise EnvironmentFault if it is not one."""
        token = settings.get(name)
        if not isinstance(token, int) or not 0 <= token < target.vocab_size:
            raise head_mismatch(self, f"{name} is {token}; ids are below {target.vocab_size}")
        return token

    def check_target(self, target: Decoder) -> None:
        """Raise EnvironmentFault if the head was trained for another target."""
        trained_for = (self.config.get("specbench") or {}).get("target_sha256")
        if trained_for is None:
            return
        loaded = sha256_of(target)
        if loaded is not None and loaded != trained_for:
            raise EnvironmentFault(
                f"{self.source} was trained for a target whose weights have the SHA-256"
                f" {trained_for[:12]}...; this run's have {loaded[:12]}...",
                "specbench train --help",
            )


def head_mismatch(files: LoadedHead, what: str) -> EnvironmentFault:
    """Return the error for a head that does not match the target."""
    return EnvironmentFault(f"{files.source}: {what}", "specbench list models")


def check_tensors(
    source: str,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    kind: str,
    *,
    exact: bool = True,
) -> dict[str, Tensor]:
    """Return the tensors that a head needs, by their names in its files.

    Args:
        source: Origin of the tensors, for messages.
        shapes: Required shape of each tensor.
        kind: Kind of the head, for messages.
        exact: Reject tensors that are not in `shapes`.

    Raises:
        EnvironmentFault: A tensor is missing, unexpected, of another shape, or not finite.
    """
    missing = [name for name in shapes if name not in tensors]
    unexpected = [name for name in tensors if exact and name not in shapes]
    problems = [("lacks", missing), ("has no place for", unexpected)]
    what = "; ".join(f"{word} {', '.join(names[:4])}" for word, names in problems if names)
    found: dict[str, Tensor] = {}
    for name, size in () if what else shapes.items():
        tensor = found[name] = tensors[name]
        if tuple(tensor.shape) != tuple(size):
            what = f"{name} is {list(tensor.shape)}; this target needs {list(size)}"
        elif not tensor.isfinite().all():
            what = f"{name} holds numbers that are not finite"
        if what:
            break
    if what:
        raise EnvironmentFault(
            f"{source}: {what}",
            f"give the folder of another: --set {kind}.head=DIR, or train one: specbench train"
            f" {kind}",
        )
    return found


@torch.no_grad()
def copy_tensors(
    destinations: Mapping[str, Tensor], weights: Mapping[str, Tensor], source: str, kind: str
) -> None:
    """Copy the tensors of a checkpoint to the tensors of a head with the same names.

    Raises:
        EnvironmentFault: See `check_tensors`.
    """
    shapes = {name: tuple(place.shape) for name, place in destinations.items()}
    for name, tensor in check_tensors(source, weights, shapes, kind).items():
        destinations[name].copy_(tensor)


def official_layers(n_layers: int) -> tuple[int, ...]:
    """Return the layers whose output EAGLE-3's code reads: the inputs of layers 2, N/2 and N - 3.

    The numbers are clamped for targets with fewer than five layers.
    """
    layers = (1, n_layers // 2 - 1, n_layers - 4)
    return tuple(min(max(layer, 0), n_layers - 1) for layer in layers)


def read_head(
    folder: Path, kind: str, layouts: Sequence[Layout], target: Decoder | None = None
) -> LoadedHead:
    """Read the head in a folder, in any layout.

    Args:
        kind: Required kind of the head ("eagle", "eagle3", "mtp").
        layouts: All known layouts.
        target: Target whose config.json provides sizes that the head's does not contain.

    Raises:
        EnvironmentFault: No config.json or no safetensors; an unknown layout, a head of another
            kind, or a layer that is not Llama's.
    """
    config = read_head_config(folder)
    weights = Weights(folder)
    layout, caught = find_layout(folder, weights, layouts)
    if layout.kind != kind:
        raise EnvironmentFault(
            f"{folder} holds a head of kind {layout.kind}: {layout.name}; {kind} was asked for",
            f"specbench run -m {layout.kind} --set {layout.kind}.head={folder}",
        )
    tensors = rename_tensors(folder, layout, caught, weights)
    inner = config.get("transformer_layer_config") or config.get("text_config") or config
    if "num_attention_heads" not in inner:
        inner = {**(config_of(target) if target is not None else {}), **inner}
    if "num_attention_heads" not in inner:
        raise EnvironmentFault(
            f"{folder}: neither its config.json nor the target's says num_attention_heads",
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
    """Read a head whose files use our module's tensor names and whose config.json has all sizes.

    Raises:
        EnvironmentFault: No config.json, no safetensors, a missing size, or a head for another
            target.
    """
    config = read_head_config(folder)
    sizes = {name: config[name] for name in HeadShape.__dataclass_fields__ if name in config}
    try:
        shape = HeadShape(**sizes)
    except TypeError:
        missing = sorted(HeadShape.__dataclass_fields__.keys() - sizes.keys())
        raise EnvironmentFault(
            f"{folder.name}: config.json lacks {', '.join(missing)}", "specbench list methods"
        ) from None
    weights = Weights(folder)
    weights.check_layers(shape)
    files = LoadedHead(folder.name, weights, shape, read_rope(folder, config), config=config)
    files.check_target(target)
    if shape.hidden_size != target.hidden_size:
        found = f"rows of {shape.hidden_size} where the target's are {target.hidden_size}"
        raise head_mismatch(files, found)
    return files


def read_head_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise EnvironmentFault(
            f"{folder} holds no head: it has no config.json", "specbench list methods"
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt"))
    if pickles and not any(folder.glob("*.safetensors")):
        raise pickle_fault(folder, pickles[0])
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if config.get("layernorms"):
        raise EnvironmentFault(
            f"{folder}: `layernorms` is true in config.json; norms around the layer of an EAGLE-1"
            " head are not computed here",
            "convert a head without them",
        )
    return config


def _read_shape(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> HeadShape:
    """Return the sizes of the layer, from its tensors and from the number of heads in `config`."""
    heads = config["num_attention_heads"]
    rows = {part: len(tensors[f"layer.self_attn.{part}_proj.weight"]) for part in "qkv"}
    hidden, mixed = tensors["layer.self_attn.o_proj.weight"].shape
    head_dim = mixed // heads
    act = config.get("hidden_act", "silu")
    if act != "silu" or rows["q"] != mixed or mixed % heads or rows["k"] % head_dim:
        raise EnvironmentFault(
            f"{folder}: a layer with {heads} heads, {rows['q']} rows of queries, {rows['k']} of"
            f" keys, an output that reads {mixed} numbers, and {act}; a Llama-like layer's queries"
            " have as many rows as the output reads (no gate), and silu",
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
            f"{folder}: rotary embeddings of type {variant!r} over {share:g} of a head; computed"
            f" are {', '.join(ROPE_TYPES)} over the whole of it",
            "specbench list methods",
        )
    return rope
