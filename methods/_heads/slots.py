"""Llama layer of a draft head, for training.

Training drafts from many positions of a text in one forward. Such a position is called a slot. Each
slot has its own draft tokens. Each draft token attends to the text up to the slot's position, and
to earlier draft tokens of the same slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods._heads.files import HeadShape
from specbench_cli.api import RotaryEmbedding


@dataclass
class PastKeyValues:
    """Keys and values that slots attend to: of the text, and of each slot's own draft tokens.

    Attributes:
        mask: True where a slot attends to a position of the text, [sequences, 1, slots, length].
        text: Keys and values of the text, each [sequences, heads, length, head_dim].
        own: Keys and values of the draft tokens, one pair per draft step after the first. Each is
            [sequences, heads, slots, head_dim].
    """

    mask: Tensor
    text: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class HeadInput(NamedTuple):
    """Input of one draft step of a draft head, in training.

    A slot is a position of the text to draft from. The input of the first step is the whole text.
    The input of a later step is one draft token per slot.

    Attributes:
        embedded: Token embeddings, [sequences, n, width]. Token i follows the position of features
            i.
        features: First step: the target's features, as `DraftHead.project_features` returns them.
            Later steps: `HeadOutput.hidden` of the previous step.
        positions: Positions of the features in their sequences, [sequences, n]. Each later step
            increases them by one.
        past: Keys and values that the slots attend to. The step adds the keys and values of its own
            input.
        slots: First step: the slots, [sequences, slots]. Later steps: None.
    """

    embedded: Tensor
    features: Tensor
    positions: Tensor
    past: PastKeyValues
    slots: Tensor | None = None


class RmsNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, arXiv:1910.07467), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """Return the normed rows."""
        wide = rows.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(rows.dtype)


class Attention(nn.Module):
    """Llama's attention over the text and over the draft tokens of the same slot.

    A slot is a position of the text to draft from. A slot never attends to draft tokens of another
    slot. Attention to the text is one matrix product. Each draft step adds one dot product per
    slot, so no mask over draft tokens is needed. EAGLE-3's training-time test does the same
    (arXiv:2503.01840).

    Args:
        input_width: Width of the input.
        shape: Sizes of the layer.
        rope: Settings of the rotary embedding.
        tensor_names: Names of the tensors in the checkpoint. They determine whether the attention
            has biases and norms of queries and keys.
    """

    def __init__(
        self,
        input_width: int,
        shape: HeadShape,
        rope: Mapping[str, Any],
        tensor_names: Collection[str],
    ) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        self._queries_per_kv = shape.num_attention_heads // shape.num_key_value_heads

        def linear(part: str, width: int, heads: int) -> nn.Linear:
            return nn.Linear(width, heads, bias=f"self_attn.{part}_proj.bias" in tensor_names)

        q, kv = (
            shape.num_attention_heads * self._head_dim,
            shape.num_key_value_heads * self._head_dim,
        )
        self.q_proj, self.k_proj = linear("q", input_width, q), linear("k", input_width, kv)
        self.v_proj, self.o_proj = linear("v", input_width, kv), linear("o", q, shape.hidden_size)
        self.q_norm, self.k_norm = (
            RmsNorm(self._head_dim, shape.rms_norm_eps)
            if f"self_attn.{part}_norm.weight" in tensor_names
            else None
            for part in "qk"
        )
        self.rotary = make_rotary(shape, rope)

    def project_kv(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [sequences, heads, n, head_dim].

        Args:
            rows: Input of the attention, [sequences, n, input_width].
            positions: Positions of the rows, [sequences, n].
        """
        keys = self._rotate(self.k_proj(rows), positions, self.k_norm)
        values = self._split(self.v_proj(rows))
        if self._queries_per_kv > 1:
            keys, values = (
                part.repeat_interleave(self._queries_per_kv, 1) for part in (keys, values)
            )
        return keys, values

    def forward(self, rows: Tensor, positions: Tensor, past: PastKeyValues) -> Tensor:
        """Return the attention output, [sequences, slots, hidden].

        Args:
            rows: Input of the attention, [sequences, slots, input_width].
            positions: Positions of the rows, [sequences, slots].
            past: Keys and values that the rows attend to.
        """
        assert past.text is not None, "set past.text before the attention is called"
        query = self._rotate(self.q_proj(rows), positions, self.q_norm)
        query = query / query.shape[-1] ** 0.5
        scores = (query @ past.text[0].mT).float().masked_fill(~past.mask, float("-inf"))
        own_scores = [(query * keys).sum(-1, keepdim=True).float() for keys, _ in past.own]
        weights = torch.cat([scores, *own_scores], -1).softmax(-1)
        length = scores.shape[-1]
        attended = weights[..., :length].to(past.text[1].dtype) @ past.text[1]
        for step, (_, values) in enumerate(past.own):
            attended = attended + weights[..., length + step, None].to(values.dtype) * values
        merged: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return merged

    def _split(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], -1, self._head_dim).transpose(1, 2)

    def _rotate(self, rows: Tensor, positions: Tensor, norm: RmsNorm | None) -> Tensor:
        cos, sin = self.rotary(rows, positions)
        split = self._split(rows)
        split = split if norm is None else norm(split)
        half = self._head_dim // 2
        rotated = torch.cat((-split[..., half:], split[..., :half]), -1)
        result: Tensor = split * cos[:, None] + rotated * sin[:, None]
        return result


class Mlp(nn.Module):
    """Llama's MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width, mlp = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(width, mlp, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(mlp, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output for `rows`."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class LlamaLayer(nn.Module):
    """Llama layer.

    Args:
        input_width: Width of the input of the attention.
        shape: Sizes of the layer.
        rope: Settings of the rotary embedding.
        tensor_names: Names of the tensors in the checkpoint; they determine which optional tensors
            exist.
        normed: Whether the attention has an input norm. Some heads apply a norm to this input
            themselves.
    """

    def __init__(
        self,
        input_width: int,
        shape: HeadShape,
        rope: Mapping[str, Any],
        tensor_names: Iterable[str],
        *,
        normed: bool,
    ) -> None:
        super().__init__()
        own = {name.removeprefix("layer.") for name in tensor_names}
        self.self_attn = Attention(input_width, shape, rope, own)
        self.mlp = Mlp(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps) if normed else None

    def norm_input(self, rows: Tensor) -> Tensor:
        """Return the input of the attention, from the input of the layer [..., width]."""
        normed: Tensor = rows if self.input_layernorm is None else self.input_layernorm(rows)
        return normed

    def add_residuals(self, rows: Tensor, attended: Tensor) -> Tensor:
        """Return the output of the layer.

        `rows` is its input, and `attended` is the output of its attention.
        """
        rows = rows + attended
        output: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return output

    @torch.no_grad()
    def zero_outputs(self) -> None:
        """Set the output matrices to zero, so that the layer returns its input unchanged before
        training.
        """
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()


def gather_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """Return the rows at the slots, [sequences, slots, ...].

    Args:
        rows: [sequences, n, ...].
        slots: Indices into dimension 1 of `rows`, [sequences, slots].
    """
    index = slots.reshape(*slots.shape, *[1] * (rows.dim() - 2))
    return rows.gather(1, index.expand(*slots.shape, *rows.shape[2:]))


def make_rotary(shape: HeadShape, rope: Mapping[str, Any]) -> nn.Module:
    """Return the rotary embedding of a head's layer."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.num_attention_heads * shape.head_dim,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        **rope,
    )
    return RotaryEmbedding(config)
