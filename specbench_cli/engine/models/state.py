"""Model states: a preallocated KV cache, and snapshots of recurrent models.

A row of a KV cache is the keys and values of one token at one layer.
"""

from __future__ import annotations

import math
import mmap
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import ChainsOnly, State
from specbench_cli.errors import MethodFault
from specbench_cli.former_names import renamed_members


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of what one layer caches for one token: `heads` keys and `heads` values."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def dim(self) -> int:
        """Number of elements reserved for one key of a head. A value has the same number."""
        return max(self.key_dim, self.value_dim)


class PagedZeros:
    """A zero tensor whose memory pages the operating system allocates on first write.

    The addresses are contiguous, so attention can read rows in place. Only pages with written rows
    take memory (Prabhu et al., vAttention, 2024, arXiv:2405.04437).

    Attributes:
        zeros: The tensor, on the CPU. `free` releases the memory pages of one index pair of its
            first two dimensions. Their elements are zero again afterwards.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._part = math.prod(shape[2:]) * dtype.itemsize
        self._parts = shape[1]
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, shape[0] * shape[1] * self._part, flags=private)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # a large page would span several sequences
        self.zeros = torch.frombuffer(self._memory, dtype=dtype).view(*shape)

    @staticmethod
    def rows(capacity: int, row_bytes: int) -> int:
        """Return the smallest number of rows that is at least `capacity` and fills whole memory
        pages.
        """
        whole = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)
        return -(-capacity // whole) * whole

    def free(self, first: int, second: int) -> None:
        """Release the memory pages of `zeros[first, second]`. The elements are zero again
        afterwards.
        """
        at = (first * self._parts + second) * self._part
        self._memory.madvise(mmap.MADV_DONTNEED, at, self._part)


@renamed_members(line="sequence_state")
class KVState(State):
    """KV cache of `n_seqs` sequences, with a buffer of `capacity` rows for each layer.

    The rows of a head are contiguous in memory, because attention reads them in this order. Keys
    and values are in one buffer, so a forward appends both in one copy. Each layer has its own
    number of rows, because a forward may run only some layers.

    On a CPU under Linux, the buffers of several sequences are `PagedZeros`. A short sequence then
    takes only the memory of its own rows, and `free` releases the memory of a sequence.

    Attributes:
        shapes: Cache shape of each layer.
        buffers: Buffers [layers, n_seqs, 2 heads, capacity, dim]. Consecutive layers of the same
            shape share a buffer. A buffer has the keys of all heads, then the values. Paged buffers
            have a few more rows, to fill the last page.
        lengths: Number of rows written, by sequence and layer. Read only.
        offsets: Number of rows that `select` dropped, by sequence. The position in the text of a
            row that is written later is its row number plus this offset. Read only.
        plans: Forward plans that the decoder caches for this state.
        pool: The state of several sequences that this state is a view of (`sequence_state`), or
            None.
        place: Index of this state's sequence in the pool.
    """

    by_row = True

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        n_seqs: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        within: tuple[KVState, int] | None = None,
    ) -> None:
        self.pool: KVState | None = None
        self.place = 0
        if within is not None:
            self.pool, self.place = within
        self.shapes = tuple(shapes)
        self.n_seqs = n_seqs
        self.capacity = capacity
        self.buffers: list[Tensor] = []
        self._pages: list[PagedZeros] = []
        if self.pool is not None:
            self.buffers = [rows[:, self.place, None] for rows in self.pool.buffers]
        else:
            # Fill with zeros. Attention also reads rows that are not written yet and multiplies
            # them by 0. If such a row contained NaN, the product would be NaN.
            paged = n_seqs > 1 and device.type == "cpu" and sys.platform == "linux"
            for shape, same in groupby(self.shapes):
                rows = PagedZeros.rows(capacity, shape.dim * dtype.itemsize) if paged else capacity
                size = (len(list(same)), n_seqs, 2 * shape.heads, rows, shape.dim)
                if paged:
                    self._pages.append(PagedZeros(size, dtype))
                    self.buffers.append(self._pages[-1].zeros)
                else:
                    self.buffers.append(torch.zeros(size, dtype=dtype, device=device))
        self._all_layers = range(len(self.shapes))
        self._layers = [rows[:, :, :capacity] for buffer in self.buffers for rows in buffer]
        self.lengths = [[0] * len(self.shapes) for _ in range(n_seqs)]
        self._committed = [[0] * len(self.shapes) for _ in range(n_seqs)]
        self.offsets = [0] * n_seqs
        self._selected: list[list[int]] = [[] for _ in range(n_seqs)]  # positions of selected rows
        self._gaps: list[dict[int, list[int]]] = [{} for _ in range(n_seqs)]  # see `leave_out`
        self.plans: dict[tuple[int, ...], Any] = {}

    def sequence_state(self, seq: int) -> KVState:
        """Return an empty state of one sequence, as a view of the memory of sequence `seq`."""
        like = self.buffers[0]
        return type(self)(
            self.shapes, 1, self.capacity, dtype=like.dtype, device=like.device, within=(self, seq)
        )

    @property
    def nbytes(self) -> int:
        """Size of the reserved memory in bytes. Memory pages without a row take no
        physical memory."""
        numbers = sum(2 * shape.heads * shape.dim for shape in self.shapes)
        return numbers * self.n_seqs * self.capacity * self.buffers[0].itemsize

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Return the number of rows written for a sequence at a layer."""
        return self.lengths[seq][layer]

    def position(self, seq: int = 0) -> int:
        """Return the position of the next row: the number of tokens processed so far."""
        return self.lengths[seq][0] + self.offsets[seq]

    def keys(self, layer: int) -> Tensor:
        """Return the keys of all rows, a view [n_seqs, heads, capacity, key_dim]."""
        shape = self.shapes[layer]
        rows: Tensor = self._layers[layer][:, : shape.heads, :, : shape.key_dim]
        return rows

    def values(self, layer: int) -> Tensor:
        """Return the values of all rows, a view [n_seqs, heads, capacity, value_dim]."""
        shape = self.shapes[layer]
        rows: Tensor = self._layers[layer][:, shape.heads :, :, : shape.value_dim]
        return rows

    def require(self, start: int, n: int) -> None:
        """Raise ValueError if the state has no space for n more rows after `start` rows."""
        if start + n > self.capacity:
            raise ValueError(
                f"{n} more rows after {start} do not fit into a state of {self.capacity} rows"
            )

    def extend(self, seq: int, layers: Iterable[int], n: int) -> None:
        """Increase the row count of some layers by n, after a forward has written n rows."""
        lengths = self.lengths[seq]
        if (
            layers == self._all_layers
        ):  # fast path for all layers, as a batch may have hundreds of sequences
            lengths[:] = [have + n for have in lengths]
            return
        for layer in layers:
            lengths[layer] += n

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """Advance some layers by n positions without writing rows.

        These layers then have fewer rows than the other layers. Later forwards through these layers
        need explicit positions.
        """
        for layer in layers:
            gaps = self._gaps[seq].setdefault(layer, [])
            first = self.lengths[seq][layer] + len(gaps)
            gaps.extend(range(first, first + n))

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """Keep the rows at `path`, and drop all other rows written since the last commit.

        A layer that a forward skipped has fewer rows. It keeps those rows of the path that it has.

        Args:
            path: Increasing indices, counted from the first row after the last commit.
            loose: Number of rows at the end of the path that stay uncommitted, so that the next
                commit may drop them.

        Raises:
            ValueError: `path` does not increase, or names a row that was not written.
        """
        lengths, committed = self.lengths[seq], self._committed[seq]
        kept, base = len(path), committed[0]
        if (
            path == range(kept)
            and not loose
            and kept <= lengths[0] - base
            and _all_equal(lengths)
            and _all_equal(committed)
        ):  # fast path: a chain, with all layers at the same length
            lengths[:] = committed[:] = [base + kept] * len(lengths)
            return
        path = list(path)
        written = max(have - base for have, base in zip(lengths, committed, strict=True))
        if path != list(range(len(path))):
            if any(a >= b for a, b in pairwise(path)):
                raise ValueError(f"path {path} does not increase")
            if path[0] >= 0 and path[-1] < written:
                self._gather(seq, path)
        if path and (path[0] < 0 or path[-1] >= written):
            raise ValueError(f"path {path} names rows outside the {written} written ones")
        firm = path[: len(path) - loose]
        for layer, base in enumerate(committed):
            have = lengths[layer] - base
            lengths[layer] = base + bisect_left(path, have)
            committed[layer] = base + bisect_left(firm, have)

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """Drop all rows of a sequence from position n on."""
        lengths, committed = self.lengths[seq], self._committed[seq]
        if self.offsets[seq]:
            n = bisect_left(self.positions(seq), n)
            if n < len(self._selected[seq]):  # positions continue after the last remaining row
                kept = self._selected[seq] = self._selected[seq][:n]
                self.offsets[seq] = kept[-1] + 1 - n if kept else 0
        for layer in range(len(lengths)) if layers is None else layers:
            most = n
            if gaps := self._gaps[seq].get(layer):
                most -= bisect_left(gaps, n)
                del gaps[n - most :]
            if lengths[layer] > most:
                lengths[layer] = most
                committed[layer] = min(committed[layer], most)

    def select(self, rows: Sequence[int], seq: int = 0) -> None:
        """Keep and commit the rows with the given numbers, and drop all other rows.

        The positions of kept rows and of later rows do not change. Methods use this to evict rows
        from the cache, for example to keep only attention sinks and recent rows (Xiao et al.,
        StreamingLLM, ICLR 2024, arXiv:2309.17453). The model's own sliding window then counts rows,
        not positions.

        Args:
            rows: Increasing row numbers.

        Raises:
            ValueError: The numbers do not increase, a row does not exist, or the layers have
                different numbers of rows.
        """
        have = self.lengths[seq][0]
        if set(self.lengths[seq]) != {have}:
            raise ValueError("rows can be selected only if all layers have the same number of rows")
        kept = list(rows)
        if any(a >= b for a, b in pairwise(kept)) or (kept and not 0 <= kept[0] <= kept[-1] < have):
            raise ValueError(f"rows {kept} must be increasing numbers from 0 to {have - 1}")
        held = self.positions(seq)
        self._committed[seq] = [0] * len(self.shapes)
        self.commit(seq, kept)
        self.offsets[seq] += have - len(kept)
        self._selected[seq] = [held[row] for row in kept]

    def positions(self, seq: int = 0) -> list[int]:
        """Return the position in the text of each cached row."""
        chosen, offset = self._selected[seq], self.offsets[seq]
        have = self.lengths[seq][0]
        return [*chosen[:have], *range(len(chosen) + offset, have + offset)]

    def clear(self) -> None:
        """Drop all rows of all sequences, and keep the memory."""
        for seq in range(self.n_seqs):
            self.offsets[seq], self._selected[seq] = 0, []
            self.rollback(seq, 0)

    def free(self) -> None:
        """Drop all rows. Release their memory if this state belongs to a pool with paged memory."""
        self.clear()
        if self.pool is not None:
            for pages in self.pool._pages:
                for layer in range(len(pages.zeros)):
                    pages.free(layer, self.place)

    def _gather(self, seq: int, path: Sequence[int]) -> None:
        """Move the rows at `path` to the front of all rows written since the last commit."""
        still = next(at for at, row in enumerate(path) if at != row)  # first row to move
        spans = list(zip(self.shapes, self._committed[seq], self.lengths[seq], strict=True))
        for (_, base, length), same in groupby(range(len(spans)), key=spans.__getitem__):
            layers = list(same)
            kept = [base + row for row in path[still:] if base + row < length]
            rows = self._rows(layers, seq)
            first = base + still
            index = host.ids(kept, rows.device)
            rows.narrow(2, first, len(kept)).copy_(rows.index_select(2, index))

    def _rows(self, layers: Sequence[int], seq: int) -> Tensor:
        """Return the rows of consecutive layers of the same shape.

        The result is a view [layers, 2 heads, capacity, dim].
        """
        first = 0
        for buffer in self.buffers:
            if layers[0] < first + len(buffer):
                return buffer[layers[0] - first : layers[-1] - first + 1, seq]
            first += len(buffer)
        raise IndexError(f"no layer {layers[0]}")


