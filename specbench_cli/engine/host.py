"""What passes between a device and the host, in as few calls and waits as there can be.

Between two forwards a processor's caches hold the models' weights and nothing else, so that every
call of torch costs several times what it costs in a loop of its own. What is small is worked out on
the host in plain Python; here is how it gets there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def lists(*tensors: Tensor) -> list[list[Any]]:
    """Numbers of tensors of one dimension, all on one device, with one wait for it."""
    if len(tensors) == 1 or tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    return in_one(*tensors)


def in_one(*tensors: Tensor) -> list[list[Any]]:
    """As `lists`, by one transfer: what counts where the device is not the host."""
    # Whole numbers up to 2**53 and float32 survive in float64.
    flat = torch.cat([tensor.double() for tensor in tensors]).tolist()
    found, end = [], 0
    for tensor in tensors:
        start, end = end, end + tensor.shape[0]
        part = flat[start:end]
        found.append(part if tensor.is_floating_point() else list(map(int, part)))
    return found


def ids(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Whole numbers as [n] or [r, n] int64 on a device."""
    if device.type == "cpu":
        return torch.from_numpy(np.array(values, dtype=np.int64))
    return torch.tensor(values, dtype=torch.int64, device=device)
