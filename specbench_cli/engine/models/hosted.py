"""Any other causal language model: transformers' own module behind our contract.

Our state takes the place of its cache, and every forward gets its positions and a 4-D mask
explicitly, so that drafts, trees and sequences of different lengths mean the same as in the fused
decoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from specbench_cli.engine import host
from specbench_cli.engine.models.attention import visible
from specbench_cli.engine.models.checkpoint import max_positions
from specbench_cli.engine.models.decoder import Decoder, LogitsAt, State
from specbench_cli.engine.models.state import KVState, LayerShape
from specbench_cli.engine.types import Features, Hidden, Input, Out, Tokens
from specbench_cli.errors import UsageError


class HostedDecoder(Decoder):
    """A transformers module as a decoder.

    Args:
        module: a causal language model in eval mode, on its device, in its dtype.

    Raises:
        UsageError: the module keeps more than keys and values, or does not take a mask and
            positions: a trial at construction compares it with its own plain forward.
    """

    def __init__(self, module: Any, *, name: str) -> None:
        config = module.config.get_text_config()
        self.name, self.module = name, module
        self.device, self.dtype = module.device, module.dtype
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.n_layers, self.max_positions = config.num_hidden_layers, max_positions(config)
        self.weight_bytes = sum(weight.nbytes for weight in module.parameters())
        self._config = config
        self._accepted = set(inspect.signature(module.forward).parameters)
        self._additive = config._attn_implementation == "eager"
        self._layers = _layer_list(module.base_model, self.n_layers)
        self._kinds = _mask_kinds(config)
        self._in_tuples = False  # what its layers give back is one; the trial finds out
        self._shapes = self._trial()

    def new_state(self, capacity: int, n_seqs: int = 1) -> KVState:
        """A cleared state with room for `capacity` rows in each of `n_seqs` sequences."""
        return KVState(self._shapes, n_seqs, capacity, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(
        self,
        x: Input,
        state: State,
        *,
        seqs: Sequence[int] | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        layers: tuple[int, int] | None = None,
        skip: frozenset[int] = frozenset(),
        logits_at: LogitsAt = "last",
        taps: Sequence[int] = (),
    ) -> Out:
        """See `Decoder.forward`; layers outside a range are called too, and hand on what they get.

        Raises:
            ValueError: also for skipped layers.
        """
        assert isinstance(state, KVState)
        if isinstance(x, Features):
            raise ValueError("a target reads tokens alone; features are for draft heads")
        if skip:
            raise ValueError(
                f"{self._config.model_type} runs through transformers' module, which skips no"
                " layers; that needs a Llama, Mistral, Qwen2 or Qwen3 checkpoint"
            )
        low, high = layers or (0, self.n_layers)
        if isinstance(x, Hidden) != (low > 0):
            raise ValueError(
                f"layer {low} is entered with {'hidden rows' if low else 'token ids or embeddings'}"
            )
        rows = x.ids if isinstance(x, Tokens) else x.rows
        b, n = rows.shape[:2]
        lines = range(b) if seqs is None else seqs
        starts = [state.length(seq, low) for seq in lines]
        state.require(max(starts), n)
        if positions is None:
            steps = torch.arange(n, device=self.device)
            first = [start + state.offsets[seq] for seq, start in zip(lines, starts, strict=True)]
            positions = host.ids(first, self.device)[:, None] + steps
        inputs: dict[str, Any] = {
            "input_ids" if isinstance(x, Tokens) else "inputs_embeds": rows,
            "position_ids": positions,
            "attention_mask": self._masks(starts, n, positions, mask),
            "past_key_values": Cache(
                layers=[_Rows(state, at, lines, starts) for at in range(len(self._shapes))]
            ),
            "use_cache": True,
        }
        if high < self.n_layers:
            logits_at = None
        with self._between(low, high, rows):
            left, logits = self._run(inputs, logits_at, {high - 1, *taps}, n)
        for seq in lines:
            state.extend(seq, range(low, high), n)
        return Out(logits, left[high - 1], {at: left[at] for at in taps})

    @torch.inference_mode()
    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`."""
        rows: Tensor = self.module.get_input_embeddings()(ids)
        return rows

    @torch.inference_mode()
    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`."""
        normed: Tensor = _final_norm(self.module.base_model)(rows)
        return normed

    @torch.inference_mode()
    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`; caps on logits included."""
        logits: Tensor = self.module.get_output_embeddings()(rows)
        cap = getattr(self._config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @contextmanager
    def _between(self, low: int, high: int, rows: Tensor) -> Iterator[None]:
        """While entered, layers outside [low, high) hand on the rows that they get; what enters
        layer `low`, unless it is the first, are the given rows.

        They stay in their places, where the module's own loop looks for kinds and masks by index.
        """
        outside = [*self._layers[:low], *self._layers[high:]]

        def hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            return (hidden_states,) if self._in_tuples else hidden_states

        for layer in outside:
            layer.forward = hand_on
        if low:
            self._layers[0].forward = lambda *_, **__: hand_on(rows)
        try:
            yield
        finally:
            for layer in outside:
                del layer.forward

    def _run(
        self, inputs: dict[str, Any], at: LogitsAt, wanted: set[int], n: int
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """The rows that leave the wanted layers, and the logits asked for."""
        left: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                self._in_tuples = isinstance(output, tuple)
                left[layer] = output[0] if self._in_tuples else output

            return hook

        hooks = [self._layers[layer].register_forward_hook(keep(layer)) for layer in wanted]
        try:
            if at is None:
                self.module.base_model(**inputs)
                return left, None
            rows = at if isinstance(at, Tensor) else torch.arange(n, device=self.device)
            if at == "last":
                rows = rows[-1:]
            if "logits_to_keep" in self._accepted:
                return left, self.module(**inputs, logits_to_keep=rows).logits
            return left, self.module(**inputs).logits.index_select(1, rows)
        finally:
            for hook in hooks:
                hook.remove()

    def _masks(self, starts: Sequence[int], n: int, positions: Tensor, mask: Tensor | None) -> Any:
        """4-D masks [b, 1, n, seen], one for each kind of layer; a tensor if there is one kind."""
        longest = max(starts) + n
        masks = {}
        for kind, window in self._kinds.items():
            seen = torch.zeros(len(starts), 1, n, longest, dtype=torch.bool, device=self.device)
            for i, start in enumerate(starts):
                seen[i, 0, :, : start + n] = visible(
                    start, n, device=self.device, mask=mask, positions=positions[i], window=window
                )
            if self._additive:
                floor = torch.finfo(self.dtype).min
                zeros = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
                masks[kind] = zeros.masked_fill_(~seen, floor)
            else:
                masks[kind] = seen
        return masks.get("", masks)

    @torch.inference_mode()
    def _trial(self) -> list[LayerShape]:
        """Find out what the layers store, and that our way of calling the module is right."""
        family = self._config.model_type
        ids = torch.arange(6, device=self.device)[None] % self.vocab_size
        try:
            cache = DynamicCache(config=self.module.config)
            expected = self.module(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
            self._shapes = [
                LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1])
                for keys, values in _stored(cache)
            ]
            state = self.new_state(6)
            parts = [
                self.forward(Tokens(ids[:, :4]), state, logits_at="all").logits,
                self.forward(Tokens(ids[:, 4:]), state, logits_at="all").logits,
            ]
        except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            raise UsageError(
                f"{family} checkpoints cannot be decoded here: transformers' module refuses a "
                f"preallocated cache with explicit positions and masks ({error})"
            ) from error
        got = torch.cat([part for part in parts if part is not None], 1)[0]
        close = 1e-4 if self.dtype == torch.float32 else 5e-2
        if not torch.allclose(got, expected, rtol=close, atol=close * float(expected.abs().max())):
            raise UsageError(
                f"{family} checkpoints cannot be decoded here: with explicit positions and masks "
                "transformers' module gives other logits than by itself"
            )
        return self._shapes


def _stored(cache: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each layer of transformers' own cache."""
    for layer in cache.layers:
        yield layer.keys, layer.values


