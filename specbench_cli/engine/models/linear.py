"""Linear layers with fixed weights, and the rule that chooses their backend.

A backend is a way to store a weight matrix and to multiply by it. Six backends compute the same
product up to rounding. Memory-bound means that the time is the time to read the weights, however
many rows the input has.

* `PlainLinear` ("plain"): `torch.mm` with a matrix [in, out]. For few input rows this is faster
  than the checkpoint's layout [out, in]. The transformers module can share the memory, because
  transposed slices of the matrix are views of the checkpoint's matrices.
* `PackedLinear` ("packed"): oneDNN with weights that are reordered once, as torch inductor does. It
  is memory-bound up to about 8 rows. `torch.mm` calls MKL instead, which is slower from the second
  row on. A single call costs more than a call of `torch.mm`.
* `BlockedLinear` ("blocked"): `torch.bmm` with narrow blocks of columns, which MKL multiplies
  without a copy. It is memory-bound up to about 8 rows, and calls are cheap.
* `Packed16Linear` ("packed16"): FBGEMM with bfloat16 weights that are stored as float16. Processors
  without bfloat16 instructions convert them to float32 in registers. It is memory-bound up to about
  14 rows.
* `TiledLinear` ("tiled"): specbench's Numba kernels (`kernels.py`) with the checkpoint's matrix
  [out, in]. It is nearly memory-bound up to about 6 rows. The result of a row is bitwise the same
  for any number of rows.
* `WidenedLinear` ("widened"): float32 products with bfloat16 weights that are converted piece by
  piece. It is for machines without bfloat16 instructions and without FBGEMM.

`choose_backend` decides by the processor, the dtype and the matrix size. It does not decide by
measured times. Backends differ in the last bits, so such a decision would make near-ties
irreproducible. benchmarks/times/forward_rows.py measures the backends, and
docs/explanations/kernels.md has the results.
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

LinearBackend = Literal["plain", "tiled", "blocked", "packed", "packed16", "widened"]
BACKEND_VARIABLE = "SPECBENCH_LINEAR"
"""Environment variable that selects a backend, for tests and benchmarks."""

MIN_PACKED_WEIGHTS = 1 << 16
"""Minimum number of weights of a packed matrix. For smaller ones, oneDNN's cost per call is more
than the gain."""

MAX_PLAIN_WEIGHTS = 1 << 20
"""Without MKL, the maximum number of weights of a matrix that is not packed."""

MIN_BLOCKED_WEIGHTS = 1 << 19
"""With a fast MKL, minimum number of weights of a blocked matrix.

Smaller matrices fit in a core's cache, where `torch.mm` is faster."""

MAX_BLOCKED_WEIGHTS = 1 << 22
"""With a fast MKL, maximum number of weights of a blocked matrix.

Larger matrices are packed: reading them takes much longer than the call, and the time is the
    same."""

LARGEST_EXPONENT = 16
"""`Packed16Linear` scales all weights to below 2 to this power.

The largest bfloat16 number below 2^16 is less than float16's largest number."""

MIN_MM_ROWS = 256
"""In float32, minimum number of rows for which `torch.mm` is faster than tiles. Only prompts have
so many rows."""

MIN_WIDENED_ROWS = 5
"""Minimum number of rows to convert bfloat16 weights. For fewer rows, `torch.mm` is faster."""

WIDENED_WEIGHTS = 1 << 18
"""Number of weights converted at a time: 1 MiB of float32, which fits in a core's cache."""


class Linear(Protocol):
    """Linear layer with fixed weights W. It returns x W + bias, [rows, out], for x [rows, in]."""

    nbytes: int

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x W + bias. If `out` is given, write the result to it."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [rows, out] plus the layer's output for x. May overwrite `residual`."""

    def columns(self, start: int, stop: int) -> Tensor | None:
        """Return the weights of output columns start to stop - 1, as a view [stop - start, in].

        This is the layout of a checkpoint. Return None if the weights are stored in another order.
        """


