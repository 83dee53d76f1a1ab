"""Weights of a Llama-like model, fused: one matrix for q, k and v, and one for gate and up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from specbench_cli.engine.models.attention import Rotary
from specbench_cli.engine.models.linear import (
    Linear,
    LinearBackend,
    WeightArena,
    choose_backend,
    linear,
)
from specbench_cli.former_names import renamed_members

MAX_HEAD_COPY = dict.fromkeys(get_args(LinearBackend), 1 << 28) | {"plain": 1 << 24, "tiled": 0}
"""Maximum number of weights of a tied output matrix that a CPU stores a second time, by backend.

The copy has the layout that the backend needs. The "plain" backend gains from it only with several
rows, so it copies only small matrices. The "tiled" backend multiplies by the embedding itself."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer.

    Attributes:
        norm: Weight of the norm before attention, or None.
        heads_norm: Weight of Qwen3's norm of each head, [q and k heads, head_dim].
    """

    norm: Tensor | None
    qkv: Linear
    heads_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@renamed_members(place="store", form_of="backend_of")
class LayerReader:
    """Object that converts, fuses and reorders the layers of a checkpoint.

    Args:
        config: transformers config, with heads and sizes.
        tensors: Tensors of the checkpoint by transformers name, in any floating dtype.
        rotary: Rotation that determines the order of query and key rows.
        norm_factor: Factor for the norm weights, applied in float32. The norms of single heads
            (Qwen3) get no factor. None leaves all norm weights unchanged.
        backend: Backend of the linear layers. None uses `choose_backend`.

    Raises (all methods):
        KeyError: A tensor is missing.
    """

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, Tensor],
        rotary: Rotary,
        *,
        device: torch.device,
        dtype: torch.dtype,
        norm_factor: float | None,
        backend: LinearBackend | None,
    ) -> None:
        self._tensors, self._rotary, self._backend = tensors, rotary, backend
        self._device, self._dtype, self._norm_factor = device, dtype, norm_factor
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._on_cpu = device.type == "cpu"
        self._arena = WeightArena()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def layer(self, prefix: str, *, norm: str | None = "input_layernorm") -> LayerWeights:
        """Return the weights of the layer whose tensor names begin with `prefix`.

        Args:
            norm: Name of the norm before attention. None means that the layer has no such norm.
        """
        return LayerWeights(
            norm=self.norm(f"{prefix}{norm}") if norm else None,
            qkv=self._fuse(prefix, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            heads_norm=self._heads_norm(prefix),
            out=self._fuse(prefix, "self_attn.o_proj"),
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm"),
            gate_up=self._fuse(prefix, "mlp.gate_proj", "mlp.up_proj"),
            down=self._fuse(prefix, "mlp.down_proj"),
        )

    def get(self, name: str) -> Tensor:
        """Return a tensor, on the device and in the dtype of the model."""
        return self._tensors[name].to(device=self._device, dtype=self._dtype)

    def norm(self, name: str) -> Tensor:
        """Return the weight of a norm, multiplied by the norm factor if there is one."""
        weight = self.get(f"{name}.weight")
        return weight if self._norm_factor is None else weight.float() * self._norm_factor

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the linear layer with a weight [out, in]."""
        backend = self.backend_of(weight)
        # On a CPU, a product of few rows is up to twice as fast with the layout [in, out].
        if backend == "tiled":
            matrix = self.store(weight).t()
        else:
            is_row_major = self._on_cpu and backend in ("plain", "widened")
            matrix = self.store(weight.t()) if is_row_major else weight.t()
        return linear(matrix, bias, backend=backend)

    def backend_of(self, weight: Tensor) -> LinearBackend:
        """Return the backend that multiplies by a weight [out, in]."""
        return self._backend or choose_backend(weight.t())

    def store(self, weight: Tensor) -> Tensor:
        """Return a row-major copy of a weight, in a memory area that the layers of this model
        share.
        """
        return self._arena.store(weight)

    def _heads_norm(self, prefix: str) -> Tensor | None:
        if f"{prefix}self_attn.q_norm.weight" not in self._tensors:
            return None
        q, k = (
            self._rotary.permute(self.get(f"{prefix}self_attn.{of}_norm.weight")) for of in "qk"
        )
        return torch.cat((q.expand(self._heads, -1), k.expand(self._kv_heads, -1)))

    def _fuse(self, prefix: str, *names: str) -> Linear:
        """Return several projections of the same input, joined as one linear layer."""
        weights = [self._read_permuted(f"{prefix}{name}.weight") for name in names]
        biases = [
            self._read_permuted(f"{prefix}{name}.bias")
            for name in names
            if f"{prefix}{name}.bias" in self._tensors
        ]
        return self.linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _read_permuted(self, name: str) -> Tensor:
        part = self.get(name)
        return self._rotary.permute(part) if ".q_proj." in name or ".k_proj." in name else part


