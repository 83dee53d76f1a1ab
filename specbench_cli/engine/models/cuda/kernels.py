"""Triton kernels for forwards in CUDA graphs: fused operations, and products with one row.

For an operation such as RMSNorm, torch runs several kernels. Each kernel takes microseconds, and
the GPU is partly idle at the end of each kernel. For a product with a single row, torch reads the
weights at only 0.8 of the memory bandwidth. Triton (Tillet, Kung and Cox, MAPL 2019) comes with
torch for CUDA.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# Triton reads the annotations of kernels and supports only its own.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Number of elements of a row that one Triton program computes in `silu_mul`."""

WEIGHTS = (2, 2048)
"""Number of weight rows that one program of `multiply_row` multiplies, and of their elements per
step."""

QUERIES, SEEN, KEYS = 64, 1024, 64
"""Limits of `attend`: maximum number of queries per KV head, maximum number of rows read, and rows
per step.

Beyond the first two, torch's kernels are faster, because they split the rows among programs."""


@triton.jit
def _rms_norm(x, row_stride, weight, y, eps, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    size = tl.sum(value * value, 0) / width + eps
    scaled = value * tl.rsqrt(size) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, scaled.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    rows,
    cache,
    head_stride,
    heads,
    kv,
    half,
    largest,
    CLEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    inside, d = at < half, 2 * half
    here = qkv + (row * (heads + 2 * kv) + head) * d + at
    low = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(here + half, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv:
        c, s = cos + row * d + at, sin + row * d + at
        c_low, c_high = tl.load(c, mask=inside), tl.load(c + half, mask=inside)
        s_low, s_high = tl.load(s, mask=inside), tl.load(s + half, mask=inside)
        turned = low * c_low + high * s_low
        high = high * c_high + low * s_high
        low = turned
    elif CLEAN:
        low = tl.minimum(tl.maximum(tl.where(low == low, low, 0.0), -largest), largest)
        high = tl.minimum(tl.maximum(tl.where(high == high, high, 0.0), -largest), largest)
    if head >= heads:
        here = cache + (head - heads) * head_stride + tl.load(rows + row) * d + at
    tl.store(here, low.to(qkv.dtype.element_ty), mask=inside)
    tl.store(here + half, high.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    qkv,
    cache,
    head_stride,
    rows,
    y,
    heads,
    kv,
    n,
    window,
    scale,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    group, query, d = tl.program_id(0), tl.arange(0, QUERIES), tl.arange(0, D)
    new, head = query % n, group * (heads // kv) + query // n
    real = (query < n * (heads // kv))[:, None]
    q = tl.load(qkv + (new * (heads + 2 * kv) + head)[:, None] * D + d[None, :], mask=real, other=0)
    at, end = tl.load(rows + new), tl.load(rows + n - 1) + 1
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, D), tl.float32)
    keys = cache + group * head_stride
    for first in range(0, end, KEYS):
        column = first + tl.arange(0, KEYS)
        there = (column < end)[:, None]
        where = column[:, None] * D + d[None, :]
        k = tl.load(keys + where, mask=there, other=0)
        sees = (column[None, :] <= at[:, None]) & (column[None, :] > at[:, None] - window)
        scores = tl.where(sees, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # If a row has not attended to any key yet, the maximum is -inf. Then -inf - -inf would give
        # NaN, so use 0.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        chances, fade = tl.exp(scores - safe[:, None]), tl.exp(best - safe)
        v = tl.load(keys + kv * head_stride + where, mask=there, other=0)
        total = total * fade + tl.sum(chances, 1)
        mixed = mixed * fade[:, None] + tl.dot(chances.to(v.dtype), v)
        best = higher
    mixed = mixed / total[:, None]
    out = y + (new * heads + head)[:, None] * D + d[None, :]
    tl.store(out, mixed.to(y.dtype.element_ty), mask=real)


@triton.jit
def _silu_mul(gate_up, y, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    here = gate_up + row * 2 * width + at
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        y + row * width + at, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=inside
    )


@triton.jit
def _multiply_row(
    x,
    weight,
    bias,
    y,
    k,
    n,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = rows < n
    begin = weight + rows.to(tl.int64)[:, None] * k
    sums = tl.zeros((TILE, BLOCK), tl.float32)
    for first in range(0, k, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < k
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        wide = known[:, None] & inside[None, :]
        read = tl.load(begin + at[None, :], mask=wide, other=0.0, eviction_policy="evict_first")
        sums += read.to(tl.float32) * value[None, :]
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + rows, mask=known, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(y + rows, mask=known, other=0.0).to(tl.float32)
    tl.store(y + rows, total.to(y.dtype.element_ty), mask=known)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each row of `rows` [..., width]."""
    width = rows.shape[-1]
    flat, out = rows.reshape(-1, width), rows.new_empty(rows.shape)
    block = triton.next_power_of_2(width)
    _rms_norm[(len(flat),)](
        *(flat, flat.stride(0), weight, out, eps, width),
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return out


def rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, cache: Tensor, kv: int, *, clean: bool
) -> None:
    """Rotate queries in place, and write rotated keys and values to the cache.

    Args:
        qkv: Queries, keys and values [n, (heads + 2 kv) d].
        cos, sin: [n, 1, d]. The first half of the sines is negated.
        rows: Indices [n] of the new rows in `cache`.
        cache: KV cache [2 kv, capacity, d].
        clean: Whether to replace non-finite values, as `nan_to_num` does. This is needed because
            masked values are still multiplied by zero (see `attention.attend_tree`).
    """
    n, d = len(qkv), cache.shape[-1]
    heads = qkv.shape[1] // d - 2 * kv
    largest = min(torch.finfo(each).max for each in (qkv.dtype, torch.float32))
    _rotate_and_store[(n, heads + 2 * kv)](
        *(qkv, cos, sin, rows, cache, cache.stride(0), heads, kv, d // 2, largest),
        CLEAN=clean,
        BLOCK=triton.next_power_of_2(d // 2),
        num_warps=1,
    )


def supports_attention(queries: int, seen: int, rows: Tensor) -> bool:
    """Return True if the kernel `attend` supports these sizes.

    Args:
        queries: Number of queries per KV head.
        seen: Number of rows that attention reads.
        rows: KV cache [..., d].
    """
    d = rows.shape[-1]
    return queries <= QUERIES and seen <= SEEN and 16 <= d <= 128 and d & (d - 1) == 0


def attend(
    qkv: Tensor,
    cache: Tensor,
    rows: Tensor,
    out: Tensor,
    kv: int,
    window: int | None,
    scale: float,
) -> None:
    """Compute the attention of a chain of new rows over all cached rows and the new rows.

    The kernel uses the online softmax (Milakov and Gimelshein, arXiv:1805.02867).

    Args:
        qkv: Queries (already rotated), keys and values [n, (heads + 2 kv) d].
        cache: KV cache [2 kv, capacity, d].
        rows: Indices [n] of the new rows in the cache.
        out: Result [n, heads d].
        window: Maximum number of rows that each row attends to, including itself. None means no
            limit.
    """
    n, d = len(qkv), cache.shape[-1]
    heads = qkv.shape[1] // d - 2 * kv
    _attend[(kv,)](
        *(qkv, cache, cache.stride(0), rows, out, heads, kv, n),
        cache.shape[1] if window is None else window,
        scale,
        D=d,
        QUERIES=max(16, triton.next_power_of_2(n * (heads // kv))),
        KEYS=KEYS,
        num_warps=4,
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return SiLU(gate) * up, [n, width]. Each row of `gate_up` [n, 2 width] contains
    both halves."""
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    _silu_mul[(n, triton.cdiv(width, COLUMNS))](gate_up, out, width, BLOCK=COLUMNS)
    return out


def multiply_row(
    row: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool = False
) -> Tensor:
    """Multiply a row [1, in] by weights [out, in]. Write or add the product to `out` [1, out]."""
    (n, k), (tile, block) = weight.shape, WEIGHTS
    _multiply_row[(triton.cdiv(n, tile),)](
        *(row, weight, row if bias is None else bias, out, k, n),
        ADD=add,
        BIAS=bias is not None,
        TILE=tile,
        BLOCK=min(block, triton.next_power_of_2(k)),
        num_warps=8 if k >= block else 4,
    )
    return out


@cache
def are_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the Triton kernels of this module compile on this machine.

    They support only half precision. Triton needs a C compiler.
    """
    if dtype.itemsize != 2:
        return False
    row, weight = (torch.ones(n, 64, dtype=dtype, device=device) for n in (1, 4))
    try:
        found = multiply_row(row, weight, None, row.new_empty(1, 4))
        return bool((found == 64).all())
    except Exception:  # Triton raises any exception if there is no compiler
        return False
