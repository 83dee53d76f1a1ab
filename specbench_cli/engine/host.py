"""Transfers between a device and the host, with few torch calls and few device syncs.

A forward fills the CPU's caches with weights, so a torch call after it takes several times as long
as in a loop that only makes such calls. Small computations are therefore done in plain Python.

All device syncs of a step happen in `wait`, so that tests can count them. `send` copies to a device
without a sync (docs/explanations/devices.md).
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
    """Return True if the host can read tensors of a device without a sync."""
    return device.type == "cpu"


def wait(tensor: Tensor) -> Any:
    """Return the numbers of a tensor on another device. All syncs of a step happen here."""
    return tensor.tolist()


def numbers(tensor: Tensor) -> Any:
    """Return a tensor's numbers as nested lists, with one sync."""
    return tensor.tolist() if is_on_host(tensor.device) else wait(tensor)


def number(tensor: Tensor) -> Any:
    """Return the number in a tensor of one element, with one sync."""
    return tensor.item() if is_on_host(tensor.device) else wait(tensor.reshape(()))


def lists(*tensors: Tensor) -> list[list[Any]]:
    """Return the numbers of one-dimensional tensors on one device, with one sync."""
    if len(tensors) == 1 or is_on_host(tensors[0].device):
        return [numbers(tensor) for tensor in tensors]
    return read_together(*tensors)


def to_numbers(*tensors: Tensor) -> list[Any]:
    """Return the number in each of several one-element tensors on one device, with one sync."""
    if is_on_host(tensors[0].device):
        return [tensor.item() for tensor in tensors]
    return [found for (found,) in read_together(*(tensor.reshape(1) for tensor in tensors))]


def read_together(*tensors: Tensor) -> list[list[Any]]:
    """Return the numbers of one-dimensional tensors on another device, with a single transfer."""
    # float64 represents float32 numbers, and integers up to 2**53, exactly.
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
    """Concatenate the ids of several parts."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors:
        return torch.cat(tensors)
    return [token for part in parts for token in part]


@lru_cache(maxsize=1024)
def cached_ids(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tensor of `ids`, from a cache. Do not change the tensor."""
    return ids(values, device)


@overload
def take(values: Tensor, at: tuple[int, ...]) -> Tensor: ...


@overload
def take(values: Ids, at: tuple[int, ...]) -> Ids: ...


def take(values: Ids, at: tuple[int, ...]) -> Ids:
    """Return the ids, or rows of a tensor, at some indices. The tensor of indices is cached."""
    if isinstance(values, Tensor):
        return values.index_select(0, cached_ids(at, values.device))
    return [values[place] for place in at]


def interleave(parts: Sequence[Ids]) -> Ids:
    """Return the ids of parts of equal length: the first of each, the second of each, and so on."""
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
