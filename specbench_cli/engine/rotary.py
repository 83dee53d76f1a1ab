"""Rotary position embeddings from precomputed tables.

Su et al.: RoFormer, arXiv:2104.09864. The tables are transformers' own numbers: its rotary module
is asked for every position once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Table = tuple[Tensor, ...]
"""What `Rotary.turn` needs of some positions."""


class Rotary:
    """Rotates queries and keys in place.

    In float32 the two numbers that rotate together are kept side by side, so that a rotation is one
    complex product; `arrange` permutes the weights once to that end, which no product of a query
    with a key can tell. The turns also carry the square root of attention's 1 / sqrt(head_dim).
    Half precisions have no complex numbers: they keep the checkpoint's order, and attention its
    scale.

    Attributes:
        scale: what attention still has to multiply its scores by.
        paired: whether `arrange` permutes.
    """

    def __init__(
        self, module: nn.Module, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._module, self._dtype, self._device = module, dtype, device
        self.head_dim, self._half = head_dim, head_dim // 2
        self.paired = dtype == torch.float32
        self.scale = 1.0 if self.paired else head_dim**-0.5
        self._tables: Table = (torch.empty(0),)

    def reserve(self, positions: int) -> None:
        """Have tables for positions 0..positions-1."""
        if positions <= len(self._tables[0]):
            return
        like = torch.empty(0, dtype=self._dtype)
        cos, sin = (part[0] for part in self._module(like, torch.arange(positions)[None]))
        if self.paired:
            turns = torch.complex(cos[:, : self._half].double(), sin[:, : self._half].double())
            tables: Table = ((turns * self.head_dim**-0.25).to(torch.complex64),)
        else:
            signs = torch.ones_like(sin)
            signs[:, : self._half] = -1
            tables = (cos, sin * signs)
        self._tables = tuple(table[:, None].to(self._device) for table in tables)

    def arrange(self, weight: Tensor) -> Tensor:
        """Rows [heads * head_dim, ...] of a query or key projection, in our order."""
        if not self.paired:
            return weight
        pairs: Tensor = weight.unflatten(0, (-1, 2, self._half)).transpose(1, 2)
        return pairs.reshape(weight.shape)

    def at(self, start: int, n: int) -> Table:
        """Tables of n consecutive positions."""
        return tuple(table.narrow(0, start, n) for table in self._tables)

    def select(self, positions: Tensor) -> Table:
        """Tables of any positions, [rows] int64."""
        return tuple(table.index_select(0, positions) for table in self._tables)

    def view(self, x: Tensor) -> Tensor:
        """The view of x [rows, heads, head_dim] that `turn` works on."""
        if self.paired:
            return torch.view_as_complex(x.unflatten(-1, (self._half, 2)))
        return x

    def turn(self, x: Tensor, table: Table) -> None:
        """Rotate a `view` in place by tables of its rows."""
        if self.paired:
            x.mul_(table[0])
        else:
            cos, sin = table
            swapped = x.roll(self._half, -1)
            x.mul_(cos).addcmul_(swapped, sin)
