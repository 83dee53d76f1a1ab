"""The best of each row of scores: torch's answers, found faster where rows are long and few.

On a CPU torch's `argmax` and `topk` take one number at a time: the choices of a tree's rows would
cost as much as some of the target's layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
LONG = 1 << 14
"""Rows from this length on are searched in chunks."""


def argmax(rows: Tensor) -> Tensor:
    """The index of each row's greatest entry, the first of equals: [r, V] to [r] int64."""
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(rows.numpy().argmax(-1))
    return rows.argmax(-1)


def top(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's k greatest entries, best first: [r, V] to values and indices [r, k]."""
    if rows.device.type != "cpu" or rows.shape[1] < LONG:
        best = rows.topk(k)
        return best.values, best.indices
    # The k greatest lie in the k chunks with the greatest entries.
    short = -rows.shape[1] % CHUNK
    if short:
        rows = torch.nn.functional.pad(rows, (0, short), value=-torch.inf)
    chunks = rows.unflatten(1, (-1, CHUNK))
    at = chunks.amax(-1).topk(min(k, chunks.shape[1]), sorted=False).indices
    among = chunks.gather(1, at[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    best = among.topk(k)
    chunk = best.indices.div(CHUNK, rounding_mode="floor")
    return best.values, at.gather(1, chunk) * CHUNK + best.indices % CHUNK
