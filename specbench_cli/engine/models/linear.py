"""Matrix products with fixed weights, in the form that this machine multiplies fastest.

Six forms, the same numbers up to rounding:

* `PlainLinear`: one matrix [in, out] for `torch.mm`. Blocks of a few rows run faster on it than on
  the [out, in] of a checkpoint, and slices of it, transposed, are views of the checkpoint's
  matrices, so transformers' own module can share the memory.
* `PackedLinear`: reordered once for oneDNN (what inductor's freezing emits). Its time is the
  reading of the weights up to some 8 rows, where MKL's, behind `torch.mm`, grows from the second
  row on; each call costs more than `torch.mm`'s.
* `BlockedLinear`: narrow blocks of columns for `torch.bmm`, which MKL multiplies as they lie. Its
  time is the reading of the weights up to some 8 rows, and its calls cost little.
* `Packed16Linear`: bfloat16 weights packed once for FBGEMM as float16 numbers times a power of two,
  which processors without bfloat16 instructions widen to float32 in registers, between the reading
  and the multiplying. Its time is the reading of the weights up to some 14 rows.
* `TiledLinear`: the checkpoint's own [out, in], multiplied by kernels of ours that Numba compiles
  (`kernels.py`). Its time is little more than that of reading the weights up to some 6 rows; a
  row's products are the same bit for bit in any block.
* `WidenedLinear`: bfloat16 weights, of which a piece at a time is converted and multiplied in
  float32, where neither bfloat16 instructions nor FBGEMM are to be had.

Which form is used is a rule on the machine, the shapes and the number of rows, not a measurement at
load: the forms differ in the last bits, so a choice that could fall differently tomorrow would make
outputs at a near-tie irreproducible. benchmarks/times/forward_rows.py measures what the rule
is made of; docs/explanations/kernels.md has the figures.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_cli.errors import UsageError

Form = Literal["plain", "tiled", "blocked", "packed", "packed16", "widened"]
FORM_VARIABLE = "SPECBENCH_LINEAR"
"""Environment variable that overrides the rule, for tests and for measuring the rule itself."""

PACK_FROM = 1 << 16
"""Least number of weights of a matrix worth packing: below, oneDNN's fixed cost outweighs it."""

PACK_OVER = 1 << 20
"""Without MKL, a matrix with more weights than these is worth packing."""

BLOCK_FROM = 1 << 19
"""Where MKL is fast, least number of weights of a matrix worth blocking: smaller ones stay in a
core's cache, where `torch.mm` is faster."""

BLOCK_UP_TO = 1 << 22
"""Where MKL is fast, most weights of a matrix worth blocking: packed, larger ones take as long, as
the cost of a call is nothing beside the reading."""

LARGEST_EXPONENT = 16
"""float16's largest number is just below 2^16; bfloat16's 8 bits below it are held exactly."""

LONG = 256
"""Rows from which `torch.mm` multiplies float32 faster than tiles: those of a prompt alone."""

WIDEN_FROM = 5
"""Rows from which bfloat16 is widened: its cost is flat, and for fewer rows above `torch.mm`'s."""

PIECE = 1 << 18
"""Weights widened at a time: 1 MiB of float32, which stays in a core's cache until multiplied."""


class Linear(Protocol):
    """x [rows, in] -> x W (+ bias), [rows, out]."""

    nbytes: int

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The product; into `out` where the form can."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, out] + the product; `residual` may be overwritten."""

    def columns(self, start: int, stop: int) -> Tensor | None:
        """A view of the checkpoint's rows start..stop, [stop - start, in]; None where packed."""


