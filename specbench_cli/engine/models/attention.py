"""Attention of new rows over the KV cache, and rotary position embeddings.

A row is the hidden state of one token. The `attend_*` functions all compute softmax(q k + bias) v.
Each of them is for another use case. Unless a function's docstring says otherwise, it handles one
sequence and has these arguments:

    q: Queries [heads, rows, d].
    k: Keys, transposed, [kv heads, d, seen]. "seen" is the number of cached and new rows.
    v: Values [kv heads, seen, d].
    bias: Attention mask. Its dtype and shape depend on the function.
    out: Result [heads, rows, d].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_cli.engine import host

MAX_FEW = 32
"""Maximum number of new rows for which a CPU uses `attend_few`. Drafts and verifications have
fewer, prompts have more."""


def visible(
    start: int,
    n: int,
    *,
    device: torch.device,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return which rows each of n new rows attends to: a bool mask [n, start + n].

    `start` is the number of cached rows.

    Args:
        mask: Bool mask [n, n]: which new row attends to which new row. None means a causal mask. A
            mask [n, w + n] also covers the last w cached rows, in its first w columns.
        positions: Positions [n] of the new rows, for the sliding window. None means consecutive
            positions after the cached rows. The position of a cached row is its index.
        window: Size of the sliding window: a row attends to rows less than this many positions
            before it.
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
    """Additive causal masks, 0 or -inf, for blocks of up to `MAX_FEW` rows.

    Row i of a block after `start` cached rows attends to column j if j <= start + i. With a sliding
    window W, j > start + i - W must hold too. Both conditions depend only on j - start. So the mask
    for any `start` is a slice of one table.
    """

    def __init__(self, window: int | None, *, device: torch.device) -> None:
        self._window, self._device = window, device
        self._table = torch.empty(0)
        self._starts = -1

    def reserve(self, starts: int) -> None:
        """Allocate masks for blocks of rows after up to `starts` cached rows."""
        if starts > self._starts:
            self._starts = starts
            seen = visible(starts, MAX_FEW, device=self._device, window=self._window)
            zero = torch.zeros(seen.shape, device=self._device)
            self._table = zero.masked_fill_(~seen, -torch.inf)

    def slice(self, start: int, first: int, n: int) -> Tensor:
        """Return the mask [n, start + n - first] of n new rows after `start` cached rows.

        The mask omits the columns before `first`.
        """
        return self._table[:n, self._starts - start + first : self._starts + n]


def attend_few(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute attention for few rows, with as few torch calls as possible.

    The caller must have scaled the queries. Heads must not share keys (no grouped-query attention),
    except for a single row. A single row can pass its heads as rows: q [kv heads, heads / kv heads,
    d].

    Args:
        bias: Additive mask [rows, seen]. None is for one row, which attends to all rows.
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
    """Compute attention with torch's fused kernels, for many rows, grouped-query attention and
    CUDA.

    Args:
        bias: Bool mask [rows, seen]. None means a causal mask if `causal` is True, otherwise no
            mask.
    """
    shared = q.shape[0] != k.shape[0]
    y = F.scaled_dot_product_attention(
        q[None], k.mT[None], v[None], bias, is_causal=causal, scale=scale, enable_gqa=shared
    )
    out.copy_(y[0])


def attend_fixed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, *, scale: float
) -> None:
    """Compute attention over a fixed number of cached rows, with torch's fused kernels.

    The mask hides cache rows that are not written yet.

    Args:
        bias: Additive mask [heads / kv heads x rows, seen].
    """
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    y = F.scaled_dot_product_attention(rows[None], k.mT[None], v[None], bias, scale=scale)[0]
    if len(out) > len(y):  # heads that share keys: unflatten works for any strides
        y, out = y.unflatten(1, (-1, out.shape[1])), out.unflatten(0, (len(y), -1))
    out.copy_(y)


def attend_batch(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, *, scale: float
) -> None:
    """Compute attention for b sequences that have the same number of new rows.

    Args:
        q, out: [b, heads, rows, d].
        k, v: [b, kv heads, seen, d]. Here keys are not transposed.
        bias: Additive mask [b, 1, rows, seen].
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
    """Compute attention for b sequences. k and v may also contain slots of other sequences.

    On a GPU, reading the unused slots is cheaper than one call per sequence.

    Args:
        q, out: [b, heads, rows, d].
        k, v: [places, kv heads, seen, d]. A place is one sequence's slot in the cache.
        bias: Additive mask [places, 1, rows, seen].
        query_rows: [places], index of the sequence whose queries are used at each place. Any index
            is valid for an unused place.
        which: [b], the place of each sequence.
    """
    y = _sdpa(q.index_select(0, query_rows), k, v, bias, scale)
    out.copy_(y.index_select(0, which))


