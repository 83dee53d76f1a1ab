"""What a decoder remembers: one with attention keys and values, preallocated, a row a token; a
recurrent one what stood at the ends of its forwards."""

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


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores of one token: `heads` keys and as many values."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def dim(self) -> int:
        """Numbers reserved for a head's key, and for its value."""
        return max(self.key_dim, self.value_dim)


class PagedZeros:
    """Zeros of a shape whose memory comes by the system's pages, as they are written to.

    Addresses lie one after another, so that attention reads rows in place; memory is behind those
    pages alone that hold some (Prabhu et al., vAttention, 2024, arXiv:2405.04437).

    Attributes:
        zeros: the tensor, on the CPU; of an element of its first two dimensions `free` gives back
            the pages, which then hold zeros again.
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
        """At least so many rows, which fill whole pages."""
        whole = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row_bytes)
        return -(-capacity // whole) * whole

    def free(self, first: int, second: int) -> None:
        """Give back the memory of `zeros[first, second]`."""
        at = (first * self._parts + second) * self._part
        self._memory.madvise(mmap.MADV_DONTNEED, at, self._part)


class KVState(State):
    """Keys and values of `n_seqs` sequences, for each layer a buffer of `capacity` rows.

    The buffers of several sequences are `PagedZeros` where the system has them (a CPU's memory,
    under Linux): none pays for the room that the longest needs, and `free` gives back what one
    held.

    Each head's rows lie one after another, as attention reads them; keys and values share a buffer,
    so that a forward appends both in one copy and the rows of a path are gathered in one go. Layers
    keep their own lengths: with a layer range or skipped layers some are ahead of others.

    Attributes:
        shapes: what each layer stores.
        buffers: consecutive layers of one shape share a buffer
            [layers, n_seqs, 2 heads, capacity, dim]: the keys of all heads, then the values. Those
            of pages have a few rows more, which fill the last one.
        lengths: rows written, by sequence and layer; read only.
        offsets: by sequence, how many rows were left out (`select`): a row's position is its number
            and that; read only.
        plans: what the decoder keeps of how it worked on this state, by a key of its own.
        pool: of a `line`, the state that it is one of; else None. place: its place there.
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
            # Zeroed: rows that were never written take part in masked products, where NaN would
            # spread.
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
        self._selected: list[list[int]] = [[] for _ in range(n_seqs)]  # positions of those chosen
        self._gaps: list[dict[int, list[int]]] = [{} for _ in range(n_seqs)]  # see `leave_out`
        self.plans: dict[tuple[int, ...], Any] = {}

    def line(self, seq: int) -> KVState:
        """A cleared state of one sequence alone, in the memory of this one's `seq`."""
        like = self.buffers[0]
        return type(self)(
            self.shapes, 1, self.capacity, dtype=like.dtype, device=like.device, within=(self, seq)
        )

    @property
    def nbytes(self) -> int:
        """Bytes that there is room for; of pages, those that hold no row take no memory."""
        numbers = sum(2 * shape.heads * shape.dim for shape in self.shapes)
        return numbers * self.n_seqs * self.capacity * self.buffers[0].itemsize

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Rows written for a sequence at a layer."""
        return self.lengths[seq][layer]

    def position(self, seq: int = 0) -> int:
        """Position of the next row: how many tokens of the text were fed."""
        return self.lengths[seq][0] + self.offsets[seq]

    def keys(self, layer: int) -> Tensor:
        """All rows' keys, a view [n_seqs, heads, capacity, key_dim]."""
        shape = self.shapes[layer]
        rows: Tensor = self._layers[layer][:, : shape.heads, :, : shape.key_dim]
        return rows

    def values(self, layer: int) -> Tensor:
        """All rows' values, a view [n_seqs, heads, capacity, value_dim]."""
        shape = self.shapes[layer]
        rows: Tensor = self._layers[layer][:, shape.heads :, :, : shape.value_dim]
        return rows

    def require(self, start: int, n: int) -> None:
        """Raise ValueError unless n rows fit after `start`."""
        if start + n > self.capacity:
            raise ValueError(
                f"{n} more rows after {start} do not fit into a state of {self.capacity} rows"
            )

    def extend(self, seq: int, layers: Iterable[int], n: int) -> None:
        """Count n rows more, written by a forward after each layer's last one."""
        lengths = self.lengths[seq]
        if (
            layers == self._all_layers
        ):  # by far the most often, and for hundreds of sequences a step
            lengths[:] = [have + n for have in lengths]
            return
        for layer in layers:
            lengths[layer] += n

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """See `State`: these layers then hold fewer rows than others, and have to be told the
        positions of those that follow."""
        for layer in layers:
            gaps = self._gaps[seq].setdefault(layer, [])
            first = self.lengths[seq][layer] + len(gaps)
            gaps.extend(range(first, first + n))

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """Keep, of the rows written since the last commit, those at `path`.

        A layer that was passed over, and so holds fewer rows than others, keeps those it has.

        Args:
            path: increasing indices, counted from the first row after the last commit.
            loose: so many of them, the last ones, count as written since this commit: the next one
                may leave them out.

        Raises:
            ValueError: `path` does not increase or names a row that was not written.
        """
        lengths, committed = self.lengths[seq], self._committed[seq]
        kept, base = len(path), committed[0]
        if (
            path == range(kept)
            and not loose
            and kept <= lengths[0] - base
            and _all_equal(lengths)
            and _all_equal(committed)
        ):  # a chain, all layers as far as each other: what hundreds of sequences do a step
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
        """Forget all rows from position n on."""
        lengths, committed = self.lengths[seq], self._committed[seq]
        if self.offsets[seq]:
            n = bisect_left(self.positions(seq), n)
            if n < len(self._selected[seq]):  # what comes next follows the last one that is left
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
        """Keep the rows with these numbers (increasing), commit them, and leave the others out.

        Their positions, and those of rows to come, stay what they were: attention sinks and a
        recent window (Xiao et al., StreamingLLM, ICLR 2024, arXiv:2309.17453) or any sparse choice.
        A model's own sliding window then counts rows.

        Raises:
            ValueError: numbers that do not increase or name no row, or layers of unlike lengths.
        """
        have = self.lengths[seq][0]
        if set(self.lengths[seq]) != {have}:
            raise ValueError("rows are selected of layers that hold as many each")
        kept = list(rows)
        if any(a >= b for a, b in pairwise(kept)) or (kept and not 0 <= kept[0] <= kept[-1] < have):
            raise ValueError(f"rows {kept} are no increasing numbers below {have}")
        held = self.positions(seq)
        self._committed[seq] = [0] * len(self.shapes)
        self.commit(seq, kept)
        self.offsets[seq] += have - len(kept)
        self._selected[seq] = [held[row] for row in kept]

    def positions(self, seq: int = 0) -> list[int]:
        """Position of each row."""
        chosen, offset = self._selected[seq], self.offsets[seq]
        have = self.lengths[seq][0]
        return [*chosen[:have], *range(len(chosen) + offset, have + offset)]

    def clear(self) -> None:
        """Forget everything; keeps the memory."""
        for seq in range(self.n_seqs):
            self.offsets[seq], self._selected[seq] = 0, []
            self.rollback(seq, 0)

    def free(self) -> None:
        """Forget everything; gives back the memory of a `line` whose pool is of pages."""
        self.clear()
        if self.pool is not None:
            for pages in self.pool._pages:
                for layer in range(len(pages.zeros)):
                    pages.free(layer, self.place)

    def _gather(self, seq: int, path: Sequence[int]) -> None:
        """Move the rows at `path` to the front of those written since the last commit."""
        still = next(at for at, row in enumerate(path) if at != row)  # rows before it stay in place
        spans = list(zip(self.shapes, self._committed[seq], self.lengths[seq], strict=True))
        for (_, base, length), same in groupby(range(len(spans)), key=spans.__getitem__):
            layers = list(same)
            kept = [base + row for row in path[still:] if base + row < length]
            rows = self._rows(layers, seq)
            first = base + still
            index = host.ids(kept, rows.device)
            rows.narrow(2, first, len(kept)).copy_(rows.index_select(2, index))

    def _rows(self, layers: Sequence[int], seq: int) -> Tensor:
        """Rows of consecutive layers of one shape, a view [layers, 2 heads, capacity, dim]."""
        first = 0
        for buffer in self.buffers:
            if layers[0] < first + len(buffer):
                return buffer[layers[0] - first : layers[-1] - first + 1, seq]
            first += len(buffer)
        raise IndexError(f"no layer {layers[0]}")