class PlainLinear:
    """`torch.mm` with a matrix [in, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(self.bias, x, self.weight, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self.weight)

    def columns(self, start: int, stop: int) -> Tensor | None:
        return self.weight[:, start:stop].t()


class TiledLinear:
    """Kernels of our own with weights [out, in] of float32 or bfloat16, in row-major order.

    Args:
        weight: [in, out], the transpose of a matrix in row-major order that can be cut into tiles
            (`kernels.tiles`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        from specbench_cli.engine.models import kernels  # here, as Numba takes a while

        self._times, self.weight = kernels.times, weight.t().contiguous()
        self._across = self.weight.t()
        self.bias = None if bias is None else bias.float()
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._long = LONG if weight.dtype == torch.float32 else math.inf

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(x.shape[0], self.weight.shape[0])
        return self._multiply(x, out, add=False)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._multiply(x, residual, add=True)

    def columns(self, start: int, stop: int) -> Tensor | None:
        return self.weight[start:stop]

    def _multiply(self, x: Tensor, out: Tensor, *, add: bool) -> Tensor:
        if x.shape[0] >= self._long:
            torch.addmm(out, x, self._across, beta=add, out=out)
            return out if self.bias is None else out.add_(self.bias)
        if not out.is_contiguous():
            return out.copy_(self._multiply(x, out.contiguous(), add=add))
        self._times(x.contiguous(), self.weight, self.bias, out, add=add)
        return out


class PackedLinear:
    """oneDNN with a matrix reordered for blocks of a few rows.

    For each number of rows oneDNN compiles a program of half a megabyte and keeps it: 2 ms at the
    first prompt of a length, and memory that grows with every length. So long blocks are filled up
    with rows of zeros to the next multiple of `ROWS`, the longer ones to sixteen lengths from each
    power of two to the next; no row's numbers depend on how many there are.
    """

    ROWS = 8  # the block height the reordering is tuned to: the width of a verification
    EVEN_FROM = 65  # rows from which blocks are filled up: none that is verified is

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), self.ROWS)
        prefer_large_pages(torch.ops.mkldnn.data_ptr(self.weight), weight.nbytes)
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_plus = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y: Tensor = self._product(self._even(x), self.weight, self.bias, "none", [], "")
        return y[: len(x)] if out is None else out.copy_(y[: len(x)])

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self._product_plus(
            self._even(x), self._even(residual), self.weight, self.bias, "add"
        )
        return y[: len(x)]

    def _even(self, x: Tensor) -> Tensor:
        """Rows [n, in], filled up with zeros where blocks are long."""
        n = len(x)
        if n < self.EVEN_FROM:
            return x
        lacking = -n % max(self.ROWS, 1 << n.bit_length() - 5)
        return F.pad(x, (0, 0, 0, lacking)) if lacking else x

    def columns(self, start: int, stop: int) -> Tensor | None:
        return None


class BlockedLinear:
    """`torch.bmm` with blocks of columns, [blocks, in, width].

    For two rows and more MKL copies a wide matrix into such blocks before it multiplies, which
    reads it twice. What is as narrow is multiplied as it lies, a block by each thread in turn.
    Where no width divides the columns, the last block is filled up with zeros.
    """

    WIDTHS = (48, 32)  # the fastest for a single row first

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias, (n_in, self._n_out) = bias, weight.shape
        width = next((w for w in self.WIDTHS if self._n_out % w == 0), self.WIDTHS[0])
        self._n_blocks = -(-self._n_out // width)
        lacking = self._n_blocks * width - self._n_out
        self._whole = not lacking
        filled = F.pad(weight, (0, lacking)) if lacking else weight
        self.weight = filled.reshape(n_in, self._n_blocks, width).transpose(0, 1).contiguous()
        prefer_large_pages(self.weight.data_ptr(), self.weight.nbytes)
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) == 1 and self._whole and out is not None:
            torch.bmm(self._repeated(x), self.weight, out=out.view(self._n_blocks, 1, -1))
        elif out is None:
            out = self._product(x)
        else:
            out.copy_(self._product(x))
        return out if self.bias is None else out.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.bias is not None:
            residual.add_(self.bias)
        if len(x) == 1 and self._whole:
            residual.view(self._n_blocks, 1, -1).baddbmm_(self._repeated(x), self.weight)
            return residual
        return residual.add_(self._product(x))

    def columns(self, start: int, stop: int) -> Tensor | None:
        return None

    def _repeated(self, x: Tensor) -> Tensor:
        """Rows [n, in] for each block; a view."""
        return x.expand(self._n_blocks, -1, -1)

    def _product(self, x: Tensor) -> Tensor:
        """[n, out]: a row of each block after the other."""
        y = torch.bmm(self._repeated(x), self.weight).transpose(0, 1).reshape(len(x), -1)
        return y if self._whole else y[:, : self._n_out].contiguous()


