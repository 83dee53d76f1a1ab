"""What passes between a device and the host, in as few calls and waits as there can be.

Between two forwards a processor's caches hold the models' weights and nothing else, so that every
call of torch costs several times what it costs in a loop of its own. What is small is worked out on
the host in plain Python; here is how it gets there and back.

A step waits for its device in `wait` alone, so that its waits can be counted; what is sent to a
device is sent by `sent`, without a wait (docs/explanations/devices.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

Ids = list[int] | Tensor
"""Token ids [n], on the host where that takes no wait for the device that chose them."""


def is_on_host(device: torch.device) -> bool:
    """Whether the host reads what is on a device without a wait."""
    return device.type == "cpu"


def wait(tensor: Tensor) -> Any:
    """The numbers of a tensor that is not `near`; the one place where a step waits for them."""
    return tensor.tolist()


def numbers(tensor: Tensor) -> Any:
    """A tensor's numbers, nested as it is, with one wait for its device."""
    return tensor.tolist() if is_on_host(tensor.device) else wait(tensor)


def number(tensor: Tensor) -> Any:
    """The number that a tensor of one holds, with one wait for its device."""
    return tensor.item() if is_on_host(tensor.device) else wait(tensor.reshape(()))


def lists(*tensors: Tensor) -> list[list[Any]]:
    """Numbers of tensors of one dimension, all on one device, with one wait for it."""
    if len(tensors) == 1 or is_on_host(tensors[0].device):
        return [numbers(tensor) for tensor in tensors]
    return read_together(*tensors)


def to_numbers(*tensors: Tensor) -> list[Any]:
    """The number that each of several tensors of one holds, with one wait for their device."""
    if is_on_host(tensors[0].device):
        return [tensor.item() for tensor in tensors]
    return [found for (found,) in read_together(*(tensor.reshape(1) for tensor in tensors))]


def read_together(*tensors: Tensor) -> list[list[Any]]:
    """As `lists`, by one transfer: what counts where the device is not the host."""
    # Whole numbers up to 2**53 and float32 survive in float64.
    flat = numbers(torch.cat([tensor.double() for tensor in tensors]))
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
    return send(torch.tensor(values, dtype=torch.int64), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device; what was launched there before is not waited for."""
    return tensor.to(device, non_blocking=True)


def concatenate(parts: Sequence[Ids]) -> Ids:
    """Ids of several parts, one after another."""
    there = [part for part in parts if isinstance(part, Tensor)]
    if there:
        return torch.cat(there)
    return [token for part in parts for token in part]


@lru_cache(maxsize=1024)
def cached_ids(values: tuple[int, ...], device: torch.device) -> Tensor:
    """As `ids`, of numbers that come again and again; not to be changed."""
    return ids(values, device)


@overload
def take(values: Tensor, at: tuple[int, ...]) -> Tensor: ...


@overload
def take(values: Ids, at: tuple[int, ...]) -> Ids: ...


def take(values: Ids, at: tuple[int, ...]) -> Ids:
    """Ids, or rows of a tensor, at places that come again and again."""
    if isinstance(values, Tensor):
        return values.index_select(0, cached_ids(at, values.device))
    return [values[place] for place in at]


def interleave(parts: Sequence[Ids]) -> Ids:
    """Ids of parts of one length: the first of each, the second of each, and so on."""
    there = [part for part in parts if isinstance(part, Tensor)]
    if there:
        return torch.stack(there, 1).flatten()
    return [token for each in zip(*parts, strict=True) for token in each]
