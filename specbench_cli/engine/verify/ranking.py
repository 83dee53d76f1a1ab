"""Argmax and top-k of rows of scores, with the same results as torch but faster on a CPU.

On a CPU, torch's `argmax` and `topk` do not use vector instructions. For the rows of a tree, they
would take as long as some of the target's layers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specbench_cli.engine import host

CHUNK = 64
"""Length of the chunks that long rows are split into."""
LONG = 1 << 14
"""Minimum length of rows that are searched in chunks."""
FEW = 16
"""Maximum k for which the top k of shorter rows are found by k calls of argmax."""


def argmax(rows: Tensor) -> Tensor:
    """Return the index of the largest entry in each row of [r, V], as int64 [r].

    If several entries are equal, the first one counts.
    """
    if rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(rows.numpy().argmax(-1))
    return rows.argmax(-1)


def top(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row of [r, V], largest first.

    Returns:
        Values [r, k] and indices [r, k].
    """
    found = _search_short_rows(rows, k)
    if found is None:
        return _search_rows(rows, k)
    values, at = found
    return torch.tensor(values, dtype=rows.dtype), host.ids(at, rows.device)


def top_indices(rows: Tensor, k: int) -> Tensor:
    """Return only the indices [r, k] of the k largest entries of each row."""
    found = _search_short_rows(rows, k)
    return _search_rows(rows, k)[1] if found is None else host.ids(found[1], rows.device)


def top_lists(rows: Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return the values and indices of the k largest entries of each row, as lists. Waits for the
    device.
    """
    found = _search_short_rows(rows, k)
    if found is None:
        best = _search_rows(rows, k)
        flat = host.lists(*(part.flatten() for part in best))
        starts = range(0, rows.shape[0] * k, k)
        values, at = ([part[start : start + k] for start in starts] for part in flat)
        return values, at
    return found


def _search_rows(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if rows.device.type != "cpu" or rows.shape[1] < LONG:
        best = rows.topk(k)
        return best.values, best.indices
    # Search only the k chunks with the largest maxima: they contain the k largest entries.
    short = -rows.shape[1] % CHUNK
    if short:
        rows = torch.nn.functional.pad(rows, (0, short), value=-torch.inf)
    chunks = rows.unflatten(1, (-1, CHUNK))
    at = chunks.amax(-1).topk(min(k, chunks.shape[1]), sorted=False).indices
    among = chunks.gather(1, at[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    best = among.topk(k)
    chunk = best.indices.div(CHUNK, rounding_mode="floor")
    return best.values, at.gather(1, chunk) * CHUNK + best.indices % CHUNK


def _search_short_rows(rows: Tensor, k: int) -> tuple[list[list[float]], list[list[int]]] | None:
    """Return the k largest entries of short rows on a CPU, by k calls of argmax.

    Return None if another way is faster, or if a row has fewer than k finite entries.
    """
    is_short = k <= FEW and rows.shape[1] < LONG and rows.dtype in (torch.float32, torch.float64)
    if not is_short or rows.device.type != "cpu":
        return None
    # The loop overwrites each entry that it found, and restores it at the end. If rows share memory
    # (`expand`), it needs a copy.
    numbers = rows.numpy() if rows.is_contiguous() else rows.numpy().copy()
    lines = [*numbers]
    at: list[list[int]] = [[] for _ in lines]
    values: list[list[float]] = [[] for _ in lines]
    for _ in range(k):
        for line, best, ids, worth in zip(
            lines, numbers.argmax(-1).tolist(), at, values, strict=True
        ):
            ids.append(best)
            worth.append(line.item(best))
            line[best] = -np.inf
    for line, ids, worth in zip(lines, at, values, strict=True):
        for best, value in zip(reversed(ids), reversed(worth), strict=True):
            line[best] = value
    return None if any(worth[-1] == -np.inf for worth in values) else (values, at)
