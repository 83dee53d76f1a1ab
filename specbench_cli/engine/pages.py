"""Memory for weights, in pages so large that reading them does not displace all the rest.

A forward reads a model's weights from end to end. In pages of 4 kB these are more pages than a
processor keeps the places of, so that after each forward everything else has to be looked up anew,
the code of the next operation too. Linux gives pages of 2 MB to whoever asks for them.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

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
