"""Where the rows of a forward go and what they attend to, worked out before a layer runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from specbench_cli.engine.attention import (
    FEW,
    CausalBias,
    attend_few,
    attend_many,
    attend_tree,
    visible,
)
from specbench_cli.engine.rotary import Rotary, Table
from specbench_cli.engine.state import KVState

MAX_PLANS = 512
"""Plans kept with a state; each takes of the order of 10 kB."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None]

View = tuple[Tensor, Tensor, Tensor, Tensor | None, Attend]
"""One sequence at one layer: where its new rows go [2 kv, n, d], keys [kv, d, seen] and values
[kv, seen, d], the bias and the function that attends."""

Line = tuple[Tensor, Tensor, Tensor]
"""One sequence in the buffers: queries and results [heads, n, d], new rows [2 kv, n, d]."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that shape a layer's buffers."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


class Scratch:
    """Buffers of a forward with n rows in each of b sequences, and the views a layer works on.

    size [b n, 1], normed [b n, hidden], qkv, qk (by head), turning (the same, as it is rotated),
    mixed [b n, heads d], gate_up and its halves gate and up.
    """

    def __init__(self, sizes: Sizes, rotary: Rotary, b: int, n: int, *, like: Tensor) -> None:
        rows, d, heads, kv = b * n, sizes.head_dim, sizes.heads, sizes.kv_heads
        self.size = like.new_empty(rows, 1)
        self.normed = like.new_empty(rows, sizes.hidden)
        self.qkv = like.new_empty(rows, (heads + 2 * kv) * d)
        by_head = self.qkv.unflatten(-1, (heads + 2 * kv, d))
        self.qk = by_head[:, : heads + kv]
        self.turning = rotary.view(self.qk)
        self.mixed = like.new_empty(rows, heads * d)
        self.gate_up = like.new_empty(rows, 2 * sizes.mlp)
        self.gate, self.up = self.gate_up.chunk(2, -1)
        results = self.mixed.unflatten(-1, (heads, d))
        self.lines: list[Line] = []
        for at in range(0, rows, n):
            block = by_head[at : at + n].transpose(0, 1)
            queries, result = block[:heads], results[at : at + n].transpose(0, 1)
            if n == 1:  # heads that share keys are as good as rows
                queries, result = (part.reshape(kv, -1, d) for part in (queries, result))
            self.lines.append((queries, result, block[heads:]))


class Plan(NamedTuple):
    """views: for each layer those of all sequences; table: rotary tables of all rows."""

    views: Sequence[tuple[View, ...]]
    table: Table
    scratch: Scratch


class Planner:
    """Makes the plans of one decoder.

    Args:
        windows: the sliding window of each layer, None where it sees everything.
        lean: whether short blocks take `attend_few`.
        like: a tensor of the device and dtype to work in.
    """

    def __init__(
        self,
        sizes: Sizes,
        rotary: Rotary,
        windows: Sequence[int | None],
        *,
        lean: bool,
        like: Tensor,
    ) -> None:
        self._sizes, self._rotary, self._windows = sizes, rotary, windows
        self._lean, self._like, self._device = lean, like, like.device
        self._all = range(len(windows))
        self._biases = {window: CausalBias(window, device=like.device) for window in windows}
        self._many = partial(attend_many, scale=rotary.scale)
        self._triangle = partial(attend_many, scale=rotary.scale, causal=True)
        self._tree = partial(attend_tree, scale=rotary.scale)
        self._scratch: dict[tuple[int, int], Scratch] = {}

    def reserve(self, capacity: int) -> None:
        """Have tables for sequences of so many rows."""
        self._rotary.reserve(capacity)
        if self._lean:
            for bias in self._biases.values():
                bias.reserve(capacity)

    def plain(self, state: KVState, lines: Sequence[int], n: int) -> Plan:
        """The plan of a forward without extras; a single sequence's is kept for the next time."""
        lengths = state.lengths[lines[0]]
        if len(lines) > 1 or n > FEW or lengths.count(lengths[0]) < len(lengths):
            return self.special(state, lines, self._all, n, None, None)
        key = (lines[0], lengths[0], n)
        plan: Plan | None = state.plans.get(key)
        if plan is None:
            if len(state.plans) >= MAX_PLANS:
                state.plans.clear()
            plan = state.plans[key] = self.special(state, lines, self._all, n, None, None)
        return plan

    def special(
        self,
        state: KVState,
        lines: Sequence[int],
        run: Sequence[int],
        n: int,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> Plan:
        """The plan of a forward through the layers `run` with any mask [n, n] and positions [b, n].

        Raises:
            ValueError: the state has no room for n more rows.
        """
        views = []
        for i, seq in enumerate(lines):
            at, lengths = None if positions is None else positions[i], state.lengths[seq]
            parts: list[View] = []
            kinds = [(lengths[layer], self._windows[layer], layer) for layer in run]
            for (start, window), same in groupby(kinds, key=itemgetter(0, 1)):
                layers = [layer for _, _, layer in same]
                parts += self._views(state, seq, layers, start, window, n, mask, at)
            views.append(parts)
        starts = [state.lengths[seq][run[0]] if run else 0 for seq in lines]
        table = self._table(starts, n, positions)
        return Plan(list(zip(*views, strict=True)), table, self._scratch_for(len(lines), n))

    def _views(
        self,
        state: KVState,
        seq: int,
        run: Sequence[int],
        start: int,
        window: int | None,
        n: int,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> list[View]:
        """The views of n rows after `start`, on layers that share length and window."""
        state.require(start, n)
        first = 0  # rows before it are out of every new row's window
        bias: Tensor | None = None
        attend: Attend = self._tree
        if mask is not None or (positions is not None and window is not None):
            bias = visible(
                start, n, device=self._device, mask=mask, positions=positions, window=window
            )
        else:
            if window is not None:
                first = max(0, start + 1 - window)
            bias, attend = self._sight(start, first, n, window)
        low, kv = run[0], self._sizes.kv_heads
        rows = state.buffers[0][low : run[-1] + 1, seq]
        seen = rows[:, :, first : start + n]
        opened = zip(
            rows[:, :, start : start + n].unbind(),
            seen[:, :kv].mT.unbind(),
            seen[:, kv:].unbind(),
            strict=True,
        )
        views = [(*parts, bias, attend) for parts in opened]
        return [views[layer - low] for layer in run]

    def _sight(
        self, start: int, first: int, n: int, window: int | None
    ) -> tuple[Tensor | None, Attend]:
        """Bias and function for n rows after `start` that see the usual rows from `first` on."""
        if self._lean and n == 1:
            return None, attend_few
        if self._lean and n <= FEW and self._sizes.heads == self._sizes.kv_heads:
            return self._biases[window].of(start, first, n), attend_few
        if n == 1:
            return None, self._many
        if start == 0 and (window is None or n <= window):
            return None, self._triangle
        return visible(start, n, device=self._device, window=window)[:, first:], self._many

    def _table(self, starts: Sequence[int], n: int, positions: Tensor | None) -> Table:
        if positions is None:
            if len(starts) == 1:
                return self._rotary.at(starts[0], n)
            steps = torch.arange(n, device=self._device)
            positions = torch.tensor(starts, device=self._device)[:, None] + steps
        return self._rotary.select(positions.reshape(-1))

    def _scratch_for(self, b: int, n: int) -> Scratch:
        scratch = self._scratch.get((b, n))
        if scratch is None:
            scratch = Scratch(self._sizes, self._rotary, b, n, like=self._like)
            if n <= FEW:  # longer blocks are rare, and their buffers large
                self._scratch[b, n] = scratch
        return scratch