class Snapshot(NamedTuple):
    """What was remembered at the end of a forward: of so many tokens, all in all."""

    length: int
    held: Any


EMPTY = Snapshot(0, None)


class RecurrentState(State):
    """For each sequence what was remembered at the ends of its forwards, the last commit on.

    `commit` of all that was written keeps it. Of a part, and after `rollback`, the state is that
    of the last stop before: `length` says where, and the tokens from there on are fed again.
    """

    by_row = False

    def __init__(self, n_seqs: int, capacity: int) -> None:
        self.capacity = capacity
        self._snapshots = [[EMPTY] for _ in range(n_seqs)]
        self._committed = [0] * n_seqs

    @property
    def nbytes(self) -> int:
        """Bytes held; how many stops there are depends on what was decoded."""
        stops = [stop for line in self._snapshots for stop in line]
        return sum(tensor.nbytes for stop in stops for tensor in _tensors(stop.held))

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Tokens remembered of a sequence, the same at all layers."""
        return self._snapshots[seq][-1].length

    def position(self, seq: int = 0) -> int:
        """See `State`."""
        return self.length(seq)

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """None: there are no rows to be without."""
        raise MethodFault("a recurrent state holds no rows that some layers could be without")

    def held(self, seq: int) -> Any:
        """What is remembered, to be read only; None if nothing is."""
        return self._snapshots[seq][-1].held

    def write(self, seq: int, n: int, held: Any) -> None:
        """Remember what stands behind n more tokens."""
        length = self.length(seq) + n
        if length > self.capacity:
            raise ValueError(f"{length} tokens do not fit into a state of {self.capacity} rows")
        self._snapshots[seq].append(Snapshot(length, held))

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """See `State`.

        Raises:
            ValueError: tokens that were not written.
            MethodFault: a path with gaps: of a branch.
        """
        base, kept = self._committed[seq], len(path)
        if kept and path[-1] >= self.length(seq) - base:
            raise ValueError(f"path {list(path)} names rows outside the written ones")
        if list(path) != list(range(kept)):
            raise MethodFault(
                f"path {list(path)} leaves tokens out in between, and a recurrent state cannot",
                "choose chains, or feed what is kept once more",
            )
        firm = base + kept - loose
        self._restore(seq, base + kept, firm)
        self._committed[seq] = min(firm, self.length(seq))

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """Return to the last stop at n tokens or less; those before it are forgotten too."""
        self._restore(seq, n, n)
        self._committed[seq] = min(self._committed[seq], self.length(seq))

    def select(self, rows: Sequence[int], seq: int = 0) -> None:
        """Nothing: there are no rows to choose among. See `KVState.select`."""
        raise ChainsOnly(
            "a recurrent state keeps no rows of which some could be left out",
            "choose a method that keeps all that its draft has read",
        )

    def clear(self) -> None:
        """See `State`."""
        for seq in range(len(self._snapshots)):
            self._snapshots[seq], self._committed[seq] = [EMPTY], 0

    def _restore(self, seq: int, n: int, firm: int) -> None:
        """Forget the stops behind n, and those before the last one that `firm` tokens allow."""
        stops = [stop for stop in self._snapshots[seq] if stop.length <= n] or [EMPTY]
        first = max((at for at, stop in enumerate(stops) if stop.length <= firm), default=0)
        self._snapshots[seq] = stops[first:]


def _all_equal(lengths: Sequence[int]) -> bool:
    """Whether all layers hold as many rows."""
    return lengths.count(lengths[0]) == len(lengths)


def _tensors(held: Any) -> Iterator[Tensor]:
    """All tensors of a cache."""
    for layer in () if held is None else held.layers:
        for value in vars(layer).values():
            each = value.values() if isinstance(value, dict) else (value,)
            yield from (part for part in each if isinstance(part, Tensor))