class Snapshot(NamedTuple):
    """Recurrent cache at the end of a forward, when `length` tokens have been
    processed in total."""

    length: int
    cache: Any


EMPTY = Snapshot(0, None)


class RecurrentState(State):
    """State of a recurrent model: a snapshot of its cache at the end of each forward.

    Single tokens cannot be removed from a recurrent cache. If `rollback` or `commit` drops tokens,
    the state returns to the last snapshot before the first dropped token. `length` is then the
    number of tokens of that snapshot. The caller processes the tokens after it again.
    """

    by_row = False

    def __init__(self, n_seqs: int, capacity: int) -> None:
        self.capacity = capacity
        self._snapshots = [[EMPTY] for _ in range(n_seqs)]
        self._committed = [0] * n_seqs

    @property
    def nbytes(self) -> int:
        """Size of all snapshots in bytes. Their number depends on the decoded text."""
        stops = [stop for line in self._snapshots for stop in line]
        return sum(tensor.nbytes for stop in stops for tensor in _tensors(stop.cache))

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Return the number of tokens processed for a sequence. It is equal at all layers."""
        return self._snapshots[seq][-1].length

    def position(self, seq: int = 0) -> int:
        """Return the position of the next token: the number of tokens processed so far."""
        return self.length(seq)

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """Raise MethodFault. A recurrent state has no rows, so layers cannot be skipped."""
        raise MethodFault("a recurrent state has no rows, so no layer can skip some")

    def latest_cache(self, seq: int) -> Any:
        """Return the newest cache of a sequence, or None if the sequence is empty. Do not change
        it.
        """
        return self._snapshots[seq][-1].cache

    def write(self, seq: int, n: int, cache: Any) -> None:
        """Store a snapshot of the cache, which now has n more tokens than the previous snapshot."""
        length = self.length(seq) + n
        if length > self.capacity:
            raise ValueError(f"{length} tokens do not fit into a state of {self.capacity} rows")
        self._snapshots[seq].append(Snapshot(length, cache))

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """Keep the tokens at `path` and drop all other tokens since the last commit.

        Raises:
            ValueError: The path names tokens that were not written.
            MethodFault: The path has gaps, as the path of a tree branch has.
        """
        base, kept = self._committed[seq], len(path)
        if kept and path[-1] >= self.length(seq) - base:
            raise ValueError(f"path {list(path)} names rows outside the written ones")
        if list(path) != list(range(kept)):
            raise MethodFault(
                f"path {list(path)} skips tokens, which a recurrent state cannot do",
                "draft chains, or process the kept tokens again",
            )
        firm = base + kept - loose
        self._restore(seq, base + kept, firm)
        self._committed[seq] = min(firm, self.length(seq))

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """Return to the last snapshot with at most n tokens, and delete all later snapshots."""
        self._restore(seq, n, n)
        self._committed[seq] = min(self._committed[seq], self.length(seq))

    def select(self, rows: Sequence[int], seq: int = 0) -> None:
        """Raise ChainsOnly. A recurrent state has no rows that `KVState.select` could keep."""
        raise ChainsOnly(
            "a recurrent state has no rows, so no selection of them can be kept",
            "choose a method that does not evict rows from the draft's cache",
        )

    def clear(self) -> None:
        """Delete all snapshots."""
        for seq in range(len(self._snapshots)):
            self._snapshots[seq], self._committed[seq] = [EMPTY], 0

    def _restore(self, seq: int, n: int, firm: int) -> None:
        """Delete snapshots with more than n tokens.

        Of the snapshots with at most `firm` tokens, keep only the last one.
        """
        stops = [stop for stop in self._snapshots[seq] if stop.length <= n] or [EMPTY]
        first = max((at for at, stop in enumerate(stops) if stop.length <= firm), default=0)
        self._snapshots[seq] = stops[first:]


def _all_equal(lengths: Sequence[int]) -> bool:
    return lengths.count(lengths[0]) == len(lengths)


def _tensors(held: Any) -> Iterator[Tensor]:
    """Yield all tensors of a recurrent cache."""
    for layer in () if held is None else held.layers:
        for value in vars(layer).values():
            each = value.values() if isinstance(value, dict) else (value,)
            yield from (part for part in each if isinstance(part, Tensor))
