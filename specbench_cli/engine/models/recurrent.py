"""Models that remember a text in numbers of a fixed size (Mamba-2, and hybrids with attention).

Nothing of what was read can be taken out of such a state. What stands at the end of a forward is
kept, so that a state can return to it; whoever needs a place between two of these feeds the tokens
in between once more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from specbench_cli.engine.models.decoder import ChainsOnly, LogitsAt, State
from specbench_cli.engine.models.hosted import ChainDecoder, apart
from specbench_cli.engine.types import Tokens
from specbench_cli.errors import MethodFault


class Stop(NamedTuple):
    """What was remembered at the end of a forward: of so many tokens, all in all."""

    length: int
    held: Any


START = Stop(0, None)


class RecurrentState(State):
    """For each sequence what was remembered at the ends of its forwards, the last commit on.

    `commit` of all that was written keeps it. Of a part, and after `rollback`, the state is that
    of the last stop before: `length` says where, and the tokens from there on are fed again.
    """

    by_row = False

    def __init__(self, n_seqs: int, capacity: int) -> None:
        self.capacity = capacity
        self._stops = [[START] for _ in range(n_seqs)]
        self._committed = [0] * n_seqs

    @property
    def nbytes(self) -> int:
        """Bytes held; how many stops there are depends on what was decoded."""
        stops = [stop for line in self._stops for stop in line]
        return sum(tensor.nbytes for stop in stops for tensor in _tensors(stop.held))

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Tokens remembered of a sequence, the same at all layers."""
        return self._stops[seq][-1].length

    def position(self, seq: int = 0) -> int:
        """See `State`."""
        return self.length(seq)

    def held(self, seq: int) -> Any:
        """What is remembered, to be read only; None if nothing is."""
        return self._stops[seq][-1].held

    def write(self, seq: int, n: int, held: Any) -> None:
        """Remember what stands behind n more tokens."""
        length = self.length(seq) + n
        if length > self.capacity:
            raise ValueError(f"{length} tokens do not fit into a state of {self.capacity} rows")
        self._stops[seq].append(Stop(length, held))

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
        self._return(seq, base + kept, firm)
        self._committed[seq] = min(firm, self.length(seq))

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """Return to the last stop at n tokens or less; those before it are forgotten too."""
        self._return(seq, n, n)
        self._committed[seq] = min(self._committed[seq], self.length(seq))

    def select(self, rows: Sequence[int], seq: int = 0) -> None:
        """Nothing: there are no rows to choose among. See `KVState.select`."""
        raise ChainsOnly(
            "a recurrent state keeps no rows of which some could be left out",
            "choose a method that keeps all that its draft has read",
        )

    def clear(self) -> None:
        """See `State`."""
        for seq in range(len(self._stops)):
            self._stops[seq], self._committed[seq] = [START], 0

    def _return(self, seq: int, n: int, firm: int) -> None:
        """Forget the stops behind n, and those before the last one that `firm` tokens allow."""
        stops = [stop for stop in self._stops[seq] if stop.length <= n] or [START]
        first = max((at for at, stop in enumerate(stops) if stop.length <= firm), default=0)
        self._stops[seq] = stops[first:]


class RecurrentDecoder(ChainDecoder):
    """A module that remembers in its own cache, of which a copy is kept at the end of each forward.

    Raises:
        UsageError: the module does not go on from its cache as if it had read all at once.
    """

    _by_token = False  # whether tokens behind the first forward's are fed one at a time

    def new_state(self, capacity: int, n_seqs: int = 1) -> RecurrentState:
        """See `Decoder`; nothing of it is preallocated."""
        return RecurrentState(n_seqs, capacity)

    def _line(
        self, ids: Tensor, state: Any, seq: int, at: LogitsAt, wanted: set[int]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        assert isinstance(state, RecurrentState)
        held, n = state.held(seq), ids.shape[1]
        # The module writes into its cache.
        cache = DynamicCache(config=self.module.config) if held is None else copy.deepcopy(held)
        inputs = {self._keeps: cache, "use_cache": True}
        if held is None or n == 1 or not self._by_token:
            left, logits = self._run({"input_ids": ids, **inputs}, at, wanted, n)
        else:
            each: LogitsAt = None if at is None else "all"
            runs = [
                self._run({"input_ids": one, **inputs}, each, wanted, 1) for one in ids.split(1, 1)
            ]
            left = {layer: torch.cat([rows[layer] for rows, _ in runs], 1) for layer in wanted}
            logits = _chosen([found for _, found in runs], at)
        state.write(seq, n, cache)
        return left, logits

    def _trial(self, ids: Tensor) -> float:
        """Finds out, too, whether the module reads several tokens at once behind its cache."""
        self._keeps = "cache_params" if "cache_params" in self._accepted else "past_key_values"
        expected = self.module(input_ids=ids, use_cache=False).logits
        gap = self._tried(ids, expected)
        if not gap <= self.rounding:
            self._by_token = True
            gap = self._tried(ids, expected)
        return gap

    def _tried(self, ids: Tensor, expected: Tensor) -> float:
        state = self.new_state(ids.shape[1])
        parts = ids.split((4, 1, 3, 1), 1)
        return apart(
            [self.forward(Tokens(part), state, logits_at="all") for part in parts], expected
        )


def _chosen(logits: Sequence[Tensor | None], at: LogitsAt) -> Tensor | None:
    """Of logits [1, 1, V] of each token those that were asked for."""
    rows = [each for each in logits if each is not None]
    if at is None or not rows:
        return None
    if at == "last":
        return rows[-1]
    whole = torch.cat(rows, 1)
    return whole.index_select(1, at) if isinstance(at, Tensor) else whole


def _tensors(held: Any) -> Iterator[Tensor]:
    """All tensors of a cache."""
    for layer in () if held is None else held.layers:
        for value in vars(layer).values():
            each = value.values() if isinstance(value, dict) else (value,)
            yield from (part for part in each if isinstance(part, Tensor))