class PlainLinear:
    """Linear layer that calls `torch.mm` with a weight matrix [in, out]."""

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
    """Linear layer that calls specbench's Numba kernels with float32 or bfloat16 weights [out, in].

    Args:
        weight: [in, out], the transpose of a row-major matrix. `kernels.can_tile` must return True
            for its shape.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        from specbench_cli.engine.models import kernels  # lazy: importing Numba is slow

        self._multiply_tiles, self.weight = kernels.multiply, weight.t().contiguous()
        self._across = self.weight.t()
        self.bias = None if bias is None else bias.float()
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._long = MIN_MM_ROWS if weight.dtype == torch.float32 else math.inf

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
        self._multiply_tiles(x.contiguous(), self.weight, self.bias, out, add=add)
        return out


class PackedLinear:
    """Linear layer that calls oneDNN, with weights reordered for inputs of few rows.

    oneDNN compiles a program of 0.5 MB for each number of input rows, in 2 ms, and caches it. To
    limit the number of programs, inputs of many rows get extra zero rows. Their number of rows then
    is a multiple of `ROWS`, or one of 16 lengths per power of two. The result of a row does not
    depend on the number of rows.
    """

    ROWS = 8  # number of input rows that the reordering is tuned for: a typical verification
    MIN_PADDED_ROWS = 65  # a verification has fewer rows and is not padded

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), self.ROWS)
        prefer_large_pages(torch.ops.mkldnn.data_ptr(self.weight), weight.nbytes)
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_plus = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y: Tensor = self._product(self._pad_rows(x), self.weight, self.bias, "none", [], "")
        return y[: len(x)] if out is None else out.copy_(y[: len(x)])

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self._product_plus(
            self._pad_rows(x), self._pad_rows(residual), self.weight, self.bias, "add"
        )
        return y[: len(x)]

    def _pad_rows(self, x: Tensor) -> Tensor:
        """Return the input rows [n, in]. Append zero rows if n is at least `MIN_PADDED_ROWS`."""
        n = len(x)
        if n < self.MIN_PADDED_ROWS:
            return x
        lacking = -n % max(self.ROWS, 1 << n.bit_length() - 5)
        return F.pad(x, (0, 0, 0, lacking)) if lacking else x

    def columns(self, start: int, stop: int) -> Tensor | None:
        return None


class BlockedLinear:
    """Linear layer that calls `torch.bmm` with blocks of columns, [blocks, in, width].

    MKL copies a wide matrix into blocks before it multiplies two or more rows, so it reads the
    matrix twice. It multiplies narrow matrices without a copy. If no width in `WIDTHS` divides the
    number of columns, the last block is padded with zeros.
    """

    WIDTHS = (48, 32)  # preferred first: 48 is the fastest for a single row

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
        """Return a view that repeats the input rows x [n, in] for each block of columns."""
        return x.expand(self._n_blocks, -1, -1)

    def _product(self, x: Tensor) -> Tensor:
        """Return the product [n, out], in which the results of the blocks are concatenated."""
        y = torch.bmm(self._repeated(x), self.weight).transpose(0, 1).reshape(len(x), -1)
        return y if self._whole else y[:, : self._n_out].contiguous()


class Packed16Linear:
    """Linear layer that calls FBGEMM with bfloat16 weights stored as float16.

    float16 is more precise than bfloat16, but has a smaller range. All weights are multiplied by
    one power of two. It brings the largest weight just below float16's largest number. Weights down
    to 2^-33 of the largest weight are then exact. Smaller weights have an error below 2^-40 of the
    largest weight, which is less than the rounding of float32 sums. The sums are float32 and are
    rounded once at the end.

    With AVX-512, the result of a row is bitwise equal for any number of rows and threads. Without
    AVX-512, a single row differs from several rows in the last bits of float32. About one number in
    10,000 is then rounded to a neighbouring bfloat16 number.
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
        # FBGEMM clamps values outside float16's range, which would hide weights that are not
        # finite. A factor of NaN makes the result NaN instead. The factor has one dimension, not
        # zero dimensions, so that its product with bfloat16 rows is float32.
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
        """Return the product x W in float32."""
        y: Tensor = self._product(x * self._power, self._packed)
        return y