class Packed16Linear:
    """FBGEMM with bfloat16 weights held as float16 numbers times one power of two.

    float16 has more bits than bfloat16 and a shorter range: with the power that brings the largest
    weight just below float16's largest number, weights down to 2^-33 of it are exact, and smaller
    ones are off by less than 2^-40 of it, which is less than float32 sums keep. Sums are float32,
    rounded once at the end. With AVX-512 a row's are the same bit for bit whatever rows and however
    many threads it is multiplied with; without it those of one row differ in float32's last bits
    from those of a block, and one number in some ten thousand is rounded to its neighbour.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype, self.nbytes = weight.dtype, weight.nbytes + (0 if bias is None else bias.nbytes)
        largest = float(weight.abs().max())
        finite = math.isfinite(largest)
        power = min(LARGEST_EXPONENT - math.frexp(largest)[1], 100) if finite else 0
        held = weight.t().float() * 2.0**power
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            held.contiguous(), None if bias is None else bias.float()
        )
        # FBGEMM clamps what float16 cannot hold; weights that are not finite are not to pass for
        # such. Of one dimension, not none, so that the product with bfloat16 rows is float32.
        self._power = torch.tensor([2.0**-power if finite else math.nan])
        self._product = torch.ops.quantized.linear_dynamic_fp16

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self._wide(x)
        return y.to(self.dtype) if out is None else out.copy_(y)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.add_(self._wide(x))

    def columns(self, start: int, stop: int) -> Tensor | None:
        return None

    def _wide(self, x: Tensor) -> Tensor:
        """The product in float32."""
        y: Tensor = self._product(x * self._power, self._packed)
        return y


class WidenedLinear(PlainLinear):
    """Weights of half precision, multiplied in float32: products are rounded once, at the end."""

    _buffers = threading.local()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) < WIDEN_FROM:
            return super().__call__(x, out)
        y = self._wide(x)
        return y.to(self.weight.dtype) if out is None else out.copy_(y)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if len(x) < WIDEN_FROM:
            return super().add_to(residual, x)
        return residual.add_(self._wide(x))

    def _wide(self, x: Tensor) -> Tensor:
        """The product in float32."""
        n_in, n_out = self.weight.shape
        step = max(1, min(n_out, PIECE // n_in))
        wide, y = self._buffer(n_in * step), torch.empty(len(x), n_out)
        rows = x.float()
        for start in range(0, n_out, step):
            piece = self.weight[:, start : start + step]
            held = wide[: piece.numel()].view(piece.shape).copy_(piece)
            torch.mm(rows, held, out=y[:, start : start + step])
        return y if self.bias is None else y.add_(self.bias)

    @classmethod
    def _buffer(cls, numel: int) -> Tensor:
        """Memory of this thread's for so many numbers: the same for all products, so it is warm."""
        held: Tensor | None = getattr(cls._buffers, "held", None)
        if held is None or held.numel() < numel:
            with torch.inference_mode(False):  # products outside of it write here as well
                held = cls._buffers.held = torch.empty(max(numel, PIECE))
        return held


def linear(weight: Tensor, bias: Tensor | None = None, *, form: Form | None = None) -> Linear:
    """A product with weight [in, out] and bias [out], in the given form or the one of the rule."""
    made: dict[Form, Callable[[Tensor, Tensor | None], Linear]] = {
        "plain": PlainLinear,
        "tiled": TiledLinear,
        "blocked": BlockedLinear,
        "packed": PackedLinear,
        "packed16": Packed16Linear,
        "widened": WidenedLinear,
    }
    return made[form or choose_form(weight)](weight, bias)


def choose_form(weight: Tensor) -> Form:
    """The form that the rule, or SPECBENCH_LINEAR where it can be had, gives a matrix [in, out].

    Raises:
        UsageError: the variable names no form.
    """
    wanted = os.environ.get(FORM_VARIABLE, "")
    if wanted not in ("", *get_args(Form)):
        forms = " or ".join(get_args(Form))
        raise UsageError(f"{FORM_VARIABLE}={wanted} is unknown; it can be {forms}")
    if weight.device.type != "cpu":
        return "plain"
    if weight.dtype == torch.float32:
        possible, usual, limit = _forms_32(weight.numel())
    elif weight.dtype == torch.bfloat16:
        possible, usual, limit = _forms_16()
    else:
        return "plain"
    if wanted == "tiled" or _mkl_is_slow():
        kernels = find_numba_kernels(weight.device, weight.dtype)
        if kernels is not None and kernels.tiles(*weight.shape):
            return "tiled"
    if wanted:
        return wanted if wanted in possible else "plain"
    return usual if usual in possible and weight.numel() >= limit else "plain"


