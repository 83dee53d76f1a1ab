"""Forward plans: views of the KV cache, attention masks and rotary tables for one forward.

`FusedDecoder` computes a plan before the layers run, and reuses it for forwards of the same shape.
A plan determines where each layer writes the keys and values of new rows, and which rows the new
rows attend to. A row is the hidden state of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.attention import (
    MAX_FEW,
    CausalBias,
    Rotary,
    Table,
    attend_batch,
    attend_few,
    attend_fixed,
    attend_many,
    attend_pool,
    attend_shared,
    attend_tree,
    visible,
)
from specbench_cli.engine.models.cuda.graphs import GraphBuffers
from specbench_cli.engine.models.decoder import ModelInput
from specbench_cli.engine.models.state import KVState
from specbench_cli.former_names import renamed_members

MAX_PLANS = 512
"""Maximum number of plans cached per state; each takes about 10 kB."""

MAX_PADDING = 1.4
"""Maximum ratio of rows read to rows needed if attention runs several sequences in one call on a
CPU.

In one call, attention reads each sequence up to the length of the longest one. The limit does not
apply on an accelerator, where an extra kernel launch takes longer than reading more rows."""

MAX_GAP = 4
"""Maximum ratio of pool places read to sequences, if an accelerator runs several in one call.

A pool holds the caches of all sequences of a batch, one per place. One call reads all places from
the first sequence to the last, also those of sequences that are not part of the forward."""

ROW_MULTIPLE = 64
"""On an accelerator, attention over several sequences reads a multiple of this many rows.

Then kernels need no padding, and PyTorch does not select a new kernel for every length."""

BIAS_ALIGNMENT = 8
"""Alignment of the rows of an attention bias, in elements, as CUDA kernels need it."""

MAX_SCRATCH = 64
"""Maximum number of cached `Scratch` objects."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None]
"""An attention function with the arguments q, k, v, bias and out; see `attention`."""

KVViews = tuple[Tensor, Tensor, Tensor]
"""Views of the cache of one sequence at one layer.

They are the destination of the new rows [2 kv, n, d], the keys [kv, d, seen] and the values
[kv, seen, d]."""

Visibility = tuple[int, Tensor | None, Attend]
"""Rows that new rows attend to: the first such row, the attention bias from that row on, and the
attention function."""

LayerView = tuple[Callable[[Tensor], object], Tensor, Tensor, Tensor | None, Attend]
"""Attention inputs of one layer: a function that writes new rows to the cache, the keys, the
values, the bias, and the attention function."""

