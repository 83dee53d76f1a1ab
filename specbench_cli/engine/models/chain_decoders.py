"""Decoders of transformers modules that support only chains: recurrent and encoder-decoder models.

A recurrent model (Mamba-2, or a hybrid with attention) stores the text in a state of fixed size.
Single tokens cannot be removed from such a state. So the decoder keeps a snapshot of the state at
the end of each forward. To roll back to a position between two snapshots, the engine restores the
earlier snapshot and processes the tokens after it again.

A sequence-to-sequence model (T5) encodes the prompt and decodes the output. The decoder's text
begins with the model's start token. The encoder runs in the first forward of a sequence. Its output
is stored in the state of the sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import LogitsAt, State
from specbench_cli.engine.models.state import RecurrentState
from specbench_cli.engine.models.transformers_decoder import (
    ChainDecoder,
    StateCacheLayer,
    TransformersState,
    layer_shapes,
    relative_difference,
)
from specbench_cli.engine.types import ExtraInput, Tokens
from specbench_cli.errors import MethodFault


class RecurrentDecoder(ChainDecoder):
    """A decoder of a recurrent transformers module. It keeps a copy of the cache after each
    forward.

    Raises:
        UsageError: The test at loading fails. The test compares the logits of a continued cache
            with the logits of one forward over all tokens.
    """

    _one_by_one = False  # whether the module needs single tokens after its first forward

    def new_state(self, capacity: int, n_seqs: int = 1) -> RecurrentState:
        """Return an empty state. Its memory is not preallocated."""
        return RecurrentState(n_seqs, capacity)

    def _forward_sequence(
        self, ids: Tensor, state: Any, seq: int, at: LogitsAt, wanted: set[int]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        assert isinstance(state, RecurrentState)
        held, n = state.latest_cache(seq), ids.shape[1]
        # The module changes its cache in place, so pass it a copy.
        cache = DynamicCache(config=self.module.config) if held is None else copy.deepcopy(held)
        inputs = {self._cache_name: cache, "use_cache": True}
        if held is None or n == 1 or not self._one_by_one:
            left, logits = self._run({"input_ids": ids, **inputs}, at, wanted, n)
        else:
            each: LogitsAt = None if at is None else "all"
            runs = [
                self._run({"input_ids": one, **inputs}, each, wanted, 1) for one in ids.split(1, 1)
            ]
            left = {layer: torch.cat([rows[layer] for rows, _ in runs], 1) for layer in wanted}
            logits = _select_logits([found for _, found in runs], at)
        state.write(seq, n, cache)
        return left, logits

    def _trial(self, ids: Tensor) -> float:
        """Return the relative difference between this decoder's logits and the module's own logits.

        Also set `_one_by_one` if the module needs single tokens.
        """
        expected = self.module(input_ids=ids, use_cache=False).logits
        gap = self._trial_gap(ids, expected)
        if not gap <= self.rounding:
            self._one_by_one = True
            gap = self._trial_gap(ids, expected)
        return gap

    def _trial_gap(self, ids: Tensor, expected: Tensor) -> float:
        state = self.new_state(ids.shape[1])
        parts = ids.split((4, 1, 3, 1), 1)
        return relative_difference(
            [self.forward(Tokens(part), state, logits_at="all") for part in parts], expected
        )


def _select_logits(logits: Sequence[Tensor | None], at: LogitsAt) -> Tensor | None:
    """Return the logits of the tokens that `at` selects. `logits` has one tensor [1, 1, V] per
    token.
    """
    rows = [each for each in logits if each is not None]
    if at is None or not rows:
        return None
    if at == "last":
        return rows[-1]
    whole = torch.cat(rows, 1)
    return whole.index_select(1, at) if isinstance(at, Tensor) else whole


class Seq2SeqDecoder(ChainDecoder):
    """A decoder of a transformers module with an encoder. A token's position is its row number.

    Attributes:
        start: The start token, with which every text of the decoder begins.

    Raises:
        UsageError: The model has no start token, or the test at loading fails.
    """

    def split_prompt(self, ids: Sequence[int]) -> tuple[tuple[int, ...], ExtraInput | None]:
        """Split a prompt. The encoder reads the whole prompt, and the decoder begins with the start
        token.
        """
        return (self.start,), ExtraInput(ids=tuple(ids))

    def attach(self, state: State, source: ExtraInput, seq: int = 0) -> bool:
        """Attach the prompt that the encoder reads in the sequence's first forward."""
        assert isinstance(state, TransformersState)
        if not source.ids:
            return False
        state.sources[seq] = source
        return True

    def extra_tokens(self, state: State, seq: int = 0) -> int:
        """Return the number of encoder tokens in the sequence's next forward."""
        assert isinstance(state, TransformersState)
        if seq in state.encoded or seq not in state.sources:
            return 0
        return len(state.sources[seq].ids)

    def new_state(self, capacity: int, n_seqs: int = 1) -> TransformersState:
        """Return an empty state for the decoder's text and the encoder's output."""
        return TransformersState(
            self._shapes, n_seqs, capacity, dtype=self.dtype, device=self.device
        )

    def unembed(self, rows: Tensor) -> Tensor:
        """Raise MethodFault. Model families scale the rows differently before the output matrix."""
        raise MethodFault(f"{self.name} does not provide its output matrix")

    def _forward_sequence(
        self, ids: Tensor, state: Any, seq: int, at: LogitsAt, wanted: set[int]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        assert isinstance(state, TransformersState)
        start, n = state.length(seq), ids.shape[1]
        state.require(start, n)
        if seq not in state.encoded:
            state.encoded[seq] = self._encode(state.sources.get(seq)), DynamicCache()
        encoded, crossed = state.encoded[seq]
        own = Cache(
            layers=[StateCacheLayer(state, at, (seq,), (start,)) for at in range(self.n_layers)]
        )
        inputs = {
            "decoder_input_ids": ids,
            "encoder_outputs": (encoded,),
            self._cache_name: EncoderDecoderCache(own, crossed),
            "use_cache": True,
        }
        found = self._run(inputs, at, wanted, n)
        state.extend(seq, range(self.n_layers), n)
        return found

    def _encode(self, source: ExtraInput | None) -> Tensor:
        if source is None:
            raise MethodFault(
                f"{self.name} is a sequence-to-sequence model, and the request has no input for its"
                " encoder",
                "create the request from `decoder.split_prompt(ids)`",
            )
        ids = self.clamp_ids(host.ids([source.ids], self.device))
        rows: Tensor = self.module.get_encoder()(input_ids=ids).last_hidden_state
        return rows

    def _trial(self, ids: Tensor) -> float:
        """Return the relative difference between this decoder's logits and the module's own logits.

        Also find the start token and the shapes of cached tensors.
        """
        self.start = self._start()
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        out = self.module(
            input_ids=ids, decoder_input_ids=ids, **{self._cache_name: cache}, use_cache=True
        )
        self._shapes = layer_shapes(cache.self_attention_cache)
        state = self.new_state(ids.shape[1])
        state.sources[0] = ExtraInput(ids=tuple(ids[0].tolist()))
        parts = ids.split((4, 1, 4), 1)
        return relative_difference(
            [self.forward(Tokens(part), state, logits_at="all") for part in parts], out.logits
        )

    def _start(self) -> int:
        for config in (self.module.generation_config, self.module.config):
            for name in ("decoder_start_token_id", "bos_token_id"):
                if isinstance(found := getattr(config, name, None), int):
                    return found
        raise self.unsupported("its configuration has no start token for the decoder")