class _Rows(CacheLayerMixin):
    """One layer of a state, for the sequences of one forward, as transformers' cache layer."""

    is_sliding = False

    def __init__(
        self, state: KVState, layer: int, lines: Sequence[int], starts: Sequence[int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys, self._values = state.keys(layer), state.values(layer)
        self._lines, self._starts = lines, starts
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: all is preallocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [b, heads, n, d] after each sequence's rows; returns all, [b, heads, seen, d]."""
        n = key_states.shape[2]
        for i, (seq, start) in enumerate(zip(self._lines, self._starts, strict=True)):
            self._keys[seq, :, start : start + n] = key_states[i]
            self._values[seq, :, start : start + n] = value_states[i]
        longest = max(self._starts) + n
        if len(self._lines) == 1:
            line = slice(self._lines[0], self._lines[0] + 1)
            return self._keys[line, :, :longest], self._values[line, :, :longest]
        lines = list(self._lines)
        return self._keys[lines, :, :longest], self._values[lines, :, :longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, and the index of the first."""
        return max(self._starts) + query_length, 0

    def get_seq_length(self) -> int:
        """Rows before this forward."""
        return max(self._starts)

    def get_max_length(self) -> int:
        """Rows there is room for."""
        return self._keys.shape[2]


def _layer_list(base: nn.Module, n: int) -> nn.ModuleList:
    for child in base.modules():
        if isinstance(child, nn.ModuleList) and len(child) == n:
            return child
    raise UsageError(f"{type(base).__name__} has no list of its {n} layers")


def _final_norm(base: nn.Module) -> nn.Module:
    """The norm that the rows which leave the last layer go through."""
    for name in ("norm", "ln_f", "final_layernorm", "final_layer_norm"):
        if isinstance(found := getattr(base, name, None), nn.Module):
            return found
    raise UsageError(
        f"the final norm of {type(base).__name__} was not found, and draft heads read it"
    )


def _mask_kinds(config: Any) -> dict[str, int | None]:
    """Kind of layer -> its window. Models with mixed layers take a mask for each kind."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return {"": window}
    windows = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(kinds) - set(windows))
    if unknown:
        raise UsageError(
            f"{config.model_type} checkpoints cannot be decoded here: layers of kind"
            f" {unknown[0]!r} keep more than keys and values; full and sliding attention are"
            " supported"
        )
    return {kind: windows[kind] for kind in dict.fromkeys(kinds)}
