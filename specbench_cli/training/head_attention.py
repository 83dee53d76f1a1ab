"""Attention of a draft head in training: all slots of a text draft at once, each for itself."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb


@dataclass
class Past:
    """What the slots under training see: the text up to each, and what each drafted itself.

    mask: [sequences, 1, slots, length], True where a slot sees a place of the text.
    text: keys and values of all places, [sequences, heads, length, head width].
    own: keys and values of the steps after the first, [sequences, heads, slots, head width] each.
    """

    mask: Tensor
    text: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Attention(nn.Module):
    """Llama's attention over rows of `reads` numbers.

    A slot sees the text and the steps it drafted itself, never another slot's: one product of
    queries and keys for the text, and a diagonal term for each later step (EAGLE-3's training-time
    test, arXiv:2503.01840). No mask over drafted rows is needed.
    """

    def __init__(self, reads: int, config: LlamaConfig) -> None:
        super().__init__()
        self._heads = config.num_attention_heads
        self._wide = config.head_dim or config.hidden_size // self._heads
        wide = self._heads * self._wide
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(reads, wide, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def remember(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `rows` [sequences, n, reads] at `places` [sequences, n]."""
        return self._turned(self.k_proj(rows), places), self._split(self.v_proj(rows))

    def forward(self, rows: Tensor, places: Tensor, past: Past) -> Tensor:
        """What `rows` [sequences, slots, reads] at `places` see of `past`."""
        assert past.text is not None, "remember the text first"
        query = self._turned(self.q_proj(rows), places)
        query = query / query.shape[-1] ** 0.5
        scores = (query @ past.text[0].mT).float().masked_fill(~past.mask, float("-inf"))
        drafted = [(query * keys).sum(-1, keepdim=True).float() for keys, _ in past.own]
        shares = torch.cat([scores, *drafted], -1).softmax(-1)
        length = scores.shape[-1]
        seen = shares[..., :length].to(past.text[1].dtype) @ past.text[1]
        for step, (_, values) in enumerate(past.own):
            seen = seen + shares[..., length + step, None].to(values.dtype) * values
        merged: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return merged

    def _split(self, rows: Tensor) -> Tensor:
        parts: Tensor = rows.view(*rows.shape[:2], self._heads, self._wide)
        return parts.transpose(1, 2)

    def _turned(self, rows: Tensor, places: Tensor) -> Tensor:
        cos, sin = self.rotary(rows, places)
        split = self._split(rows)
        turned: Tensor = apply_rotary_pos_emb(split, split, cos, sin)[0]
        return turned


def take(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows [sequences, slots, ...] of [sequences, n, ...] at `slots` [sequences, slots]."""
    index = slots.reshape(*slots.shape, *[1] * (rows.dim() - 2))
    return rows.gather(1, index.expand(*slots.shape, *rows.shape[2:]))
