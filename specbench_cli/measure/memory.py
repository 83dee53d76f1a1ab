"""Peak memory of a device since the last reset.

On a GPU, this is the memory that PyTorch allocated. On a CPU, it is the resident set size (RSS) of
the process.
"""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
PROCESSES = Path("/proc")
RESET_PEAK = "5"  # proc(5): reset the peak resident set ("high water mark") to the current one


def reset_peak(device: torch.device, worker: int | None = None) -> bool:
    """Reset the peak memory of a device.

    Args:
        device: The device.
        worker: Process id of a worker process whose memory is added. None if there is no worker
            process.

    Returns:
        False if the system cannot reset the peak. Then `peak_bytes` returns the peak since the
        process started, which is an upper bound.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        if worker is not None:
            (PROCESSES / str(worker) / CLEAR_REFS.name).write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def free_memory() -> None:
    """Free unused memory. Call this before other models are loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device, worker: int | None = None) -> int:
    """Return the peak memory of a device in bytes since the last reset.

    On a CPU, the result is the peak of this process plus the peak of the worker process. The two
    peaks may have occurred at different times, so the sum is an upper bound.

    Args:
        device: The device.
        worker: Process id of a worker process whose memory is added. None if there is no worker
            process.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    worker_peak = 0
    if worker is not None:
        worker_peak = _high_water_mark(PROCESSES / str(worker) / STATUS.name) or 0
    own = _high_water_mark(STATUS)
    if own is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        own = peak if sys.platform == "darwin" else peak * 1024
    return own + worker_peak


def _high_water_mark(status: Path) -> int | None:
    """Return the peak resident set size in bytes. Return None if the system does not report it.

    Args:
        status: The file `/proc/<id>/status` of a process.
    """
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["VmHWM"].split()[0]) * 1024 if "VmHWM" in fields else None


class MemoryTracker(TorchDispatchMode):
    """Counter of the memory of the tensors that code in the `with` block creates.

    Unlike the memory of the process, the result is exact and reproducible.

    Attributes:
        held: Bytes of all counted tensors that still exist.
        peak: Largest value of `held` so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute a PyTorch operation, and count the memory of the tensors that it creates."""
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._enter(each.untyped_storage())
        return out

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._leave, key)

    def _leave(self, key: int) -> None:
        self.held -= self._sizes.pop(key)
