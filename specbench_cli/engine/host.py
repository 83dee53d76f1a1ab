"""Transfers between a device and the host, with few torch calls and few device syncs.

A forward fills the CPU caches with weights. A torch call right after a forward is therefore several
times slower than the same call in a loop without forwards. So small computations are done in plain
Python.

All device syncs of a step happen in the function `wait`, so that tests can count them. `send`
copies to a device without a sync (docs/explanations/devices.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from specbench_cli.former_names import get_renamed

Ids = list[int] | Tensor
"""Token ids [n]: a list if the device is the host, else a tensor on the device."""


def is_on_host(device: torch.device) -> bool:
    """Return True if the host can read tensors of this device without a sync."""
    return device.type == "cpu"


def wait(tensor: Tensor) -> Any:
    """Return the numbers of a tensor on a device other than the host. All syncs of a step happen
    here.
    """
    return tensor.tolist()


def numbers(tensor: Tensor) -> Any:
    """Return the numbers of a tensor as nested lists, with at most one device sync."""
    return tensor.tolist() if is_on_host(tensor.device) else wait(tensor)


def number(tensor: Tensor) -> Any:
    """Return the number in a tensor of one element, with at most one device sync."""
    return tensor.item() if is_on_host(tensor.device) else wait(tensor.reshape(()))


def lists(*tensors: Tensor) -> list[list[Any]]:
    """Return the numbers of one-dimensional tensors on one device, with at most one device sync."""
    if len(tensors) == 1 or is_on_host(tensors[0].device):
        return [numbers(tensor) for tensor in tensors]
    return read_together(*tensors)


def to_numbers(*tensors: Tensor) -> list[Any]:
    """Return the numbers of several one-element tensors on one device, with at most one device
    sync.
    """
    if is_on_host(tensors[0].device):
        return [tensor.item() for tensor in tensors]
    return [found for (found,) in read_together(*(tensor.reshape(1) for tensor in tensors))]


def read_together(*tensors: Tensor) -> list[list[Any]]:
    """Return the numbers of one-dimensional tensors on a GPU, with a single transfer
    to the host."""
    # float64 represents float32 numbers and integers up to 2**53 without rounding.
    flat = numbers(torch.cat([tensor.double() for tensor in tensors]))
    found, end = [], 0
    for tensor in tensors:
        start, end = end, end + tensor.shape[0]
        part = flat[start:end]
        found.append(part if tensor.is_floating_point() else list(map(int, part)))
    return found


def ids(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return integers as an int64 tensor [n] or [r, n] on a device."""
    if device.type == "cpu":
        return torch.from_numpy(np.array(values, dtype=np.int64))
    return send(torch.tensor(values, dtype=torch.int64), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device, without waiting for earlier work on the device."""
    return tensor.to(device, non_blocking=True)


def concatenate(parts: Sequence[Ids]) -> Ids:
    """Concatenate several lists or several tensors of token ids."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors:
        return torch.cat(tensors)
    return [token for part in parts for token in part]


@lru_cache(maxsize=1024)
def cached_ids(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tensor that `ids` would create, from a cache. Callers must not
    change the tensor."""
    return ids(values, device)


@overload
def take(values: Tensor, at: tuple[int, ...]) -> Tensor: ...


@overload
def take(values: Ids, at: tuple[int, ...]) -> Ids: ...


def take(values: Ids, at: tuple[int, ...]) -> Ids:
    """Return the elements of a list, or the rows of a tensor, at some indices.

    The function caches the tensor of the indices.
    """
    if isinstance(values, Tensor):
        return values.index_select(0, cached_ids(at, values.device))
    return [values[place] for place in at]


def interleave(parts: Sequence[Ids]) -> Ids:
    """Return the first element of each part, then the second of each part, and so on.

    All parts have the same length.
    """
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors:
        return torch.stack(tensors, 1).flatten()
    return [token for each in zip(*parts, strict=True) for token in each]


_FORMER_NAMES = {
    "each": "to_numbers",
    "in_one": "read_together",
    "interleaved": "interleave",
    "joined": "concatenate",
    "near": "is_on_host",
    "places": "cached_ids",
    "sent": "send",
    "taken": "take",
}


def __getattr__(name: str) -> Any:
    return get_renamed(__name__, _FORMER_NAMES, name)
