"""CPU kernels for forwards of `FusedDecoder` over few rows, compiled by Numba for this processor.

There are kernels for matrix products, RMSNorm, SiLU, rotary embeddings and attention, in float32
and bfloat16. A row is the hidden state of one token. A forward over few rows is memory-bound: its
time is the time to read the weights. torch's libraries are not tuned for some processors, and read
the weights there at half of the memory bandwidth. These kernels are for such processors.

The order of summation in torch's libraries also depends on the number of rows. Here each element of
a product is

    y[r, j] = sum over i of x[r, i] w[j, i]

The kernel computes eight partial sums, and adds them in the same order for any number of rows and
threads. So the products of a token are bitwise equal in plain decoding and in the verification of
any draft.

The product is computed in tiles of up to ROWS input rows by COLUMNS weight rows. The partial sums
of a tile stay in registers (Goto and van de Geijn, ACM TOMS 34(3), 2008). The two weight rows of a
tile are half a matrix apart. So memory is read in two sequential streams, which the processor
prefetches. The processor did not prefetch neighbouring weight rows: the product of one row with
bfloat16 weights then took 1.35 times as long.

All kernels are in one file because of Numba's cache. Numba recompiles a function only if the
function's own file changes, not if the function calls a changed function of another file.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disable-error-code="call-arg, no-untyped-call, unreachable"
# Numba infers the types of compiled functions. Their arguments are memory addresses, because
# creating a NumPy array from a tensor takes longer than some of these kernels.

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import carray, njit, prange, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from specbench_cli.engine.models.attention import MAX_FEW
from specbench_cli.engine.models.compiler import numba

CONFIG: Any = numba.config
CONFIG.THREADING_LAYER = "omp"  # Numba then shares torch's OpenMP threads

LANES, UNROLL = 8, 2
STEP = LANES * UNROLL
"""Number of elements of a row that one step multiplies. Row lengths must be a multiple of it."""

ROWS, COLUMNS = 6, 2
"""Maximum number of input rows, and number of weight rows, of a tile.

Then 12 sums, 2 weights and an input fill the 16 vector registers."""

PREFETCH_BYTES = 1024
"""Prefetch distance in bytes, for bfloat16 weights.

Converting weights to float32 leaves the memory idle, and prefetching saves 10% of the time at six
rows. It had no effect on float32 weights."""

PANEL_ROWS = 48
"""Number of input rows that stay in a core's cache while the weights are read once."""

CACHE_LINE_BYTES = 64
"""Bytes of a cache line. If data are aligned to it, no load of a register reads two lines."""

OPTIONS: Any = {"cache": True, "boundscheck": False, "error_model": "numpy"}
SUM_OPTIONS: Any = OPTIONS | {"fastmath": {"reassoc", "contract", "nsz"}}
"""Numba options. `SUM_OPTIONS` also lets Numba reorder sums, so that it can use vector
instructions."""

NO_WINDOW = 1 << 62
"""Value of the argument `window` for full attention."""

LARGEST = np.finfo(np.float32).max