class WidenedLinear(PlainLinear):
    """Linear layer that converts half-precision weights to float32 piece by piece.

    The product is rounded to half precision once at the end.
    """

    _buffers = threading.local()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) < MIN_WIDENED_ROWS:
            return super().__call__(x, out)
        y = self._wide(x)
        return y.to(self.weight.dtype) if out is None else out.copy_(y)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if len(x) < MIN_WIDENED_ROWS:
            return super().add_to(residual, x)
        return residual.add_(self._wide(x))

    def _wide(self, x: Tensor) -> Tensor:
        """Return the product x W in float32."""
        n_in, n_out = self.weight.shape
        step = max(1, min(n_out, WIDENED_WEIGHTS // n_in))
        wide, y = self._buffer(n_in * step), torch.empty(len(x), n_out)
        rows = x.float()
        for start in range(0, n_out, step):
            piece = self.weight[:, start : start + step]
            held = wide[: piece.numel()].view(piece.shape).copy_(piece)
            torch.mm(rows, held, out=y[:, start : start + step])
        return y if self.bias is None else y.add_(self.bias)

    @classmethod
    def _buffer(cls, numel: int) -> Tensor:
        """Return the current thread's buffer for `numel` elements.

        All layers share it, so it stays in the processor's cache.
        """
        held: Tensor | None = getattr(cls._buffers, "held", None)
        if held is None or held.numel() < numel:
            with torch.inference_mode(False):  # calls outside inference mode write to it too
                held = cls._buffers.held = torch.empty(max(numel, WIDENED_WEIGHTS))
        return held


def linear(
    weight: Tensor, bias: Tensor | None = None, *, backend: LinearBackend | None = None
) -> Linear:
    """Return a linear layer with a weight [in, out] and a bias [out].

    Args:
        backend: How the layer stores and multiplies the weight. None uses `choose_backend`.
    """
    made: dict[LinearBackend, Callable[[Tensor, Tensor | None], Linear]] = {
        "plain": PlainLinear,
        "tiled": TiledLinear,
        "blocked": BlockedLinear,
        "packed": PackedLinear,
        "packed16": Packed16Linear,
        "widened": WidenedLinear,
    }
    return made[backend or choose_backend(weight)](weight, bias)


def choose_backend(weight: Tensor) -> LinearBackend:
    """Return the backend for a weight matrix [in, out].

    The environment variable SPECBENCH_LINEAR selects the backend, if that backend is possible here.

    Raises:
        UsageError: The variable names an unknown backend.
    """
    wanted = os.environ.get(BACKEND_VARIABLE, "")
    if wanted not in ("", *get_args(LinearBackend)):
        backends = " or ".join(get_args(LinearBackend))
        raise UsageError(f"{BACKEND_VARIABLE}={wanted} is unknown; it can be {backends}")
    if weight.device.type != "cpu":
        return "plain"
    if weight.dtype == torch.float32:
        possible, usual, limit = _float32_backends(weight.numel())
    elif weight.dtype == torch.bfloat16:
        possible, usual, limit = _bfloat16_backends()
    else:
        return "plain"
    if wanted == "tiled" or _mkl_is_slow():
        kernels = find_numba_kernels(weight.device, weight.dtype)
        if kernels is not None and kernels.can_tile(*weight.shape):
            return "tiled"
    if wanted:
        return wanted if wanted in possible else "plain"
    return usual if usual in possible and weight.numel() >= limit else "plain"


def _float32_backends(numbers: int) -> tuple[set[LinearBackend], LinearBackend, int]:
    """Return the backends that float32 weights can use on this machine, and the default backend.

    The third value is a number of weights. Smaller matrices use the backend "plain" by default.

    Args:
        numbers: Number of weights in the matrix.
    """
    possible: set[LinearBackend] = {"blocked", "packed"} if _can_pack() else {"blocked"}
    if _mkl_is_slow():
        return possible, "packed", MIN_PACKED_WEIGHTS
    if _has_mkl():
        return (
            possible,
            "blocked" if numbers <= MAX_BLOCKED_WEIGHTS else "packed",
            MIN_BLOCKED_WEIGHTS,
        )
    return possible, "packed", MAX_PLAIN_WEIGHTS + 1


def _bfloat16_backends() -> tuple[set[LinearBackend], LinearBackend, int]:
    """Return the backends that bfloat16 weights can use on this machine, and the default backend.

    The third value is a number of weights. Smaller matrices use the backend "plain" by default.
    """
    hardware = _multiplies_bfloat16()
    possible: set[LinearBackend] = {"widened"}
    if _can_pack_16():
        possible.add("packed16")
    if _can_pack() and hardware:
        possible.add("packed")
    if hardware:
        return (
            possible,
            "packed",
            MIN_PACKED_WEIGHTS,
        )  # if packing is impossible, plain is fast enough
    return possible, "packed16" if "packed16" in possible else "widened", MIN_PACKED_WEIGHTS


def find_numba_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module `kernels` if forwards on this device use it, otherwise None.

    Forwards use it on Linux with an x86 processor, where measurements showed that it is faster.
    SPECBENCH_LINEAR can select another backend.
    """
    wanted, known = os.environ.get(BACKEND_VARIABLE, ""), (torch.float32, torch.bfloat16)
    if device.type != "cpu" or dtype not in known or wanted not in ("", "tiled"):
        return None
    if not _kernels_are_faster() or not _can_compile():
        return None
    from specbench_cli.engine.models import kernels  # lazy: importing Numba is slow

    return kernels


def is_numba_missing() -> bool:
    """Return True if forwards on this machine are slower because Numba is not installed."""
    return _kernels_are_faster() and not _can_compile()


def _kernels_are_faster() -> bool:
    return sys.platform == "linux" and _is_x86()


@cache
def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


@cache
def _can_compile() -> bool:
    """Return True if Numba is installed with OpenMP support.

    With OpenMP, Numba and torch share their threads. Numba's own thread pool does not allow calls
    from two threads at the same time.
    """
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
    """Return True if torch computes quantized products with FBGEMM, as it does on x86 with AVX2."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


@cache
def _has_mkl() -> bool:
    return bool(torch.backends.mkl.is_available())


@cache
def _mkl_is_slow() -> bool:
    """Return True for x86 processors of other makers than Intel. MKL is tuned for Intel."""
    if not _is_x86():
        return False
    cpuinfo = Path("/proc/cpuinfo")
    make = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else platform.processor()
    return "GenuineIntel" not in make


@cache
def _multiplies_bfloat16() -> bool:
    """Return True if the processor has bfloat16 instructions."""
    flags = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(flags.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


# ---- memory in large pages ----------------------------------------------------------------------

PAGE = 1 << 21
CHUNK = 8 * PAGE
ALIGNMENT = 64
"""Alignment in bytes, for vector instructions and as in torch's allocator."""


class WeightArena:
    """Memory area that several tensors share. It is freed together with the last of
    these tensors."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def store(self, tensor: Tensor) -> Tensor:
        """Return a row-major copy of a tensor, in large pages if the system supports them."""
        n = tensor.numel()
        if tensor.device.type != "cpu" or not n or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.contiguous()
        chunk, offset = self._place(n * tensor.element_size())
        made = torch.frombuffer(chunk, dtype=tensor.dtype, count=n, offset=offset)
        return made.view(tensor.shape).copy_(tensor)

    def _place(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Reserve `nbytes` bytes. Return a memory chunk and the offset of the
        reserved bytes in it."""
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
    """Move memory that another library allocated into large pages, if the system supports them.

    Processors prefetch only within a page, so reading weights from large pages is 25% faster. The
    addresses do not change. Other data in the same pages moves too.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or nbytes < PAGE // 2:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for page in range(address // PAGE * PAGE, address + nbytes, PAGE):
        if advise(page, PAGE, MADV_HUGEPAGE) == 0:
            advise(page, PAGE, MADV_COLLAPSE)  # failure is harmless: small pages also work
