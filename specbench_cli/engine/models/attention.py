"""Attention of a block of new rows over everything before them, one sequence at a time.

The `attend_*` functions compute softmax(q k + bias) v and differ in what they are good at. They
take

    q: [heads, rows, d], queries;
    k: [kv heads, d, seen], keys, transposed; v: [kv heads, seen, d], values;
    bias: what limits sight, of a kind of their own;
    out: [heads, rows, d], where the result goes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_cli.engine import host

MAX_FEW = 32
"""Blocks up to this many rows (drafting, verification) take `attend_few` on a CPU."""


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
        mask: [n, n] bool among the new rows; default: causal. With more columns, the first of them
            are the last old rows, of which a new row may not see all either.
        positions: [n] of the new rows, for the window; default: the next ones. An old row's
            position is its index.
        window: a row sees rows less than this many positions before it.
    """
    block = torch.ones(n, n, dtype=torch.bool, device=device).tril() if mask is None else mask
    free = start + n - block.shape[1]
    seen = torch.cat((torch.ones(n, free, dtype=torch.bool, device=device), block), 1)
    if window is not None:
        new = torch.arange(start, start + n, device=device) if positions is None else positions
        keys = torch.cat((torch.arange(start, device=device), new))
        seen &= keys > new[:, None] - window
    return seen


class CausalBias:
    """Additive causal masks, 0 or -inf, for blocks of up to `MAX_FEW` rows: slices of one table.

    Row i of a block after `start` rows sees column j iff j <= start + i, and within a window W iff
    j > start + i - W. In a table whose columns are counted from the end of the old rows, the mask
    of any start is a slice.
    """

    def __init__(self, window: int | None, *, device: torch.device) -> None:
        self._window, self._device = window, device
        self._table = torch.empty(0)
        self._starts = -1

    def reserve(self, starts: int) -> None:
        """Have masks for blocks after up to `starts` rows."""
        if starts > self._starts:
            self._starts = starts
            seen = visible(starts, MAX_FEW, device=self._device, window=self._window)
            zero = torch.zeros(seen.shape, device=self._device)
            self._table = zero.masked_fill_(~seen, -torch.inf)

    def of(self, start: int, first: int, n: int) -> Tensor:
        """The mask of n rows after `start` on columns from `first`, [n, start + n - first]."""
        return self._table[:n, self._starts - start + first : self._starts + n]


def attend_few(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """With the fewest operations: for few rows, scaled queries and heads of their own.

    One row's heads that share keys count as rows: q [kv heads, heads / kv heads, d].

    Args:
        bias: [rows, seen] to add; None for one row, which sees everything.
    """
    if bias is None:
        torch.bmm(torch.softmax(torch.bmm(q, k), -1), v, out=out)
    else:
        out.copy_(torch.bmm(torch.softmax(torch.baddbmm(bias, q, k), -1), v))


def attend_many(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    causal: bool = False,
) -> None:
    """By torch's fused kernels: for long blocks, shared heads and CUDA.

    Args:
        bias: [rows, seen] bool; None: everything, or the usual triangle if `causal`.
    """
    shared = q.shape[0] != k.shape[0]
    y = F.scaled_dot_product_attention(
        q[None], k.mT[None], v[None], bias, is_causal=causal, scale=scale, enable_gqa=shared
    )
    out.copy_(y[0])


def attend_fixed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, *, scale: float
) -> None:
    """By torch's fused kernels over a fixed number of rows, of which a bias says what is there.

    Args:
        bias: as in `attend_shared`.
    """
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    y = F.scaled_dot_product_attention(rows[None], k.mT[None], v[None], bias, scale=scale)[0]
    if len(out) > len(y):  # heads that share keys: views, however the rows lie
        y, out = y.unflatten(1, (-1, out.shape[1])), out.unflatten(0, (len(y), -1))
    out.copy_(y)


def attend_batch(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, *, scale: float
) -> None:
    """For b sequences with as many new rows each.

    Args:
        q, out: [b, heads, rows, d]; k, v: [b, kv heads, seen, d], keys not transposed.
        bias: [b, 1, rows, seen] to add.
    """
    out.copy_(_sdpa(q, k, v, bias, scale))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=shared)


def attend_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    query_rows: Tensor,
    which: Tensor,
) -> None:
    """`attend_batch` for b sequences with others between them in k and v, which are read in
    vain: that is cheaper on an accelerator than a call for each.

    Args:
        q, out: [b, heads, rows, d]; k, v: [places, kv heads, seen, d].
        bias: [places, 1, rows, seen] to add.
        query_rows: [places], the sequence whose queries each place is read with: any one's where
            none is.
        which: [b], the place of each sequence.
    """
    y = _sdpa(q.index_select(0, query_rows), k, v, bias, scale)
    out.copy_(y.index_select(0, which))


