"""Models that remember a text in numbers of a fixed size (Mamba-2, and hybrids with attention).

Nothing of what was read can be taken out of such a state. What stands at the end of a forward is
kept, so that a state can return to it; whoever needs a place between two of these feeds the tokens
in between once more.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from specbench_cli.engine.models.decoder import LogitsAt
from specbench_cli.engine.models.hosted import ChainDecoder, apart
from specbench_cli.engine.models.state import RecurrentState
from specbench_cli.engine.types import Tokens


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
