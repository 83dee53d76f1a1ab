"""Attention of a few new rows over everything before them, one sequence at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 32
"""Blocks up to this many rows (drafting, verification) take the path with the fewest operations on CPU."""


def visible(
    start: int,
    n: int,
    *,
    device: torch.device,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Which of `start` old and n new rows each new row sees, [n, start + n] bool.

    Args:
        mask: [n, n] bool among the new rows; default: causal.
        positions: [n] of the new rows, for the window; default: the next ones. An old row's position is
            its index.
        window: a row sees rows less than this many positions before it.
    """
    block = torch.ones(n, n, dtype=torch.bool, device=device).tril() if mask is None else mask
    seen = torch.cat((torch.ones(n, start, dtype=torch.bool, device=device), block), 1)
    if window is not None:
        new = torch.arange(start, start + n, device=device) if positions is None else positions
        keys = torch.cat((torch.arange(start, device=device), new))
        seen &= keys > new[:, None] - window
    return seen


class CausalBias:
    """Additive causal masks, 0 or -inf, all of them slices of one table.

    Row i of a block after `start` rows sees column j iff j <= start + i, and within a window W iff
    j > start + i - W. In a table whose columns are counted from the end of the old rows, a mask of any
    start is a slice.
    """

    def __init__(self, window: int | None, *, dtype: torch.dtype, device: torch.device) -> None:
        self._window, self._dtype, self._device = window, dtype, device
        self._table = torch.empty(0)
        self._starts = -1

    def reserve(self, starts: int) -> None:
        """Have masks for blocks after up to `starts` rows."""
        if starts > self._starts:
            self._starts = starts
            seen = visible(starts, FEW, device=self._device, window=self._window)
            zero = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
            self._table = zero.masked_fill_(~seen, -torch.inf)

    def of(self, start: int, first: int, n: int) -> Tensor:
        """The mask of n rows after `start`, of columns from `first` on: a view [n, start + n - first]."""
        table = self._table
        width = table.shape[1]
        return table.as_strided((n, start + n - first), (width, 1), self._starts - start + first)


def attend_few(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """softmax(q k + bias) v with the fewest operations.

    Args:
        q: [heads, rows, d], already scaled; k: [heads, d, seen]; v: [heads, seen, d].
        bias: [rows, seen], or None where every row sees everything.
        out: [heads, rows, d]; contiguous where there is no bias.
    """
    if bias is None:
        torch.bmm(torch.softmax(torch.bmm(q, k), -1), v, out=out)
    else:
        out.copy_(torch.bmm(torch.softmax(torch.baddbmm(bias, q, k), -1), v))


def attend_many(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    causal: bool,
    scale: float,
    out: Tensor,
) -> None:
    """The same by torch's fused kernel, for long blocks, shared heads and CUDA.

    Args:
        q: [heads, rows, d]; k: [kv heads, d, seen]; v: [kv heads, seen, d]; out: [heads, rows, d].
        seen: [rows, seen] bool; None: everything, or the usual triangle if `causal`.
    """
    shared = q.shape[0] != k.shape[0]
    y = F.scaled_dot_product_attention(
        q[None], k.mT[None], v[None], seen, is_causal=causal, scale=scale, enable_gqa=shared
    )
    out.copy_(y[0])


def attend_tree(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, out: Tensor) -> None:
    """The same for any mask, such that nothing of an unseen row gets through, not even a NaN.

    Scores of unseen rows are replaced rather than added to, and their values, which are multiplied by
    zero, must be finite: the caller sees to that.
    """
    group = out.numel() // (k.shape[0] * seen.shape[0] * k.shape[1])
    shape = (k.shape[0], group, seen.shape[0], k.shape[1])
    scores = torch.matmul(q.reshape(shape), k[:, None]).mul_(scale)
    law = torch.softmax(scores.masked_fill_(~seen, -torch.inf), -1)
    out.copy_(torch.matmul(law, v[:, None]).reshape(out.shape))
