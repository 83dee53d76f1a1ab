"""Peak memory of a device since the last reset.

On CUDA what PyTorch's allocator handed out; on the CPU the resident set of this process.
"""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): reset the peak resident set ("high water mark") to the current one


def reset_peak(device: torch.device) -> bool:
    """Start a new peak.

    Returns:
        False where the system cannot: then `peak_bytes` is the peak since the process started, an
        upper bound.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def free_memory() -> None:
    """Give back what nothing holds any more: before other weights are read."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device) -> int:
    """Most bytes held at once since the last reset."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if STATUS.exists():
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
