"""Llama layer for training: computes all slots of a text at once, each with its own draft."""

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
    """Keys and values that slots attend to in training: the text and each slot's own draft.

    Attributes:
        mask: [sequences, 1, slots, length], True where a slot attends to a position of the text.
        text: Keys and values of all positions, [sequences, heads, length, head width].
        own: Keys and values of each step after the first, [sequences, heads, slots, head width].
    """

    mask: Tensor
    text: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class HeadInput(NamedTuple):
    """Input of one step of a draft head.

    Attributes:
        embedded: Embeddings of the tokens that follow the features, [sequences, n, width].
        features: The target's features, as `DraftHead.read` returns them, at the first step. At
            later steps, `HeadOutput.hidden` of the step before.
        places: Positions of the slots in their sequences. Each later step adds one.
        past: Keys and values that the slots attend to. The step adds its own.
        slots: Positions to draft from, [sequences, slots], at the first step, whose input is the
            whole text. None at later steps.
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
        """See the class."""
        exact = rows.to(torch.float32)
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * exact.to(rows.dtype)


class Attention(nn.Module):
    """Llama's attention, with input rows of width `reads`.

    A slot attends to the text and to its own draft steps, never to another slot. One product of
    queries and keys covers the text, and each later step adds a diagonal term (EAGLE-3's
    training-time test, arXiv:2503.01840). No mask over drafted rows is needed.

    Args:
        reads: Width of the input rows.
        has: Names of the optional tensors that this layer has.
    """

    def __init__(
        self, input_width: int, shape: HeadShape, rope: Mapping[str, Any], has: Collection[str]
    ) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        self._shared = shape.num_attention_heads // shape.num_key_value_heads

        def linear(part: str, width: int, heads: int) -> nn.Linear:
            return nn.Linear(width, heads, bias=f"self_attn.{part}_proj.bias" in has)

        q, kv = (
            shape.num_attention_heads * self._head_dim,
            shape.num_key_value_heads * self._head_dim,
        )
        self.q_proj, self.k_proj = linear("q", input_width, q), linear("k", input_width, kv)
        self.v_proj, self.o_proj = linear("v", input_width, kv), linear("o", q, shape.hidden_size)
        self.q_norm, self.k_norm = (
            RmsNorm(self._head_dim, shape.rms_norm_eps)
            if f"self_attn.{part}_norm.weight" in has
            else None
            for part in "qk"
        )
        self.rotary = make_rotary(shape, rope)

    def project_kv(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `rows` [sequences, n, reads] at `places` [sequences, n]."""
        keys = self._rotate(self.k_proj(rows), places, self.k_norm)
        values = self._split(self.v_proj(rows))
        if self._shared > 1:
            keys, values = (part.repeat_interleave(self._shared, 1) for part in (keys, values))
        return keys, values

    def forward(self, rows: Tensor, places: Tensor, past: PastKeyValues) -> Tensor:
        """Return the attention output of `rows` over `past`.

        Args:
            rows: [sequences, slots, reads].
            places: Positions of the rows.
            past: Keys and values that the rows attend to.
        """
        assert past.text is not None, "remember the text first"
        query = self._rotate(self.q_proj(rows), places, self.q_norm)
        query = query / query.shape[-1] ** 0.5
        scores = (query @ past.text[0].mT).float().masked_fill(~past.mask, float("-inf"))
        drafted = [(query * keys).sum(-1, keepdim=True).float() for keys, _ in past.own]
        shares = torch.cat([scores, *drafted], -1).softmax(-1)
        length = scores.shape[-1]
        attended = shares[..., :length].to(past.text[1].dtype) @ past.text[1]
        for step, (_, values) in enumerate(past.own):
            attended = attended + shares[..., length + step, None].to(values.dtype) * values
        merged: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return merged

    def _split(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], -1, self._head_dim).transpose(1, 2)

    def _rotate(self, rows: Tensor, places: Tensor, norm: RmsNorm | None) -> Tensor:
        cos, sin = self.rotary(rows, places)
        split = self._split(rows)
        split = split if norm is None else norm(split)
        half = self._head_dim // 2
        crossed = torch.cat((-split[..., half:], split[..., :half]), -1)
        turned: Tensor = split * cos[:, None] + crossed * sin[:, None]
        return turned


class Mlp(nn.Module):
    """Llama's MLP."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width, mlp = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(width, mlp, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(mlp, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """See the class."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class LlamaLayer(nn.Module):
    """Llama layer. Its attention input has a norm only if `normed` is set."""

    def __init__(
        self,
        input_width: int,
        shape: HeadShape,
        rope: Mapping[str, Any],
        has: Iterable[str],
        *,
        normed: bool,
    ) -> None:
        super().__init__()
        own = {name.removeprefix("layer.") for name in has}
        self.self_attn = Attention(input_width, shape, rope, own)
        self.mlp = Mlp(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps) if normed else None

    def norm_input(self, rows: Tensor) -> Tensor:
        """Return the attention input for rows [..., width] that enter the layer."""
        normed: Tensor = rows if self.input_layernorm is None else self.input_layernorm(rows)
        return normed

    def add_residuals(self, rows: Tensor, attended: Tensor) -> Tensor:
        """Return the output of the layer, from its input rows and their attention output."""
        rows = rows + attended
        left: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return left

    @torch.no_grad()
    def zero_outputs(self) -> None:
        """Zero the output matrices, so that the layer adds nothing until it is trained."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()


def gather_slots(rows: Tensor, slots: Tensor) -> Tensor:
    """Return the rows [sequences, slots, ...] of [sequences, n, ...] at `slots` [sequences,
    slots]."""
    index = slots.reshape(*slots.shape, *[1] * (rows.dim() - 2))
    return rows.gather(1, index.expand(*slots.shape, *rows.shape[2:]))


def make_rotary(shape: HeadShape, rope: Mapping[str, Any]) -> nn.Module:
    """Return the rotary embedding of a layer."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=shape.num_attention_heads * shape.head_dim,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        **rope,
    )
    return RotaryEmbedding(config)