def attend_shared(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute attention for few rows with grouped-query attention.

    Heads that share keys become rows of one product.

    Args:
        bias: Additive mask [heads / kv heads x rows, seen].
    """
    assert bias is not None
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    y = torch.bmm(torch.softmax(torch.baddbmm(bias, rows, k), -1), v)
    out.copy_(y.view(out.shape))


def attend_tree(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, *, scale: float, n: int
) -> None:
    """Compute attention with any mask. A masked row has no effect, even if it contains NaN.

    Adding -inf to a NaN score gives NaN. So scores of masked rows are replaced instead. The values
    of masked rows are multiplied by zero, and 0 times NaN is NaN. So NaN values of the last n rows
    are first replaced by 0. A row that attends to a row with NaN keys still gets NaN. All other
    results equal those of `attend_few` and `attend_shared`.

    Args:
        bias: Mask [heads / kv heads x rows, seen], with values 0 or -inf.
    """
    assert bias is not None
    v[:, v.shape[1] - n :].nan_to_num_()
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    scores = torch.baddbmm(bias, rows, k, alpha=scale).masked_fill_(bias < 0, -torch.inf)
    out.copy_(torch.bmm(torch.softmax(scores, -1), v).view(out.shape))


# ---- rotary position embeddings -----------------------------------------------------------------

Table = tuple[Tensor, ...]
"""Cosines and sines of some positions, as `Rotary.rotate` needs them."""


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions (Su et al., arXiv:2104.09864, equation 15).

    This class computes the same numbers as the transformers module. Importing the transformers
    module takes a second or two.

    Args:
        config: transformers config. `fits` must accept its RoPE variant.

    Attributes:
        inv_freq: Rotation frequencies [head_dim / 2], in radians per position.
    """

    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        rope = config.rope_parameters
        kind, self._factor = rope["rope_type"], 1.0
        with torch.device("cpu"):  # the caller may have set the meta device
            if kind == "default":
                heads = config.num_attention_heads
                d = getattr(config, "head_dim", None) or config.hidden_size // heads
                frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, d, 2).float() / d)
            else:
                from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

                frequencies, self._factor = ROPE_INIT_FUNCTIONS[kind](config)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines [..., n, head_dim] of positions [..., n].

        The results have the dtype and the device of `like`.
        """
        angles = position_ids[..., None].float() * self.inv_freq.to(like.device, torch.float32)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return cos.to(like.dtype), sin.to(like.dtype)


class Rotary:
    """In-place rotation of queries and keys (RoPE).

    RoPE rotates pairs of elements. In float32, `permute` reorders the weights once, so that the two
    elements of a pair are neighbours. A rotation is then one complex product. Queries and keys have
    the same order of elements, so attention scores do not change. The factors of queries and keys
    both include the square root of the attention scale 1 / sqrt(head_dim).

    Torch has no complex products in half precision. In half precision, and with specbench's own
    kernels, elements keep the order of the checkpoint. The attention function then applies the
    scale.

    Args:
        interleaved: Whether `permute` reorders weights. Only for float32.

    Attributes:
        scale: Factor that attention must still apply to its scores.
        tables: Rotation factors of all reserved positions.
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
        """Allocate rotation factors for positions 0 to positions - 1."""
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
        """Return the weights [heads * head_dim, ...] in the element order that `rotate` needs.

        The weights are those of a query or key projection.
        """
        if not self.interleaved:
            return weight
        pairs: Tensor = weight.unflatten(0, (-1, 2, self._half)).transpose(1, 2)
        return pairs.reshape(weight.shape)

    def slice(self, start: int, n: int) -> Table:
        """Return the rotation factors of n consecutive positions."""
        return tuple(table.narrow(0, start, n) for table in self.tables)

    def select(self, positions: Tensor) -> Table:
        """Return the rotation factors of any positions, given as [rows] int64."""
        return tuple(table.index_select(0, positions) for table in self.tables)

    def as_pairs(self, x: Tensor) -> Tensor:
        """Return a view of x [rows, heads, head_dim] in the form that `rotate` needs."""
        if self.interleaved:
            return torch.view_as_complex(x.unflatten(-1, (self._half, 2)))
        return x

    def rotate(self, x: Tensor, table: Table) -> None:
        """Rotate a view from `as_pairs` in place, with the rotation factors of each row."""
        if self.interleaved:
            x.mul_(table[0])
        else:
            cos, sin = table
            swapped = x.roll(self._half, -1)
            x.mul_(cos).addcmul_(swapped, sin)