def attend_shared(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`attend_few` where heads share keys: they count as rows.

    Args:
        bias: [heads / kv heads x rows, seen] to add.
    """
    assert bias is not None
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    y = torch.bmm(torch.softmax(torch.baddbmm(bias, rows, k), -1), v)
    out.copy_(y.view(out.shape))


def attend_tree(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, *, scale: float, n: int
) -> None:
    """For any mask, such that nothing of an unseen row gets through, not even a NaN.

    Scores of unseen rows are replaced rather than added to. Their values are multiplied by zero, so
    NaN among those of the last n rows gives way to 0; whoever sees such a row still gets NaN
    through its keys. Otherwise number for number what `attend_few` and `attend_shared` give.

    Args:
        bias: as in `attend_shared`, 0 or -inf.
    """
    assert bias is not None
    v[:, v.shape[1] - n :].nan_to_num_()
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    scores = torch.baddbmm(bias, rows, k, alpha=scale).masked_fill_(bias < 0, -torch.inf)
    out.copy_(torch.bmm(torch.softmax(scores, -1), v).view(out.shape))


# ---- rotary position embeddings -----------------------------------------------------------------

Table = tuple[Tensor, ...]
"""What `Rotary.rotate` needs of some positions."""


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, as transformers' modules of our families make them, whose
    import takes a second or two (Su et al., arXiv:2104.09864, equation 15).

    Args:
        config: transformers' config, of a rotary variant that `fits` knows.

    Attributes:
        inv_freq: [head_dim / 2], radians a position.
    """

    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope = config.rope_parameters
        kind, self._factor = rope["rope_type"], 1.0
        with torch.device("cpu"):  # whatever its caller makes on the meta device
            if kind == "default":
                heads = config.num_attention_heads
                d = getattr(config, "head_dim", None) or config.hidden_size // heads
                frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, d, 2).float() / d)
            else:
                from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

                frequencies, self._factor = ROPE_INIT_FUNCTIONS[kind](config)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., n, head_dim] of positions [..., n], in the dtype and on the
        device of `like`."""
        angles = position_ids[..., None].float() * self.inv_freq.to(like.device, torch.float32)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return cos.to(like.dtype), sin.to(like.dtype)


class Rotary:
    """Rotates queries and keys in place.

    Of torch's operations the fewest in float32 are taken by keeping the two numbers that rotate
    together side by side: a rotation is one complex product then; `permute` permutes the weights
    once to that end, which no product of a query with a key can tell. The turns also carry the
    square root of attention's 1 / sqrt(head_dim). Half precisions have no complex numbers: they
    keep the checkpoint's order, and attention its scale, and so does what kernels of our own turn.

    Args:
        interleaved: whether `permute` permutes; float32 alone.

    Attributes:
        scale: what attention still has to multiply its scores by.
        tables: of all positions so far reserved.
    """

    def __init__(
        self,
        module: nn.Module,
        head_dim: int,
        *,
        interleaved: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._module, self._dtype, self._device = module, dtype, device
        self.head_dim, self._half, self.interleaved = head_dim, head_dim // 2, interleaved
        self.scale = 1.0 if self.interleaved else head_dim**-0.5
        self.tables: Table = (torch.empty(0),)

    def reserve(self, positions: int) -> None:
        """Have tables for positions 0..positions-1."""
        if positions <= len(self.tables[0]):
            return
        like = torch.empty(0, dtype=self._dtype)
        cos, sin = (part[0] for part in self._module(like, torch.arange(positions)[None]))
        if self.interleaved:
            turns = torch.complex(cos[:, : self._half].double(), sin[:, : self._half].double())
            tables: Table = ((turns * self.head_dim**-0.25).to(torch.complex64),)
        else:
            signs = torch.ones_like(sin)
            signs[:, : self._half] = -1
            tables = (cos, sin * signs)
        self.tables = tuple(host.send(table[:, None], self._device) for table in tables)

    def permute(self, weight: Tensor) -> Tensor:
        """Rows [heads * head_dim, ...] of a query or key projection, in our order."""
        if not self.interleaved:
            return weight
        pairs: Tensor = weight.unflatten(0, (-1, 2, self._half)).transpose(1, 2)
        return pairs.reshape(weight.shape)

    def slice(self, start: int, n: int) -> Table:
        """Tables of n consecutive positions."""
        return tuple(table.narrow(0, start, n) for table in self.tables)

    def select(self, positions: Tensor) -> Table:
        """Tables of any positions, [rows] int64."""
        return tuple(table.index_select(0, positions) for table in self.tables)

    def as_pairs(self, x: Tensor) -> Tensor:
        """The view of x [rows, heads, head_dim] that `rotate` works on."""
        if self.interleaved:
            return torch.view_as_complex(x.unflatten(-1, (self._half, 2)))
        return x

    def rotate(self, x: Tensor, table: Table) -> None:
        """Rotate a `as_pairs` in place by tables of its rows."""
        if self.interleaved:
            x.mul_(table[0])
        else:
            cos, sin = table
            swapped = x.roll(self._half, -1)
            x.mul_(cos).addcmul_(swapped, sin)