class FusedWeights:
    """All weights of a Llama-like model. Matrices with the same input are joined into one.

    Args:
        config: transformers config.
        read: Object that reads tensors from the checkpoint, one layer at a time.
        rotary: Rotary embedding. The rows of the query and key matrices are ordered to fit it.
        output_ids: Token id of each row of the output matrix, shape [rows]. None means all ids in
            order.

    Attributes:
        outputs: Output matrix [V, hidden]. None if the matrix is packed, or has rows for only some
            ids.

    Raises:
        KeyError: A tensor is missing.
    """

    def __init__(
        self, config: Any, read: LayerReader, rotary: Rotary, output_ids: Tensor | None = None
    ) -> None:
        self._rotary = rotary
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._hidden, self._mlp = config.hidden_size, config.intermediate_size
        self.embedding = read.store(read.get("model.embed_tokens.weight"))
        self.layers = [read.layer(f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self.final_norm = read.norm("model.norm")
        self.output_ids = None if output_ids is None else output_ids.to(self.embedding.device)
        tied = output_ids is None and config.tie_word_embeddings
        on_cpu = self.embedding.device.type == "cpu"
        most = MAX_HEAD_COPY[read.backend_of(self.embedding)]
        self._head_is_embedding = tied and (not on_cpu or self.embedding.numel() > most)
        if self._head_is_embedding:
            backend = read.backend_of(self.embedding)
            self.head = linear(
                self.embedding.t(), backend="tiled" if backend == "tiled" else "plain"
            )
        else:
            self.head = read.linear(self.embedding if tied else read.get("lm_head.weight"))
        whole = self.embedding if tied else self.head.columns(0, len(self.embedding))
        self.outputs = whole if output_ids is None else None

    def logits(self, rows: Tensor, product: Callable[[Linear, Tensor], Tensor]) -> Tensor:
        """Return the logits [n, V] of rows [n, hidden] to which the final norm was applied."""
        logits = product(self.head, rows)
        return (
            logits
            if self.output_ids is None
            else scatter_logits(logits, self.output_ids, len(self.embedding))
        )

    @property
    def nbytes(self) -> int:
        """Size of all weights in bytes. If the output matrix is the embedding, it counts once."""
        parts = (self.embedding, self.final_norm, self.head)
        whole = sum(part.nbytes for part in parts) + sum(map(layer_bytes, self.layers))
        return whole - self._head_is_embedding * self.head.nbytes

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return the checkpoint tensors, by transformers name, that share memory with these
        weights.
        """
        d = self._rotary.head_dim
        q, kv, hidden, mlp = self._heads * d, self._kv_heads * d, self._hidden, self._mlp
        output_rows = self.embedding if self.output_ids is None else self.output_ids
        found = {
            "model.embed_tokens.weight": self.embedding,
            "lm_head.weight": self.head.columns(0, len(output_rows)),
        }
        for i, layer in enumerate(self.layers):
            parts = {
                "self_attn.v_proj": layer.qkv.columns(q + kv, q + 2 * kv),
                "self_attn.o_proj": layer.out.columns(0, hidden),
                "mlp.gate_proj": layer.gate_up.columns(0, mlp),
                "mlp.up_proj": layer.gate_up.columns(mlp, 2 * mlp),
                "mlp.down_proj": layer.down.columns(0, hidden),
            }
            if not self._rotary.interleaved:
                parts["self_attn.q_proj"] = layer.qkv.columns(0, q)
                parts["self_attn.k_proj"] = layer.qkv.columns(q, q + kv)
            found |= {f"model.layers.{i}.{name}.weight": part for name, part in parts.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def tensor_shapes(config: Any, output_rows: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that the config of a Llama-like model requires.

    The keys are transformers' tensor names. A tied output matrix is included.

    Args:
        output_rows: Number of rows of the output matrix. None means one row for each id.
    """
    hidden, mlp, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    d = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    projections = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.model_type == "qwen3":
        norms |= {"self_attn.q_norm": d, "self_attn.k_norm": d}
    biased = _biased_projections(config)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab if output_rows is None else output_rows, hidden),
    }
    for i in range(config.num_hidden_layers):
        for name, shape in projections.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            if name in biased:
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
        for name, width in norms.items():
            shapes[f"model.layers.{i}.{name}.weight"] = (width,)
    return shapes


def _biased_projections(config: Any) -> set[str]:
    """Return the names of the projections that have a bias, by the rules of transformers."""
    inputs = {f"self_attn.{part}_proj" for part in "qkv"}
    if config.model_type == "qwen2":
        return inputs
    biased: set[str] = set()
    if config.model_type in ("llama", "qwen3") and getattr(config, "attention_bias", False):
        biased |= {*inputs, "self_attn.o_proj"}
    if config.model_type == "llama" and getattr(config, "mlp_bias", False):
        biased |= {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    return biased


def scatter_logits(said: Tensor, ids: Tensor, size: int) -> Tensor:
    """Return logits [..., size] over a vocabulary from logits [..., r] of only the ids [r].

    All other ids get logits of -inf.
    """
    logits = said.new_full((*said.shape[:-1], size), -torch.inf)
    return logits.index_copy_(-1, ids, said)


def layer_bytes(layer: LayerWeights) -> int:
    """Return the bytes of a layer's weights."""
    return sum(sublayer_bytes(layer))


def sublayer_bytes(layer: LayerWeights) -> tuple[int, int]:
    """Return the bytes of a layer's attention weights, and of its MLP weights."""
    attention = (layer.norm, layer.qkv, layer.heads_norm, layer.out)
    mlp = (layer.mlp_norm, layer.gate_up, layer.down)
    return (
        sum(part.nbytes for part in attention if part is not None),
        sum(part.nbytes for part in mlp),
    )
