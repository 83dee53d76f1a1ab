"""CUDA graphs and Triton kernels, which make forwards over few rows fast."""

from __future__ import annotations

from types import ModuleType

import torch


def find_triton_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module `kernels` if it supports a device and dtype, otherwise None.

    The operations of torch give the same results as `kernels`, up to rounding.
    """
    if device.type != "cuda":
        return None
    try:
        from specbench_cli.engine.models.cuda import kernels
    except ImportError:  # torch comes without Triton on some systems
        return None
    return kernels if kernels.are_available(device, dtype) else None