SequenceViews = tuple[Tensor, Tensor, Tensor]
"""Views of one sequence in the buffers of a forward.

They are the queries and the attention results [heads, n, d], and the new keys and values
[2 kv, n, d]. For b consecutive sequences with n rows each, the shapes are [b, heads, n, d] and
[b, n, 2 kv, d]. If n is 1, heads that share keys become rows: [(b,) kv, heads / kv, d]."""


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Sizes of the buffers that a layer's forward needs."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@renamed_members(
    turning="rotary_pairs",
    mixed="attention_output",
    lines="all_sequence_views",
    line="sequence_views",
    batch_line="batch_views",
)
class Scratch:
    """Buffers for a forward with N new rows, and views of the buffers.

    Args:
        ns: Number of new rows of each sequence. Their sum is N.

    Attributes:
        size: Norms of the rows, [N, 1].
        normed: Rows after a norm, [N, hidden].
        qkv: Queries, keys and values, [N, (heads + 2 kv) d].
        qk: View of the queries and keys, by head.
        rotary_pairs: View of `qk` for `Rotary.rotate`.
        attention_output: Output of attention, [N, heads d].
        gate_up, gate, up: Output of the MLP's first product, and views of its two halves.
    """

    def __init__(
        self, sizes: BufferSizes, rotary: Rotary, ns: Sequence[int], *, like: Tensor
    ) -> None:
        rows, d, heads, kv = sum(ns), sizes.head_dim, sizes.heads, sizes.kv_heads
        self.size = like.new_empty(rows, 1, dtype=torch.float32)
        self.normed = like.new_empty(rows, sizes.hidden)
        self.qkv = like.new_empty(rows, (heads + 2 * kv) * d)
        by_head = self.qkv.unflatten(-1, (heads + 2 * kv, d))
        self.qk = by_head[:, : heads + kv]
        self.rotary_pairs = rotary.as_pairs(self.qk)
        self.attention_output = like.new_empty(rows, heads * d)
        self.gate_up = like.new_empty(rows, 2 * sizes.mlp)
        self.gate, self.up = self.gate_up.chunk(2, -1)
        self._sizes, self._by_head = sizes, by_head
        self._results = self.attention_output.unflatten(-1, (heads, d))
        self._spans = [slice(end - n, end) for end, n in zip(accumulate(ns), ns, strict=True)]
        self._views: dict[int, SequenceViews] = {}

    @property
    def all_sequence_views(self) -> list[SequenceViews]:
        """Buffer views of each sequence, from `sequence_views`."""
        return [self.sequence_views(i) for i in range(len(self._spans))]

    def sequence_views(self, i: int) -> SequenceViews:
        """Return the buffer views of sequence i.

        The views are created on first use. In a batch of hundreds of sequences, most sequences only
        need `batch_views`.
        """
        if i not in self._views:
            span, sizes = self._spans[i], self._sizes
            block = self._by_head[span].transpose(0, 1)
            queries, result = block[: sizes.heads], self._results[span].transpose(0, 1)
            if span.stop - span.start == 1:  # treat heads that share keys as rows
                shape = sizes.kv_heads, -1, sizes.head_dim
                queries, result = (part.reshape(shape) for part in (queries, result))
            self._views[i] = queries, result, block[sizes.heads :]
        return self._views[i]

    def batch_views(self, first: int, b: int, n: int) -> SequenceViews:
        """Return the buffer views of b sequences with n rows each, starting at row `first`."""
        heads, span = self._sizes.heads, slice(first, first + b * n)
        block = self._by_head[span].unflatten(0, (b, n))
        results = self._results[span].unflatten(0, (b, n))
        queries, result = block[:, :, :heads].transpose(1, 2), results.transpose(1, 2)
        if n == 1:  # as in `sequence_views`
            kv = self._sizes.kv_heads
            queries, result = (part.reshape(b, kv, heads // kv, -1) for part in (queries, result))
        return queries, result, block[:, :, heads:]


class ForwardPlan(NamedTuple):
    """Precomputed views and tables for one forward.

    Attributes:
        views: For each layer, the inputs of its attention calls. One attention call covers one
            sequence or several sequences.
        table: Rotary tables of all new rows.
        sequence_views: Views of the buffers, one for each attention call of a layer.
        assumes_finite: True if the masks work only when all rows are finite. If an output row is
            then not finite, the caller repeats the forward with a plan that replaces non-finite
            values.
        rotates: True if the function that writes keys and values also rotates queries and keys.
    """

    views: Sequence[tuple[LayerView, ...]]
    table: Table
    scratch: Scratch
    sequence_views: Sequence[SequenceViews]
    assumes_finite: bool = False
    rotates: bool = False


class Planner:
    """Object that creates the forward plans of one decoder.

    Args:
        windows: Sliding window size of each layer. None means full attention.
        lean: Whether forwards of few rows use `attend_few`.
        like: A tensor whose device and dtype the plans use.
        kernels: Module with specbench's own kernels for few rows of one sequence, or None.
    """

    def __init__(
        self,
        sizes: BufferSizes,
        rotary: Rotary,
        windows: Sequence[int | None],
        *,
        lean: bool,
        like: Tensor,
        kernels: Any = None,
    ) -> None:
        self._sizes, self._rotary, self._windows, self._kernels = sizes, rotary, windows, kernels
        self._lean, self._like, self._device = lean, like, like.device
        self._on_host = host.is_on_host(like.device)
        self._biases = {window: CausalBias(window, device=like.device) for window in windows}
        self._attend_many = partial(attend_many, scale=rotary.scale)
        self._attend_batch = partial(attend_batch, scale=rotary.scale)
        self._attend_pool = partial(attend_pool, scale=rotary.scale)
        self._attend_causal = partial(attend_many, scale=rotary.scale, causal=True)
        self._heads_per_kv = sizes.heads // sizes.kv_heads  # heads that share keys
        self._scratch: dict[tuple[int, ...], Scratch] = {}

    def reserve(self, capacity: int) -> None:
        """Allocate mask and rotary tables for sequences of up to `capacity` rows."""
        self._rotary.reserve(capacity)
        if self._lean:
            for bias in self._biases.values():
                bias.reserve(capacity)

    def plan_plain(
        self, state: KVState, lines: Sequence[int], run: range, n: int, *, in_batch: bool = False
    ) -> ForwardPlan:
        """Return the plan of a causal forward through the layers `run`.

        The plan of a single sequence is cached.

        Args:
            in_batch: Whether the plan becomes part of a plan for several sequences.
        """
        lengths = state.lengths[lines[0]][run.start : run.stop]
        if len(lines) > 1 or n > MAX_FEW or lengths.count(lengths[0]) < len(lengths):
            return self.plan_masked(state, lines, run, n, None, None, in_batch=in_batch)
        where = lines[0], lengths[0], n, run.start, run.stop, state.offsets[lines[0]]
        key = (*where, int(in_batch))
        plan: ForwardPlan | None = state.plans.get(key)
        if plan is None:
            plan = self.plan_masked(state, lines, run, n, None, None, in_batch=in_batch)
            self._cache(state, key, plan)
        return plan

    def plan_batch(
        self, parts: Sequence[ModelInput], run: range, *, replace_nonfinite: bool = False
    ) -> ForwardPlan:
        """Return the plan of a forward over several sequences, each with its own state.

        The plan combines the plans of the single sequences. One attention call processes several
        sequences if they are neighbours in a pool of states, are causal, and have equally many new
        rows.
        """
        ns = [part.shape[1] for part in parts]
        scratch = self.scratch_for(ns)
        views: list[Sequence[tuple[LayerView, ...]]] = []
        tables: list[Table] = []
        sequence_views: list[SequenceViews] = []
        assumes_finite, first, at = False, 0, 0
        while at < len(parts):
            state, n, alone = cast(KVState, parts[at].state), ns[at], _has_own_mask(parts[at])
            b = 1 if alone or n > MAX_FEW else self._count_neighbours(parts, ns, at)
            if b > 1:
                states = [cast(KVState, part.state) for part in parts[at : at + b]]
                pooled, table = self._pool_views(states, n)
                views.append(pooled)
                sequence_views.append(scratch.batch_views(first, b, n))
                tables.append(table)
            else:
                part = parts[at]
                how = part.mask, part.positions
                plan = (
                    self.plan_masked(
                        state,
                        (0,),
                        run,
                        n,
                        *how,
                        replace_nonfinite=replace_nonfinite,
                        in_batch=True,
                    )
                    if alone
                    else self.plan_plain(state, (0,), run, n, in_batch=True)
                )
                views.append(plan.views)
                sequence_views.append(scratch.sequence_views(at))
                tables.append(plan.table)
                assumes_finite |= plan.assumes_finite
            at, first = at + b, first + b * n
        return ForwardPlan(
            views=[tuple(chain.from_iterable(layer)) for layer in zip(*views, strict=True)],
            table=tuple(map(torch.cat, zip(*tables, strict=True))),
            scratch=scratch,
            sequence_views=sequence_views,
            assumes_finite=assumes_finite,
        )

    def _count_neighbours(self, parts: Sequence[ModelInput], ns: Sequence[int], at: int) -> int:
        """Return how many parts, starting at index `at`, one attention call can process.

        The parts must be neighbours in one pool of states. They should have similar lengths,
        because the call reads all parts up to the end of the longest one.
        """
        first, b = cast(KVState, parts[at].state), 1
        if first.pool is None or any(self._windows):
            return 1
        longest = total = first.length()
        last = first.place
        while (
            at + b < len(parts)
            and ns[at + b] == ns[at]
            and not _has_own_mask(parts[at + b])
            and (state := cast(KVState, parts[at + b].state)).pool is first.pool
        ):
            span = state.place - first.place + 1
            if self._on_host:
                rows = state.length()
                longest, total = max(longest, rows), total + rows
                if span != b + 1 or (b + 1) * longest > MAX_PADDING * total:
                    break
            elif state.place <= last or span > MAX_GAP * (b + 1):
                break
            last, b = state.place, b + 1
        return b

    def _pool_views(
        self, states: Sequence[KVState], n: int
    ) -> tuple[list[tuple[LayerView, ...]], Table]:
        """Return the views and the rotary table of neighbours in a pool that share attention calls.

        Each of these sequences is causal and has n new rows.
        """
        pool, kv, b = cast(KVState, states[0].pool), self._sizes.kv_heads, len(states)
        low, high = states[0].place, states[-1].place + 1
        starts = [state.length() for state in states]
        for state, start in zip(states, starts, strict=True):
            state.require(start, n)
        longest = max(starts) + n
        if not self._on_host:
            longest = min(pool.capacity, -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE)
        which = [state.place - low for state in states]
        positions = [state.position() for state in states]
        sent = host.ids([starts, positions, which], self._device)[:, :, None]
        steps = torch.arange(n, device=self._device)
        at, attend = sent[0] + steps, cast(Attend, self._attend_batch)
        seen_to = at  # last row that each new row attends to, for all places
        if high - low > b:
            query_rows, ends = [0] * (high - low), [0] * (high - low)
            for i, (place, start) in enumerate(zip(which, starts, strict=True)):
                query_rows[place], ends[place] = i, start
            indices = host.ids([query_rows, ends], self._device)
            seen_to = indices[1, :, None] + steps
            attend = partial(self._attend_pool, query_rows=indices[0], which=sent[2, :, 0])
        columns = torch.arange(longest, device=self._device)
        bias = self._like.new_zeros(high - low, 1, n, longest)
        bias.masked_fill_(columns > seen_to[:, None, :, None], -torch.inf)
        where = sent[2].expand_as(at), at
        rows = pool.buffers[0][:, low:high]
        seen = rows[:, :, :, :longest]
        views: list[tuple[LayerView, ...]] = [
            ((partial(new.index_put_, where), keys, values, bias, attend),)
            for new, keys, values in zip(
                rows.transpose(2, 3).unbind(),
                seen[:, :, :kv].unbind(),
                seen[:, :, kv:].unbind(),
                strict=True,
            )
        ]
        return views, self._rotary.select((sent[1] + steps).reshape(-1))

    def plan_masked(
        self,
        state: KVState,
        lines: Sequence[int],
        run: Sequence[int],
        n: int,
        mask: Tensor | None,
        positions: Tensor | None,
        *,
        replace_nonfinite: bool = False,
        in_batch: bool = False,
    ) -> ForwardPlan:
        """Return the plan of a forward through the layers `run`, with any mask and positions.

        Args:
            mask: Mask [n, n], or None for a causal mask.
            positions: Positions [b, n], or None for consecutive positions.
            replace_nonfinite: Whether masked rows with non-finite values must not affect the
                result. If False, a plan with a mask may set `assumes_finite`.
            in_batch: Whether the plan becomes part of a plan for several sequences.

        Raises:
            ValueError: The state has no space for n more rows.
        """
        if self._kernels is not None and not in_batch and len(lines) == 1 and n <= MAX_FEW:
            return self._plan_numba(state, lines[0], run, n, mask, positions)
        views = []
        assumes_finite = self._lean and mask is not None and not replace_nonfinite
        for i, seq in enumerate(lines):
            at, lengths = None if positions is None else positions[i], state.lengths[seq]
            parts: list[LayerView] = []
            visibilities: dict[tuple[int, int | None], Visibility] = {}
            kinds = [(lengths[layer], self._windows[layer], layer) for layer in run]
            for (start, window), same in groupby(kinds, key=itemgetter(0, 1)):
                layers = [layer for _, _, layer in same]
                if (start, window) not in visibilities:
                    state.require(start, n)
                    visibilities[start, window] = (
                        self._causal_visibility(start, n, window)
                        if mask is None and (positions is None or window is None)
                        else self._masked_visibility(
                            start, n, window, mask, at, assumes_finite=assumes_finite
                        )
                    )
                first, bias, attend = visibilities[start, window]
                span = (seq, layers[0], layers[-1] + 1, start, first, n)
                places = self._kv_views(state, span, keep=mask is not None)
                for layer in layers:
                    new, keys, values = places[layer - layers[0]]
                    parts.append((new.copy_, keys, values, bias, attend))
            views.append(parts)
        starts = [state.lengths[seq][run[0]] + state.offsets[seq] if run else 0 for seq in lines]
        table = self._table(starts, n, positions)
        scratch = self.scratch_for([n] * len(lines))
        return ForwardPlan(
            list(zip(*views, strict=True)),
            table,
            scratch,
            scratch.all_sequence_views,
            assumes_finite,
        )

    def _plan_numba(
        self,
        state: KVState,
        seq: int,
        run: Sequence[int],
        n: int,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> ForwardPlan:
        """Return the plan of `plan_masked` for specbench's own CPU kernels."""
        lengths, at = state.lengths[seq], None if positions is None else positions[0]
        for start in {lengths[layer] for layer in run}:
            state.require(start, n)
        begins = lengths[run[0]] + state.offsets[seq] if run else 0
        table, scratch = self._table([begins], n, positions), self.scratch_for([n])
        views: list[tuple[LayerView, ...]] = []
        kinds = [(lengths[layer], self._windows[layer], layer) for layer in run]
        for (start, window), same in groupby(kinds, key=itemgetter(0, 1)):
            layers = [layer for _, _, layer in same]
            first, sees, within = 0, mask, window
            if window is not None and mask is None and positions is None:
                first = max(0, start + 1 - window)
            elif window is not None:
                sees, within = (
                    visible(start, n, device=self._device, mask=mask, positions=at, window=window),
                    None,
                )
            made = self._kernels.layer_functions(
                state.buffers[0][layers[0] : layers[-1] + 1, seq],
                *(
                    scratch.qkv,
                    scratch.attention_output,
                    table,
                    self._sizes.kv_heads,
                    (start, first, n),
                ),
                mask=sees,
                window=within,
                scale=self._rotary.scale,
            )
            for layer in layers:
                keep, attend = made[layer - layers[0]]
                views.append(((keep, self._like, self._like, None, attend),))
        return ForwardPlan(views, table, scratch, scratch.all_sequence_views, rotates=True)

    def plan_recorded(
        self, rows: Tensor, buffers: GraphBuffers, scratch: Scratch, seen: int, kernels: Any = None
    ) -> ForwardPlan:
        """Return the plan of a forward that is captured in a CUDA graph.

        A graph has fixed shapes. So attention always reads `seen` rows, and a mask hides the rows
        that are not written yet. The graph reads the number of cached rows from a device tensor.

        Args:
            rows: Cache rows of all layers, [layers, 2 kv heads, capacity, d].
            scratch: Buffers for the new rows.
            seen: Number of rows that attention reads.
            kernels: Module with Triton kernels. None means torch operations.
        """
        n, kv, device = len(scratch.normed), self._sizes.kv_heads, self._device
        steps, mask, scale = torch.arange(n, device=device), buffers.mask, self._rotary.scale
        at = buffers.start[:1] + steps
        positions = buffers.start[1:] + steps if buffers.positions is None else buffers.positions
        table, clean = self._rotary.select(positions.reshape(-1)), mask is not None

        def write(cache: Tensor, new: Tensor) -> None:
            if kernels is not None:
                kernels.rotate_and_store(scratch.qkv, *table, at, cache, kv, clean=clean)
                return
            if clean:
                new[kv:].nan_to_num_()  # see `attend_tree`
            cache.index_copy_(1, at, new)

        def attend_here(cache: Tensor, window: int | None, *_: Any) -> None:
            kernels.attend(scratch.qkv, cache, at, scratch.attention_output, kv, window, scale)

        biases: dict[int | None, Tensor | None] = dict.fromkeys(self._windows)
        attend: Attend = partial(attend_fixed, scale=scale)
        here = (
            kernels is not None
            and mask is None
            and kernels.supports_attention(n * self._heads_per_kv, seen, rows)
        )
        if mask is not None:
            biases[None] = self._padded_bias(self._tree_visibility(buffers.start, mask, seen))
            attend = partial(attend_tree, scale=scale, n=0)
        elif not here:
            columns = torch.arange(seen, device=device)
            for window in biases:
                sees = columns <= at[:, None]
                if window is not None:
                    sees &= columns > at[:, None] - window
                biases[window] = self._padded_bias(sees)
        read = rows[:, :, :seen]
        views: list[tuple[LayerView, ...]] = []
        for window, cache, keys, values in zip(
            self._windows,
            rows.unbind(),
            read[:, :kv].mT.unbind(),
            read[:, kv:].unbind(),
            strict=True,
        ):
            by: Attend = partial(attend_here, cache, window) if here else attend
            views.append(((partial(write, cache), keys, values, biases[window], by),))
        return ForwardPlan(
            views, table, scratch, scratch.all_sequence_views, rotates=kernels is not None
        )

    def _tree_visibility(self, start: Tensor, mask: Tensor, seen: int) -> Tensor:
        """Return which of `seen` rows each new row attends to, [n, seen] bool.

        Args:
            start: [2], the number of cached rows and the position of the first new row.
            mask: Mask [n, w + n] over the last w cached rows and the n new rows. All earlier rows
                are visible.
        """
        n, width = mask.shape
        columns, first = torch.arange(seen, device=self._device), start[:1] + n - width
        block = first + torch.arange(width, device=self._device)
        return (columns < first).expand(n, seen).clone().index_copy_(1, block, mask)

    def _padded_bias(self, sees: Tensor) -> Tensor:
        """Return the attention bias [heads / kv heads x n, seen] of a bool mask [n, seen].

        The rows of the bias are aligned in memory, as CUDA kernels require.
        """
        n, seen = sees.shape
        bias = self._like.new_zeros(n, -(-seen // BIAS_ALIGNMENT) * BIAS_ALIGNMENT)
        bias[:, :seen].masked_fill_(~sees, -torch.inf)
        return bias.repeat(self._heads_per_kv, 1)[:, :seen]

    def _kv_views(
        self, state: KVState, span: tuple[int, int, int, int, int, int], *, keep: bool
    ) -> list[KVViews]:
        """Return the cache views of consecutive layers.

        Args:
            span: Six numbers: sequence, first layer, end layer, number of cached rows, first row
                that attention reads, number of new rows.
            keep: Whether to cache the views. Each tree needs a new mask, but can use the same
                views.
        """
        places: list[KVViews] | None = state.plans.get(span) if keep else None
        if places is None:
            seq, low, high, start, first, n = span
            kv = self._sizes.kv_heads
            rows = state.buffers[0][low:high, seq]
            seen = rows[:, :, first : start + n]
            places = list(
                zip(
                    rows[:, :, start : start + n].unbind(),
                    seen[:, :kv].mT.unbind(),
                    seen[:, kv:].unbind(),
                    strict=True,
                )
            )
            if keep:
                self._cache(state, span, places)
        return places

    @staticmethod
    def _cache(state: KVState, key: tuple[int, ...], made: Any) -> None:
        if len(state.plans) >= MAX_PLANS:
            state.plans.clear()
        state.plans[key] = made

    def _masked_visibility(
        self,
        start: int,
        n: int,
        window: int | None,
        mask: Tensor | None,
        positions: Tensor | None,
        *,
        assumes_finite: bool,
    ) -> Visibility:
        """Return which rows n new rows attend to, if they have their own mask or positions.

        `start` is the number of cached rows. All layers with the same sliding window share the
        result.
        """
        bias = self._like.new_zeros(n, start + n)
        if window is None and mask is not None:
            bias[:, start + n - mask.shape[1] :].masked_fill_(~mask, -torch.inf)
        else:
            seen = visible(
                start, n, device=self._device, mask=mask, positions=positions, window=window
            )
            bias.masked_fill_(~seen, -torch.inf)
        if self._heads_per_kv > 1:
            bias = bias.repeat(self._heads_per_kv, 1)
        if assumes_finite:
            return 0, bias, attend_few if self._heads_per_kv == 1 else attend_shared
        return 0, bias, partial(attend_tree, scale=self._rotary.scale, n=n)

    def _causal_visibility(self, start: int, n: int, window: int | None) -> Visibility:
        """Return which rows n causal new rows attend to, after `start` cached rows."""
        first = 0 if window is None else max(0, start + 1 - window)
        if self._lean and n == 1:
            return first, None, attend_few
        if self._lean and n <= MAX_FEW and self._heads_per_kv == 1:
            return first, self._biases[window].slice(start, first, n), attend_few
        if n == 1:
            return first, None, self._attend_many
        if start == 0 and (window is None or n <= window):
            return first, None, self._attend_causal
        seen = visible(start, n, device=self._device, window=window)
        return first, seen[:, first:], self._attend_many

    def _table(self, starts: Sequence[int], n: int, positions: Tensor | None) -> Table:
        if positions is None:
            if len(starts) == 1:
                return self._rotary.slice(starts[0], n)
            steps = torch.arange(n, device=self._device)
            positions = host.ids(starts, self._device)[:, None] + steps
        return self._rotary.select(positions.reshape(-1))

    def scratch_for(self, ns: Sequence[int]) -> Scratch:
        """Return the buffers of a forward with ns[i] new rows in sequence i."""
        key = tuple(ns)
        scratch = self._scratch.get(key)
        if scratch is None:
            scratch = Scratch(self._sizes, self._rotary, key, like=self._like)
            if max(key) <= MAX_FEW:  # do not cache the large buffers of prompts
                if len(self._scratch) >= MAX_SCRATCH:
                    self._scratch.clear()
                self._scratch[key] = scratch
        return scratch


def _has_own_mask(part: ModelInput) -> bool:
    """Return True if a sequence has an explicit mask or explicit positions."""
    return part.mask is not None or part.positions is not None