SCORE_MULTIPLE = 64
"""Attention scores are padded to a multiple of this number.

Then the order in which they are added up does not depend on the number of cached rows."""

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class _Tile:
    """Generator of LLVM code for one tile of a matrix product.

    Args:
        rows: Number of input rows.
        half: Whether weights and results are bfloat16. One register then holds the 8 even-numbered
            weights of a group of 16, converted to float32. Another register holds the 8
            odd-numbered weights. The input rows must be float32 in the same order
            (`_widen_even_odd`).
    """

    def __init__(self, builder: ir.IRBuilder, rows: int, *, half: bool) -> None:
        self.b, self.rows, self.half = builder, rows, half
        self.size = 2 if half else 4

    def write_products(
        self,
        w: Any,
        x: Any,
        y: Any,
        bias: Any,
        add: Any,
        wide: Any,
        n_in: Any,
        n_out: Any,
        weight_stride: Any,
    ) -> None:
        """Generate code that multiplies the input rows at x by COLUMNS weight rows, and writes to
        y.

        All arguments are LLVM values.

        Args:
            w, x, y, bias: Addresses. If the address of the bias is 0, there is no bias.
            add: Whether to add the products to the present values of y.
            wide: Whether to write float32 results even if the weights are bfloat16.
            weight_stride: Distance between the tile's weight rows, in rows.
        """
        b, pairs = self.b, [(r, j) for r in range(self.rows) for j in range(COLUMNS)]
        w_row, x_row = b.mul(n_in, _int(self.size)), b.mul(n_in, _int(4))
        weights = [b.add(w, b.mul(b.mul(w_row, weight_stride), _int(j))) for j in range(COLUMNS)]
        rows = [b.add(x, b.mul(x_row, _int(r))) for r in range(self.rows)]
        before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
        b.branch(loop)
        b.position_at_end(loop)
        i = b.phi(I64)
        i.add_incoming(_int(0), before)
        held = {pair: b.phi(FLOATS) for pair in pairs}
        sums: dict[tuple[int, int], Any] = dict(held)
        at_w, at_x = b.mul(i, _int(self.size)), b.mul(i, _int(4))
        for begin in weights if self.half else ():
            self._prefetch(b.add(b.add(begin, at_w), _int(PREFETCH_BYTES)))
        for part in range(UNROLL):
            columns = [self.load_part(b.add(begin, at_w), part) for begin in weights]
            for r, begin in enumerate(rows):
                at = b.add(b.add(begin, at_x), _int(part * LANES * 4))
                number = b.load(b.inttoptr(at, FLOATS.as_pointer()), align=4)
                for j in range(COLUMNS):
                    sums[r, j] = self.fma(columns[j], number, sums[r, j])
            if self.half and part + 1 < UNROLL:
                # The sums fill all registers. The barrier makes the compiler load the inputs of the
                # next part again. Otherwise it would keep the inputs in registers and move sums to
                # memory.
                b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
        more = b.add(i, _int(STEP))
        i.add_incoming(more, loop)
        for pair, total in sums.items():
            held[pair].add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
            held[pair].add_incoming(total, loop)
        b.cbranch(b.icmp_signed("<", more, n_in), loop, after)
        b.position_at_end(after)
        self._finish(sums, y, bias, add, wide, n_out, weight_stride)

    def write_weighted_sums(self, p: Any, p_row: Any, v: Any, n: Any, width: Any, y: Any) -> None:
        """Generate code that writes the sums over c of p[r, c] v[c] to y, in float32.

        Attention uses it, with probabilities p and values v. If v is bfloat16, the elements of a
        result have the order of `_widen_even_odd`.

        Args:
            p: Address of the float32 rows p[r].
            p_row: Distance between these rows, in bytes.
            v: Address of n rows [n, width].
        """
        b, rows = self.b, range(self.rows)
        with cgutils.for_range_slice(b, _int(0), width, _int(STEP), I64) as (j, _):
            before, loop = b.block, b.append_basic_block("mix")
            after = b.append_basic_block("mixed")
            b.branch(loop)
            b.position_at_end(loop)
            c = b.phi(I64)
            c.add_incoming(_int(0), before)
            held = [[b.phi(FLOATS) for _ in range(UNROLL)] for _ in rows]
            at = b.mul(b.add(b.mul(c, width), j), _int(self.size))
            values = self.load_weights(b.add(v, at))
            sums = []
            for r in rows:
                place = b.add(b.add(p, b.mul(p_row, _int(r))), b.mul(c, _int(4)))
                chance = b.load(b.inttoptr(place, F32.as_pointer()))
                none = ir.Constant(FLOATS, ir.Undefined)
                one = b.insert_element(none, chance, ir.Constant(I32, 0))
                wide = b.shuffle_vector(one, none, ir.Constant(INTS, [0] * LANES))
                sums.append([self.fma(wide, values[part], held[r][part]) for part in range(UNROLL)])
            more = b.add(c, _int(1))
            c.add_incoming(more, loop)
            for r in rows:
                for part in range(UNROLL):
                    held[r][part].add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
                    held[r][part].add_incoming(sums[r][part], loop)
            b.cbranch(b.icmp_signed("<", more, n), loop, after)
            b.position_at_end(after)
            for r in rows:
                for part in range(UNROLL):
                    place = b.add(b.mul(b.add(b.mul(width, _int(r)), j), _int(4)), y)
                    place = b.add(place, _int(part * LANES * 4))
                    b.store(sums[r][part], b.inttoptr(place, FLOATS.as_pointer()), align=4)

    def load_weights(self, address: Any) -> list[Any]:
        """Generate code that loads STEP weights at an address as float32."""
        return [self.load_part(address, part) for part in range(UNROLL)]

    def load_part(self, address: Any, part: int) -> Any:
        """Generate code that loads LANES of the STEP weights at an address, as float32.

        `part` is the index of these LANES weights.
        """
        b = self.b
        if not self.half:
            at = b.add(address, _int(part * LANES * 4))
            return b.load(b.inttoptr(at, FLOATS.as_pointer()), align=4)
        both = b.load(b.inttoptr(address, INTS.as_pointer()), align=2)
        if part:
            return b.bitcast(b.and_(both, ir.Constant(INTS, [0xFFFF0000] * LANES)), FLOATS)
        return b.bitcast(b.shl(both, ir.Constant(INTS, [16] * LANES)), FLOATS)

    def _prefetch(self, address: Any) -> None:
        """Generate code that prefetches the cache line at an address into the nearest cache."""
        place, b = ir.IntType(8).as_pointer(), self.b
        fetch = self._get_function(ir.VoidType(), [place, I32, I32, I32], "llvm.prefetch.p0")
        reads, near, data = (ir.Constant(I32, number) for number in (0, 3, 1))
        b.call(fetch, [b.inttoptr(address, place), reads, near, data])

    def fma(self, a: Any, x: Any, total: Any) -> Any:
        """Generate code for total + a x, rounded once (fused multiply-add)."""
        known = self._get_function(FLOATS, [FLOATS] * 3, f"llvm.fma.v{LANES}f32")
        return self.b.call(known, [a, x, total])

    def _finish(
        self,
        sums: dict[tuple[int, int], Any],
        y: Any,
        bias: Any,
        add: Any,
        wide: Any,
        n_out: Any,
        weight_stride: Any,
    ) -> None:
        """Generate code that adds up the partial sums, adds the bias, and writes the results to y.

        If `add` is True, the code also adds the present values of y. It processes LANES results at
        a time.
        """
        b, pairs = self.b, list(sums)
        groups = [pairs[at : at + LANES] for at in range(0, len(pairs), LANES)]
        slots = [
            cgutils.alloca_once_value(b, self._reduce_sums([sums[pair] for pair in group]))
            for group in groups
        ]
        with b.if_then(b.icmp_signed("!=", bias, _int(0))):
            of = [b.add(bias, b.mul(weight_stride, _int(j * 4))) for j in range(COLUMNS)]
            own = self._gather(F32, of * (LANES // COLUMNS))
            for slot in slots:
                b.store(b.fadd(b.load(slot), own), slot)

        def write_sums(kind: Any, size: int) -> None:
            for slot, group in zip(slots, groups, strict=True):
                numbers = [
                    b.add(b.mul(n_out, _int(r)), b.mul(weight_stride, _int(j))) for r, j in group
                ]
                places = [b.add(y, b.mul(number, _int(size))) for number in numbers]
                with b.if_then(b.icmp_signed("!=", add, _int(0))):
                    present = self._gather(kind, places)
                    if kind is I16:
                        present = b.zext(present, INTS)
                        present = b.bitcast(b.shl(present, ir.Constant(INTS, [16] * LANES)), FLOATS)
                    b.store(b.fadd(b.load(slot), present), slot)
                total = b.load(slot)
                made = self._round_to_bfloat16(total) if kind is I16 else total
                for lane, place in enumerate(places):
                    one = b.extract_element(made, ir.Constant(I32, lane))
                    b.store(one, b.inttoptr(place, kind.as_pointer()), align=size)

        if not self.half:
            write_sums(F32, 4)
            return
        with b.if_else(b.icmp_signed("!=", wide, _int(0))) as (then, otherwise):
            with then:
                write_sums(F32, 4)
            with otherwise:
                write_sums(I16, 2)

    def _reduce_sums(self, sums: list[Any]) -> Any:
        """Return a register whose elements are the sums of up to LANES registers.

        The order of addition within a register is always ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
        """
        b = self.b
        sums = sums + [ir.Constant(FLOATS, ir.Undefined)] * (LANES - len(sums))
        sums = [each for pair in zip(sums[:4], sums[4:], strict=True) for each in pair]
        for low, weight_stride in (
            ((0, 1, 2, 3, 8, 9, 10, 11), 4),
            ((0, 1, 8, 9, 4, 5, 12, 13), 2),
            ((0, 2, 8, 10, 4, 6, 12, 14), 1),
        ):
            lows = ir.Constant(INTS, list(low))
            highs = ir.Constant(INTS, [place + weight_stride for place in low])
            sums = [
                b.fadd(b.shuffle_vector(one, other, lows), b.shuffle_vector(one, other, highs))
                for one, other in zip(sums[::2], sums[1::2], strict=True)
            ]
        return sums[0]

    def _gather(self, kind: Any, places: list[Any]) -> Any:
        """Generate code that loads the elements at up to LANES addresses into one register."""
        b, held = self.b, ir.Constant(ir.VectorType(kind, LANES), ir.Undefined)
        for lane, place in enumerate(places):
            one = b.load(b.inttoptr(place, kind.as_pointer()), align=2 if kind is I16 else 4)
            held = b.insert_element(held, one, ir.Constant(I32, lane))
        return held

    def _round_to_bfloat16(self, numbers: Any) -> Any:
        """Return the bits of float32 numbers rounded to bfloat16: to the nearest, ties to even."""
        b = self.b
        half, one, limit, none = (
            ir.Constant(INTS, [number] * LANES) for number in (16, 1, 0x7FFF, 0x7FC00000)
        )
        bits = b.bitcast(numbers, INTS)
        near = b.add(bits, b.add(b.and_(b.lshr(bits, half), one), limit))
        # Return NaN for NaN. Rounding could turn the bits of a NaN into those of an infinity.
        bits = b.select(b.fcmp_unordered("uno", numbers, numbers), none, near)
        return b.trunc(b.lshr(bits, half), ir.VectorType(I16, LANES))

    def _get_function(self, returns: Any, takes: list[Any], name: str) -> Any:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(returns, takes), name)


def _int(value: int) -> Any:
    return ir.Constant(I64, value)


# ---- functions that compiled code calls ---------------------------------------------------------


def _switch(b: ir.IRBuilder, rows: Any, half: Any, write: Callable[[_Tile], None]) -> None:
    """Generate code for tiles of 1 to ROWS rows in both dtypes, and a branch that selects one."""
    done = b.append_basic_block("done")
    switch = b.switch(b.add(rows, b.mul(half, _int(ROWS))), done)
    for kind, n in product((False, True), range(1, ROWS + 1)):
        block = b.append_basic_block("tile")
        switch.add_case(_int(n + kind * ROWS), block)
        b.position_at_end(block)
        write(_Tile(b, n, half=kind))
        b.branch(done)
    b.position_at_end(done)


@intrinsic
def _sums(_, rows, half, w, x, y, bias, add, wide, n_in, n_out, weight_stride):
    """Compute a tile of a product with 1 to ROWS rows (`_Tile.write_products`)."""

    def generate(context, builder, _signature, args):
        _switch(builder, *args[:2], lambda tile: tile.write_products(*args[2:]))
        return context.get_dummy_value()

    return types.void(rows, half, w, x, y, bias, add, wide, n_in, n_out, weight_stride), generate


@intrinsic
def _weighted_sums(_, rows, half, p, p_row, v, n, width, y):
    """Compute weighted sums for 1 to ROWS rows (`_Tile.write_weighted_sums`)."""

    def generate(context, builder, _signature, args):
        _switch(builder, *args[:2], lambda tile: tile.write_weighted_sums(*args[2:]))
        return context.get_dummy_value()

    return types.void(rows, half, p, p_row, v, n, width, y), generate


@intrinsic
def _widen_even_odd(_, source, target, n):
    """Convert n bfloat16 numbers to float32.

    In each group of 16 numbers, the result has the even-numbered ones first, then the odd-numbered
    ones.
    """

    def generate(context, b, _signature, args):
        source, target, n = args
        with cgutils.for_range_slice(b, _int(0), n, _int(STEP), I64) as (i, _):
            parts = _Tile(b, 0, half=True).load_weights(b.add(source, b.mul(i, _int(2))))
            for part, numbers in enumerate(parts):
                to = b.add(target, b.mul(b.add(i, _int(part * LANES)), _int(4)))
                b.store(numbers, b.inttoptr(to, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(source, target, n), generate


@intrinsic
def _pointer(_, address):
    """Return an address as a pointer, which Numba's `carray` needs."""

    def generate(_context, b, _signature, args):
        return b.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@njit(**OPTIONS)
def _floats(address, n):
    """Return an array of n float32 numbers at an address."""
    return carray(_pointer(address), n, np.float32)


@njit(**OPTIONS)
def _halves(address, n):
    """Return an array with the bits of n bfloat16 numbers at an address."""
    return carray(_pointer(address), n, np.uint16)


@njit(**OPTIONS)
def _flags(address, n):
    """Return an array of n bytes (a mask) at an address."""
    return carray(_pointer(address), n, np.uint8)


@njit(**OPTIONS)
def _widen(bits):
    """Return the float32 number with the given bfloat16 bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(**OPTIONS)
def _round(number):
    """Return the bits of a number rounded to bfloat16: to the nearest, ties to even."""
    bits = np.float32(number).view(np.uint32)
    if number != number:
        return np.uint16(0x7FC0)
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(**OPTIONS)
def _exp(x):
    """Return e^x with a relative error of about 2e-7. The compiler can vectorize this function.

    The result is 2^n times a polynomial (Cody and Waite, Software Manual for the Elementary
    Functions, 1980, chapter 6). For NaN the result is NaN.
    """
    x = np.float32(88.0) if x > np.float32(88.0) else x
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(0.5)
    y = y * r * r + r + np.float32(1)
    power = np.int32(np.int32(n) + np.int32(127)) << np.int32(23)
    return y * np.int32(power).view(np.float32)


# ---- kernels ------------------------------------------------------------------------------------


@njit(parallel=True, **OPTIONS)
def _multiply(w, x, wide, y, bias, add, n, n_in, n_out, half):
    size = 2 if half else 4
    if half:
        _widen_even_odd(x, wide, n * n_in)
        x = wide
    weight_stride = n_out // COLUMNS
    for start in range(0, n, PANEL_ROWS):
        stop = min(n, start + PANEL_ROWS)
        for j in prange(weight_stride):
            at, own = w + j * n_in * size, bias + j * 4 * (bias != 0)
            for r in range(start, stop, ROWS):
                to = y + (r * n_out + j) * size
                rows, xr = min(ROWS, stop - r), x + r * n_in * 4
                _sums(rows, half, at, xr, to, own, add, 0, n_in, n_out, weight_stride)


@njit(**OPTIONS)
def _read(address, row, half):
    """Read a row of float32 or bfloat16 numbers at an address, as float32."""
    if half:
        bits = _halves(address, len(row))
        for i in range(len(row)):
            row[i] = _widen(bits[i])
    else:
        numbers = _floats(address, len(row))
        for i in range(len(row)):
            row[i] = numbers[i]


@njit(**OPTIONS)
def _write(row, address, half):
    """Write a float32 row to an address, as bfloat16 or float32."""
    if half:
        bits = _halves(address, len(row))
        for i in range(len(row)):
            bits[i] = _round(row[i])
    else:
        numbers = _floats(address, len(row))
        for i in range(len(row)):
            numbers[i] = row[i]


@njit(**SUM_OPTIONS)
def _rms_norm(x, weight, y, n, width, eps, half):
    size = 2 if half else 4
    scale, row = _floats(weight, width), np.empty(width, np.float32)
    for r in range(n):
        _read(x + r * width * size, row, half)
        total = np.float32(0)
        for i in range(width):
            total += row[i] * row[i]
        by = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(eps))
        for i in range(width):
            row[i] = row[i] * by * scale[i]
        _write(row, y + r * width * size, half)


@njit(**OPTIONS)
def _silu_mul(gate_up, y, n, width, half):
    for r in range(n):
        if half:
            gates = _halves(gate_up + r * width * 4, width)
            ups = _halves(gate_up + (r * 2 + 1) * width * 2, width)
            bits = _halves(y + r * width * 2, width)
            for i in range(width):
                gate = _widen(gates[i])
                bits[i] = _round(gate / (np.float32(1) + _exp(-gate)) * _widen(ups[i]))
        else:
            gate_row = _floats(gate_up + r * width * 8, width)
            up_row = _floats(gate_up + (r * 2 + 1) * width * 4, width)
            row = _floats(y + r * width * 4, width)
            for i in range(width):
                gate = gate_row[i]
                row[i] = gate / (np.float32(1) + _exp(-gate)) * up_row[i]


@njit(**OPTIONS)
def _rotate_and_store(qkv, cos, sin, cache, head_stride, start, n, heads, kv, d, half):
    size, middle, across = 2 if half else 4, d // 2, (heads + 2 * kv) * d
    row, c, s = np.empty(d, np.float32), np.empty(d, np.float32), np.empty(d, np.float32)
    for r in range(n):
        _read(cos + r * d * size, c, half)
        _read(sin + r * d * size, s, half)
        for head in range(heads + 2 * kv):
            at = qkv + (r * across + head * d) * size
            to = (
                at
                if head < heads
                else cache + ((head - heads) * head_stride + (start + r) * d) * size
            )
            _read(at, row, half)
            if head < heads + kv:
                for i in range(middle):
                    low, high = row[i], row[i + middle]
                    row[i] = low * c[i] + high * s[i]
                    row[i + middle] = high * c[i + middle] + low * s[i + middle]
            elif n > 1:
                for i in range(d):
                    row[i] = _clean(row[i])
            _write(row, to, half)


@njit(**OPTIONS)
def _clean(number):
    """Return the number, or 0 if it is infinite or NaN."""
    return number if abs(number) <= LARGEST else np.float32(0)


@njit(**SUM_OPTIONS)
def _attend_block(  # noqa: C901  one loop nest: functions of it would pass its pointers around
    qkv,
    cache,
    head_stride,
    y,
    start,
    first,
    n,
    heads,
    kv,
    d,
    mask,
    width,
    window,
    scale,
    half,
    group,
    begin,
):
    """Compute attention for up to ROWS query rows of one KV head, starting at query row `begin`.

    The KV head has one query row for each new token and each query head that uses this KV head.
    """
    size, across, shared = 2 if half else 4, (heads + 2 * kv) * d, heads // kv
    seen = start + n - first
    room = (seen + SCORE_MULTIPLE - 1) // SCORE_MULTIPLE * SCORE_MULTIPLE
    rows = min(ROWS, shared * n - begin)
    buffer = np.empty(rows * (2 * d + room), np.float32)
    q = np.int64(buffer.ctypes.data)
    mixed, scores = q + rows * d * 4, q + rows * d * 8
    for r in range(rows):
        head, new = group * shared + (begin + r) // n, (begin + r) % n
        at, to = qkv + (new * across + head * d) * size, q + r * d * 4
        if half:
            _widen_even_odd(at, to, d)
        else:
            old, row = _floats(at, d), _floats(to, d)
            for i in range(d):
                row[i] = old[i]
    keys = cache + (group * head_stride + first * d) * size
    for c in range(0, seen, COLUMNS):
        _sums(rows, half, keys + c * d * size, q, scores + c * 4, 0, 0, 1, d, room, 1)
    for r in range(rows):
        own = _floats(scores + r * room * 4, room)
        last = start + (begin + r) % n - first  # last row that it attends to in a chain
        for c in range(max(0, min(seen, last - window + 1))):
            own[c] = -np.inf
        if width:
            sees = _flags(mask + (begin + r) % n * width, width)
            for c in range(max(0, width - seen), width):
                if not sees[c]:
                    own[seen - width + c] = -np.inf
        for c in range(seen if width else last + 1, room):
            own[c] = -np.inf
        best = np.float32(-np.inf)
        for c in range(seen):
            best = max(best, own[c])
        total = np.float32(0)
        for c in range(room):
            chance = _exp((own[c] - best) * np.float32(scale))
            own[c] = np.float32(0) if own[c] == -np.inf else chance
            total += own[c]
        for c in range(seen):
            own[c] /= total
    values = cache + ((kv + group) * head_stride + first * d) * size
    _weighted_sums(rows, half, scores, room * 4, values, seen, d, mixed)
    for r in range(rows):
        head, new = group * shared + (begin + r) // n, (begin + r) % n
        to, result = y + (new * heads + head) * d * size, _floats(mixed + r * d * 4, d)
        if half:
            bits = _halves(to, d)
            for i in range(0, d, STEP):
                for k in range(LANES):
                    bits[i + 2 * k] = _round(result[i + k])
                    bits[i + 2 * k + 1] = _round(result[i + LANES + k])
        else:
            row = _floats(to, d)
            for i in range(d):
                row[i] = result[i]


@njit(parallel=True, **OPTIONS)
def _attend(
    qkv, cache, head_stride, y, start, first, n, heads, kv, d, mask, width, window, scale, half
):
    blocks = (heads // kv * n + ROWS - 1) // ROWS
    for unit in prange(kv * blocks):
        group, begin = unit // blocks, unit % blocks * ROWS
        _attend_block(
            qkv,
            cache,
            head_stride,
            y,
            start,
            first,
            n,
            heads,
            kv,
            d,
            mask,
            width,
            window,
            scale,
            half,
            group,
            begin,
        )


# ---- functions of torch tensors -----------------------------------------------------------------

# A forward of more than MAX_FEW rows is compute-bound. It uses torch's multithreaded operations
# instead.

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that the kernels support. The argument `half` is an index in this tuple."""


def can_tile(n_in: int, n_out: int) -> bool:
    """Return True if the kernels support a matrix with n_in columns and n_out rows."""
    return n_in % STEP == 0 and n_out % COLUMNS == 0


def compile_kernels() -> None:
    """Compile all kernels. The first compilation on a machine takes seconds.

    Numba caches the result next to this file, or in the folder NUMBA_CACHE_DIR.
    """
    number, threads = types.int64, torch.get_num_threads()
    _multiply.compile((number,) * 10)
    _rms_norm.compile((*(number,) * 5, types.float64, number))
    _silu_mul.compile((number,) * 5)
    _rotate_and_store.compile((number,) * 11)
    _attend.compile((*(number,) * 13, types.float64, number))
    # The first compilation sets OpenMP to all processors. Restore torch's number of threads.
    torch.set_num_threads(threads)


class _Threads(threading.local):
    """Number of threads that kernels use when they are called from the current thread."""

    n = 0


_threads = _Threads()


def _use_torch_threads() -> None:
    """Set the number of threads of the kernels to torch's number of threads."""
    n = torch.get_num_threads()
    if _threads.n != n:
        _threads.n = n
        numba.set_num_threads(min(n, CONFIG.NUMBA_NUM_THREADS))
        # The first call sets OpenMP to all processors. Restore torch's number of threads.
        torch.set_num_threads(n)


class _ThreadBuffer(threading.local):
    """Buffer of the current thread. All products share it, so it stays in the processor's cache."""

    numbers, address = np.empty(0, np.float32), 0


_buffer = _ThreadBuffer()


def _buffer_address(n: int) -> int:
    """Return the address of the current thread's buffer, with space for n float32 numbers."""
    if _buffer.numbers.size < n + CACHE_LINE_BYTES // 4:
        _buffer.numbers = np.empty(n + CACHE_LINE_BYTES // 4, np.float32)
        _buffer.address = -(-_buffer.numbers.ctypes.data // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    return _buffer.address


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
    """Write x W^T + bias to `out` [n, out], for rows x [n, in] and a weight matrix W [out, in].

    All tensors are row-major. `can_tile` must return True for the shape of W.

    Args:
        bias: Bias [out], in float32.
        add: Whether to add the product to the present values of `out`.
    """
    _use_torch_threads()
    (n, n_in), half = x.shape, DTYPES.index(weight.dtype)
    wide, own = _buffer_address(n * n_in) if half else 0, 0 if bias is None else bias.data_ptr()
    where = weight.data_ptr(), x.data_ptr(), wide, out.data_ptr(), own
    _multiply(*where, int(add), n, n_in, weight.shape[0], half)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of rows [..., width]. The weight must be float32."""
    width = rows.shape[-1]
    n = rows.numel() // width
    if n > MAX_FEW:
        return torch.rms_norm(rows.float(), (width,), weight, eps).to(rows.dtype)
    rows = rows.contiguous()
    out, half = torch.empty_like(rows), DTYPES.index(rows.dtype)
    _rms_norm(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), n, width, eps, half)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return SiLU(gate) * up, [n, width]. Each row of `gate_up` [n, 2 width] contains
    both halves."""
    if len(gate_up) > MAX_FEW:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    _silu_mul(gate_up.data_ptr(), out.data_ptr(), n, width, DTYPES.index(gate_up.dtype))
    return out


def layer_functions(
    rows: Tensor,
    scratch: Tensor,
    out: Tensor,
    table: tuple[Tensor, Tensor],
    kv: int,
    span: tuple[int, int, int],
    *,
    mask: Tensor | None,
    window: int | None,
    scale: float,
) -> list[tuple[Callable[..., None], Callable[..., None]]]:
    """Return two functions for each layer of a forward.

    The first function rotates new queries and keys, and writes keys and values to the cache. The
    second function computes attention. Both ignore their arguments, because they use fixed
    addresses.

    Args:
        rows: KV cache of one sequence, [layers, 2 kv, capacity, d].
        scratch: Queries, keys and values of the new rows, [n, (heads + 2 kv) d].
        out: Attention result, [n, heads d].
        table: Cosines and signed sines [n, 1, d] of the new rows.
        span: Three numbers: index of the first new row in `rows`, index of the first row that
            attention reads, number of new rows.
        mask: Bool mask [n, w]: which of the last w rows each new row attends to. None means a
            causal mask.
        window: Maximum number of rows that each row attends to, including itself. None means no
            limit.
    """
    start, first, n = span
    d, size = rows.shape[-1], rows.element_size()
    heads, half, head_stride = out.shape[1] // d, DTYPES.index(rows.dtype), rows.stride(1)
    where, to = scratch.data_ptr(), out.data_ptr()
    cos, sin = (part.data_ptr() for part in table)
    own = None if mask is None else mask.contiguous().view(torch.uint8)
    sees = (0, 0) if own is None else (own.data_ptr(), own.shape[1])
    wide = NO_WINDOW if window is None else window

    def store(_: Tensor, *, cache: int) -> None:
        _rotate_and_store(where, cos, sin, cache, head_stride, start, n, heads, kv, d, half)

    def attend(*_: Any, cache: int, alive: Any = own) -> None:
        _use_torch_threads()
        _attend(
            where, cache, head_stride, to, start, first, n, heads, kv, d, *sees, wide, scale, half
        )

    begin, step = rows.data_ptr(), rows.stride(0) * size
    addresses = range(begin, begin + step * len(rows), step)
    return [(partial(store, cache=at), partial(attend, cache=at)) for at in addresses]
