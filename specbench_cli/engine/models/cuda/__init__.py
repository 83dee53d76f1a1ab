"""What makes forwards over few rows fast on a CUDA device: graphs, and kernels for these."""

from __future__ import annotations

from types import ModuleType

import torch


def find_triton_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module `kernels`, where its kernels run on a device in a dtype; else None: torch's own
    operations give the same up to rounding."""
    if device.type != "cuda":
        return None
    try:
        from specbench_cli.engine.models.cuda import kernels
    except ImportError:  # torch comes without Triton on some systems
        return None
    return kernels if kernels.are_available(device, dtype) else None
