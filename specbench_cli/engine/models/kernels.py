"""Products of a few rows with weights that a processor reads once, compiled for it by Numba.

A forward over one row or six is bound by the reading of the weights. Torch's libraries read them at
half of the speed that memory has where a processor is not the one they are tuned for; and what
they sum in which order depends on how many rows there are. Here each number is

    y[r, j] = sum over i of x[r, i] w[j, i]

summed in the same order whatever other rows there are and however many threads: 16 partial sums,
each over every sixteenth i, added up in the end. So a token's products are the same bit for bit in
plain decoding and in any draft's verification.

A tile is ROWS rows by COLUMNS rows of weights, whose partial sums stay in registers (Goto and van de
Geijn, ACM TOMS 34(3), 2008), while the weights of the next tile are fetched ahead, a line for each
line that is read: what a processor fetches by itself ends at every page.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# Numba compiles from types that it finds out itself, and has no annotations of its own.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

numba.config.THREADING_LAYER = "omp"

LANES, UNROLL = 8, 2
STEP = LANES * UNROLL
"""Numbers of a row that are multiplied at a time; a matrix has a multiple of them in a row."""

ROWS, COLUMNS = 6, 2
"""Rows x rows of weights of a tile: 12 sums, 2 weights and a number fill 16 registers."""

PANEL = 48
"""Rows that stay in a core's cache while weights go past them."""