def _forms_32(numbers: int) -> tuple[set[Form], Form, int]:
    """Return a float32 matrix's possible forms, its default form, and the minimum size for it."""
    possible: set[Form] = {"blocked", "packed"} if _can_pack() else {"blocked"}
    if _mkl_is_slow():
        return possible, "packed", PACK_FROM
    if _has_mkl():
        return possible, "blocked" if numbers <= BLOCK_UP_TO else "packed", BLOCK_FROM
    return possible, "packed", PACK_OVER + 1


def _forms_16() -> tuple[set[Form], Form, int]:
    """Return a bfloat16 matrix's possible forms, its default form, and the minimum size for it."""
    hardware = _multiplies_bfloat16()
    possible: set[Form] = {"widened"}
    if _can_pack_16():
        possible.add("packed16")
    if _can_pack() and hardware:
        possible.add("packed")
    if hardware:
        return possible, "packed", PACK_FROM  # where packing is impossible, plain is fast enough
    return possible, "packed16" if "packed16" in possible else "widened", PACK_FROM


def find_numba_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module `kernels`, where what lies between the products of a forward is its own: where it
    was timed, on Linux and x86, unless the variable asks for a form of torch's; else None."""
    wanted, known = os.environ.get(FORM_VARIABLE, ""), (torch.float32, torch.bfloat16)
    if device.type != "cpu" or dtype not in known or wanted not in ("", "tiled"):
        return None
    if not _wants_kernels() or not _can_compile():
        return None
    from specbench_cli.engine.models import kernels  # here, as Numba takes a while

    return kernels


def lacks_numba() -> bool:
    """Whether forwards here are slower than they could be, for want of what runs our kernels."""
    return _wants_kernels() and not _can_compile()


def _wants_kernels() -> bool:
    return sys.platform == "linux" and _is_x86()


@cache
def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


@cache
def _can_compile() -> bool:
    """Whether Numba is here, with threads by OpenMP, which it then shares with torch: those of its
    own cannot be used by two at once."""
    try:
        import numba.np.ufunc.omppool  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _can_pack() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@cache
def _can_pack_16() -> bool:
    """Whether FBGEMM is what torch's quantized products are made by: on x86 with AVX2."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


@cache
def _has_mkl() -> bool:
    return bool(torch.backends.mkl.is_available())


@cache
def _mkl_is_slow() -> bool:
    """Whether the processor is an x86 of another make than MKL's."""
    if not _is_x86():
        return False
    cpuinfo = Path("/proc/cpuinfo")
    make = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else platform.processor()
    return "GenuineIntel" not in make


@cache
def _multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it."""
    flags = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(flags.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


# ---- memory in large pages ----------------------------------------------------------------------

PAGE = 1 << 21
CHUNK = 8 * PAGE
ALIGNMENT = 64
"""Bytes; what vector instructions and torch's own allocator go by."""


class WeightArena:
    """Where tensors that live together are put; their memory is freed with the last of them."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def store(self, tensor: Tensor) -> Tensor:
        """A tensor's numbers in row-major order, in large pages where the system has them."""
        n = tensor.numel()
        if tensor.device.type != "cpu" or not n or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.contiguous()
        chunk, offset = self._place(n * tensor.element_size())
        made = torch.frombuffer(chunk, dtype=tensor.dtype, count=n, offset=offset)
        return made.view(tensor.shape).copy_(tensor)

    def _place(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Memory with room for so many bytes, and where in it."""
        if self._chunk is None or self._used + nbytes > len(self._chunk):
            size = max(CHUNK, -(-nbytes // PAGE) * PAGE)
            self._chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._chunk.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        offset = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._chunk, offset


MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # Linux's numbers; the second since 6.1


def prefer_large_pages(address: int, nbytes: int) -> None:
    """Move memory that another library allocated into large pages, where the system has them.

    Processors fetch ahead within a page only: from large pages weights are read a quarter faster.
    What lies in the same large pages before and behind moves with it; nothing changes its address.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or nbytes < PAGE // 2:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for page in range(address // PAGE * PAGE, address + nbytes, PAGE):
        if advise(page, PAGE, MADV_HUGEPAGE) == 0:
            advise(page, PAGE, MADV_COLLAPSE)  # where it cannot be had, small pages do as well
