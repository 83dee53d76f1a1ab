"""Matrix products with fixed weights, in the form that this machine multiplies fastest.

Two forms, the same numbers up to rounding:

* `PlainLinear`: one matrix [in, out] for `torch.mm`. Blocks of a few rows run faster on it than on
  the [out, in] of a checkpoint, and slices of it, transposed, are views of the checkpoint's
  matrices, so transformers' own module can share the memory.
* `PackedLinear`: reordered once for oneDNN (what inductor's freezing emits), for x86 processors on
  which MKL, behind `torch.mm`, does not reach its full speed.

Which form is used is a rule on the machine and the shapes, not a measurement at load: the forms
differ in the last bits, so a choice that could fall differently tomorrow would make outputs at a
near-tie irreproducible.
"""

from __future__ import annotations

import mmap
import os
import platform
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from specbench_cli.errors import UsageError

Form = Literal["plain", "packed"]
FORM_VARIABLE = "SPECBENCH_LINEAR"
"""Environment variable that overrides the rule, for tests and for measuring the rule itself."""

PACK_FROM = 1 << 16
"""Least number of weights of a matrix worth packing: below, oneDNN's fixed cost outweighs it."""


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


class PackedLinear:
    """oneDNN with a matrix reordered for blocks of a few rows."""

    ROWS = 8  # the block height the reordering is tuned to: the width of a verification

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), self.ROWS)
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_plus = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y: Tensor = self._product(x, self.weight, self.bias, "none", [], "")
        return y if out is None else out.copy_(y)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self._product_plus(x, residual, self.weight, self.bias, "add")
        return y

    def columns(self, start: int, stop: int) -> Tensor | None:
        return None


def linear(weight: Tensor, bias: Tensor | None = None, *, form: Form | None = None) -> Linear:
    """A product with weight [in, out] and bias [out], in the given form or the one of the rule."""
    if (form or form_for(weight)) == "packed":
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def form_for(weight: Tensor) -> Form:
    """The form that the rule, or SPECBENCH_LINEAR, gives a matrix.

    Raises:
        UsageError: the variable is neither `plain` nor `packed`.
    """
    wanted = os.environ.get(FORM_VARIABLE, "")
    if wanted not in ("", "plain", "packed"):
        raise UsageError(f"{FORM_VARIABLE}={wanted} is unknown; it can be plain or packed")
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _can_pack():
        return "plain"
    if wanted:
        return "packed" if wanted == "packed" else "plain"
    return "packed" if weight.numel() >= PACK_FROM and _mkl_is_slow() else "plain"


@cache
def _can_pack() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@cache
def _mkl_is_slow() -> bool:
    """Whether the processor is an x86 of another make than MKL's."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    make = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else platform.processor()
    return "GenuineIntel" not in make


# ---- memory in large pages ----------------------------------------------------------------------

PAGE = 1 << 21
CHUNK = 8 * PAGE
ALIGNMENT = 64
"""Bytes; what vector instructions and torch's own allocator go by."""


class Pages:
    """Where tensors that live together are put; their memory is freed with the last of them."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def settle(self, tensor: Tensor) -> Tensor:
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