LINE = 64
"""Bytes that memory is read by."""

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class _Tile:
    """Writes the code of a tile's sums.

    Args:
        half: whether weights and results are bfloat16. Of 16 such weights the even ones are then
            one register's upper halves and the odd ones its lower; rows are float32 in any case,
            in that order (`_spread`).
    """

    def __init__(self, builder: ir.IRBuilder, rows: int, *, half: bool) -> None:
        self.b, self.rows, self.half = builder, rows, half
        self.size = 2 if half else 4

    def write(self, w: Any, x: Any, y: Any, bias: Any, add: Any, n_in: Any, n_out: Any) -> None:
        """Sums of `rows` rows at x with COLUMNS rows of weights at w, to y: all are addresses."""
        b, pairs = self.b, [(r, j) for r in range(self.rows) for j in range(COLUMNS)]
        w_row, x_row = b.mul(n_in, _int(self.size)), b.mul(n_in, _int(4))
        weights = [b.add(w, b.mul(w_row, _int(j))) for j in range(COLUMNS)]
        rows = [b.add(x, b.mul(x_row, _int(r))) for r in range(self.rows)]
        ahead = b.mul(w_row, _int(COLUMNS))
        before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
        b.branch(loop)
        b.position_at_end(loop)
        i = b.phi(I64)
        i.add_incoming(_int(0), before)
        held = {pair: b.phi(FLOATS) for pair in pairs}
        sums: dict[tuple[int, int], Any] = dict(held)
        at_w, at_x = b.mul(i, _int(self.size)), b.mul(i, _int(4))
        for begin in weights:
            self._fetch(b.add(b.add(begin, at_w), ahead))
        columns = [self._weights(b.add(begin, at_w)) for begin in weights]
        for part in range(UNROLL):
            for r, begin in enumerate(rows):
                at = b.add(b.add(begin, at_x), _int(part * LANES * 4))
                number = b.load(b.inttoptr(at, FLOATS.as_pointer()), align=4)
                for j in range(COLUMNS):
                    sums[r, j] = b.call(
                        self._known(FLOATS, [FLOATS] * 3, f"llvm.fma.v{LANES}f32"),
                        [columns[j][part], number, sums[r, j]],
                    )
        more = b.add(i, _int(STEP))
        i.add_incoming(more, loop)
        for pair, total in sums.items():
            held[pair].add_incoming(ir.Constant(FLOATS, [0.0] * LANES), before)
            held[pair].add_incoming(total, loop)
        b.cbranch(b.icmp_signed("<", more, n_in), loop, after)
        b.position_at_end(after)
        for (r, j), total in sums.items():
            self._finish(total, r, j, y, bias, add, n_out)

    def _fetch(self, address: Any) -> None:
        """Have a line of memory ready; none need be there."""
        void, pointer = ir.VoidType(), ir.IntType(8).as_pointer()
        fetch = self._known(void, [pointer, I32, I32, I32], "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
        for line in range(0, STEP * self.size, LINE):
            at = self.b.add(address, _int(line))
            self.b.call(fetch, [self.b.inttoptr(at, pointer), read, keep, data])

    def _weights(self, address: Any) -> list[Any]:
        """STEP weights as float32."""
        b = self.b
        if self.half:
            both = b.load(b.inttoptr(address, INTS.as_pointer()), align=2)
            low = b.shl(both, ir.Constant(INTS, [16] * LANES))
            high = b.and_(both, ir.Constant(INTS, [0xFFFF0000] * LANES))
            return [b.bitcast(low, FLOATS), b.bitcast(high, FLOATS)]
        return [
            b.load(
                b.inttoptr(b.add(address, _int(part * LANES * 4)), FLOATS.as_pointer()), align=4
            )
            for part in range(UNROLL)
        ]

    def _finish(self, sums: Any, r: int, j: int, y: Any, bias: Any, add: Any, n_out: Any) -> None:
        """Add partial sums up, and the bias and what is there already if that is asked for."""
        b = self.b
        adds = self._known(F32, [F32, FLOATS], f"llvm.vector.reduce.fadd.v{LANES}f32")
        slot = cgutils.alloca_once(b, F32)
        b.store(b.call(adds, [ir.Constant(F32, -0.0), sums], fastmath=("reassoc",)), slot)
        place = b.add(y, b.mul(b.add(b.mul(n_out, _int(r)), _int(j)), _int(self.size)))
        with b.if_then(b.icmp_signed("!=", bias, _int(0))):
            own = b.add(bias, _int(4 * j))
            b.store(b.fadd(b.load(slot), b.load(b.inttoptr(own, F32.as_pointer()))), slot)
        there = b.inttoptr(place, (I16 if self.half else F32).as_pointer())
        with b.if_then(b.icmp_signed("!=", add, _int(0))):
            number = b.load(there)
            if self.half:
                number = b.bitcast(b.shl(b.zext(number, I32), ir.Constant(I32, 16)), F32)
            b.store(b.fadd(b.load(slot), number), slot)
        total = b.load(slot)
        b.store(self._rounded(total) if self.half else total, there)

    def _rounded(self, number: Any) -> Any:
        """float32 as the nearest bfloat16's bits, of two as near the even one."""
        b = self.b
        bits = b.bitcast(number, I32)
        odd = b.and_(b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
        near = b.add(bits, b.add(odd, ir.Constant(I32, 0x7FFF)))
        # A number that is none stays none: rounding could make its bits those of an infinity.
        bits = b.select(
            b.fcmp_unordered("uno", number, number), ir.Constant(I32, 0x7FC00000), near
        )
        return b.trunc(b.lshr(bits, ir.Constant(I32, 16)), I16)

    def _known(self, returns: Any, takes: list[Any], name: str) -> Any:
        return cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(returns, takes), name
        )


def _int(value: int) -> Any:
    return ir.Constant(I64, value)


def _tile(rows: int, *, half: bool) -> Any:
    """The function of a tile, for compiled code to call; its arguments are `_Tile.write`'s."""

    @intrinsic
    def tile(_, w, x, y, bias, add, n_in, n_out):
        def generate(context, builder, _signature, args):
            _Tile(builder, rows, half=half).write(*args)
            return context.get_dummy_value()

        return types.void(w, x, y, bias, add, n_in, n_out), generate

    return tile


@intrinsic
def _spread(_, source, target, n):
    """n bfloat16 numbers at `source` as float32 at `target`: of 16 the even ones, then the odd."""

    def generate(context, b, _signature, args):
        source, target, n = args
        with cgutils.for_range_slice(b, _int(0), n, _int(STEP), I64) as (i, _):
            at = b.add(source, b.mul(i, _int(2)))
            parts = _Tile(b, 0, half=True)._weights(at)
            for part, numbers in enumerate(parts):
                to = b.add(target, b.mul(b.add(i, _int(part * LANES)), _int(4)))
                b.store(numbers, b.inttoptr(to, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(source, target, n), generate


_one, _two, _three, _four, _five, _six = (_tile(rows, half=False) for rows in range(1, ROWS + 1))
_one_half, _two_half, _three_half, _four_half, _five_half, _six_half = (
    _tile(rows, half=True) for rows in range(1, ROWS + 1)
)

@njit(parallel=True, cache=True, boundscheck=False)
def times(w, x, y, bias, add, n, n_in, n_out):
    """Rows x [n, in] times float32 weights [out, in], to y [n, out]: all are addresses.

    Args:
        bias: of out numbers; 0: none.
        add: whether what is at y is added, 0 or 1.
    """
    for start in range(0, n, PANEL):
        stop = min(n, start + PANEL)
        for pair in prange(n_out // COLUMNS):
            j = pair * COLUMNS
            wj, bj = w + j * n_in * 4, bias + j * 4 * (bias != 0)
            for r in range(start, stop, ROWS):
                xr, yr = x + r * n_in * 4, y + (r * n_out + j) * 4
                left = stop - r
                if left >= 6:
                    _six(wj, xr, yr, bj, add, n_in, n_out)
                elif left == 5:
                    _five(wj, xr, yr, bj, add, n_in, n_out)
                elif left == 4:
                    _four(wj, xr, yr, bj, add, n_in, n_out)
                elif left == 3:
                    _three(wj, xr, yr, bj, add, n_in, n_out)
                elif left == 2:
                    _two(wj, xr, yr, bj, add, n_in, n_out)
                else:
                    _one(wj, xr, yr, bj, add, n_in, n_out)


@njit(parallel=True, cache=True, boundscheck=False)
def times_half(w, x, wide, y, bias, add, n, n_in, n_out):
    """As `times`, of bfloat16 rows, weights and results, and a bias of float32; sums are float32
    and rounded once. `wide` is room for the rows in float32."""
    _spread(x, wide, n * n_in)
    for start in range(0, n, PANEL):
        stop = min(n, start + PANEL)
        for pair in prange(n_out // COLUMNS):
            j = pair * COLUMNS
            wj, bj = w + j * n_in * 2, bias + j * 4 * (bias != 0)
            for r in range(start, stop, ROWS):
                xr, yr = wide + r * n_in * 4, y + (r * n_out + j) * 2
                left = stop - r
                if left >= 6:
                    _six_half(wj, xr, yr, bj, add, n_in, n_out)
                elif left == 5:
                    _five_half(wj, xr, yr, bj, add, n_in, n_out)
                elif left == 4:
                    _four_half(wj, xr, yr, bj, add, n_in, n_out)
                elif left == 3:
                    _three_half(wj, xr, yr, bj, add, n_in, n_out)
                elif left == 2:
                    _two_half(wj, xr, yr, bj, add, n_in, n_out)
                else:
                    _one_half(wj, xr, yr, bj, add, n_in, n_out)


def ready(*, half: bool) -> Callable[..., None]:
    """`times` or `times_half`, compiled; in seconds the first time on a machine, and then kept."""
    made, n = (times_half, 9) if half else (times, 8)
    made.compile((types.int64,) * n)
    return made


def use_threads(n: int) -> None:
    """Have this thread's products made by n threads, or as many as there are processors."""
    numba.set_num_threads(min(n, numba.config.NUMBA_NUM_THREADS))
