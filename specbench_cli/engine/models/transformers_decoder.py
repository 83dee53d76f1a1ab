"""Decoders that run the transformers module, for families that `FusedDecoder` does not support.

A `TransformersState` replaces the module's cache. Every forward gets explicit positions and a 4-D
mask. So drafts, trees and sequences of different lengths work as in `FusedDecoder`. For modules
that do not accept explicit masks or positions, `chain_decoders` has decoders.

A decoder tests its module when it is created. In this trial it decodes nine tokens, and compares
the logits with those of the module's own forward.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from specbench_cli.engine import host
from specbench_cli.engine.models.attention import visible
from specbench_cli.engine.models.checkpoint import (
    layer_count,
    max_positions,
    rotary_limit,
    text_config,
)
from specbench_cli.engine.models.decoder import (
    ChainsOnly,
    Decoder,
    LogitsAt,
    ModelInput,
    State,
    trees_fault,
)
from specbench_cli.engine.models.state import KVState, LayerShape
from specbench_cli.engine.types import (
    SUBLAYERS,
    ExtraInput,
    Features,
    Hidden,
    ModelOutput,
    Skip,
    Tokens,
    expand_skip,
)
from specbench_cli.errors import UsageError

TRIAL_WINDOW = 4
"""Maximum sliding window in the trial, so that its nine tokens exceed the window."""

TRIAL_ERRORS = (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError)
"""Errors that a module raises for a call that it does not support."""


def cache_argument(accepted: Iterable[str]) -> str:
    """Return the name of a module's cache argument.

    Since transformers 5.24 the name is `cache`. Before, it was `cache_params` in some modules and
    `past_key_values` in most.

    Args:
        accepted: Names of the arguments of the module's forward.
    """
    known = ("cache", "cache_params", "past_key_values")
    return next((name for name in known if name in accepted), known[-1])


class TransformersModuleDecoder(Decoder):
    """Base class of decoders that run a transformers module.

    Args:
        module: A language model in eval mode, on its device, in its dtype.

    Raises:
        UsageError: The decoder's logits differ from those of the module's own forward.
    """

    def __init__(self, module: Any, *, name: str) -> None:
        config = text_config(module.config)
        self.name, self.module, self.family = name, module, module.config.model_type
        self.device, self.dtype = module.device, module.dtype
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.n_layers, self.max_positions = layer_count(config), max_positions(config)
        self._rotary = rotary_limit(config)
        if self._rotary is not None:
            self.limit = f"its rotary scaling ({self._rotary.kind}) changes beyond them"
        self.weight_bytes = sum(weight.nbytes for weight in module.parameters())
        self._config = config
        self._arguments = set(inspect.signature(module.forward).parameters)
        self._cache_name = cache_argument(self._arguments)
        inner = module.get_decoder()
        self._base = module.base_model if inner is module else inner
        self._layers = _layer_list(self._base, self.n_layers)
        self._returns_tuples = False  # set by the trial: whether layers return tuples
        try:
            with torch.inference_mode():
                gap = self._trial(torch.arange(9, device=self.device)[None] % self.vocab_size)
        except TRIAL_ERRORS as error:
            raise self.unsupported(
                f"the transformers module does not support specbench's calls ({error})"
            ) from (error)
        if not gap <= self.rounding:
            raise self.unsupported(
                "with specbench's cache, the transformers module returns other logits"
            )

    @property
    def rounding(self) -> float:
        """Maximum relative difference of logits that counts as rounding (`relative_difference`)."""
        return 1e-4 if self.dtype == torch.float32 else 5e-2

    def unsupported(self, why: str) -> UsageError:
        """Return the error for an unsupported model family."""
        return UsageError(f"{self.family} checkpoints cannot be decoded here: {why}")

    @abstractmethod
    def _trial(self, ids: Tensor) -> float:
        """Return the relative difference between this decoder's logits and the module's own logits.

        Args:
            ids: Token ids [1, n] of the test.
        """

    @torch.inference_mode()
    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        rows: Tensor = self.module.get_input_embeddings()(ids)
        return rows

    @torch.inference_mode()
    def norm(self, rows: Tensor) -> Tensor:
        """Apply the final norm to the output [..., hidden] of a layer."""
        normed: Tensor = _final_norm(self._base)(rows)
        return normed

    @torch.inference_mode()
    def unembed(self, rows: Tensor) -> Tensor:
        """Return the logits [..., V] of normed rows, with logit scaling (Granite, Cohere) and
        softcapping.
        """
        logits: Tensor = self.module.get_output_embeddings()(rows)
        if self.family.startswith("granite"):
            logits = logits / self._config.logits_scaling
        elif self.family.startswith("cohere"):
            logits = logits * self._config.logit_scale
        cap = getattr(self._config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _run(
        self, inputs: dict[str, Any], at: LogitsAt, wanted: set[int], n: int
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Run the module.

        Return the output of the layers in `wanted`, and the logits of the rows that `at` selects.
        """
        left: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                self._returns_tuples = isinstance(output, tuple)
                left[layer] = output[0] if self._returns_tuples else output

            return hook

        hooks = [self._layers[layer].register_forward_hook(keep(layer)) for layer in wanted]
        try:
            if at is None:
                self.module.base_model(**inputs)
                return left, None
            rows = at if isinstance(at, Tensor) else torch.arange(n, device=self.device)
            if at == "last":
                rows = rows[-1:]
            if "logits_to_keep" in self._arguments:
                return left, self.module(**inputs, logits_to_keep=rows).logits
            return left, self.module(**inputs).logits.index_select(1, rows)
        finally:
            for hook in hooks:
                hook.remove()


class ChainDecoder(TransformersModuleDecoder):
    """A decoder whose module runs one sequence at a time, through all layers, and
    only over chains."""

    trees = False

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward.

        Raises:
            ChainsOnly: The input has explicit positions or a mask, or only some of the layers run.
        """
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        positions, mask, seqs = model_input.positions, model_input.mask, model_input.seqs
        layers, skip, captured_layers = (
            model_input.layers,
            model_input.skip,
            model_input.captured_layers,
        )
        self.ran += 1
        if not isinstance(x, Tokens):
            raise ValueError(f"{self.name} reads only tokens, not {type(x).__name__}")
        if mask is not None or positions is not None:
            raise trees_fault(self)
        if skip or layers not in (None, (0, self.n_layers)):
            raise ChainsOnly(
                f"{self.name} runs only full forwards: {self.family} models are run by their"
                " transformers module",
                "choose a method that does not run a part of the target: sps, pld",
            )
        wanted = {self.n_layers - 1, *captured_layers}
        lines = range(len(x.ids)) if seqs is None else seqs
        found = [
            self._forward_sequence(ids, state, seq, logits_at, wanted)
            for ids, seq in zip(self.clamp_ids(x.ids).split(1), lines, strict=True)
        ]
        left = {at: torch.cat([rows[at] for rows, _ in found]) for at in wanted}
        logits = [each for _, each in found if each is not None]
        return ModelOutput(
            torch.cat(logits) if logits else None,
            left[self.n_layers - 1],
            {at: left[at] for at in captured_layers},
        )

    @abstractmethod
    def _forward_sequence(
        self, ids: Tensor, state: Any, seq: int, at: LogitsAt, wanted: set[int]
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Run a forward over ids [1, n] of one sequence. The result has the form of `_run`."""


class TransformersState(KVState):
    """A KV cache that also stores the extra inputs of each sequence, such as images.

    Attributes:
        sources: Attached extra input, by sequence.
        encoded: Encoder output for the extra input, by sequence.
    """

    def __init__(self, *shape: Any, **how: Any) -> None:
        super().__init__(*shape, **how)
        self.sources: dict[int, ExtraInput] = {}
        self.encoded: dict[int, Any] = {}

    def clear(self) -> None:
        """Drop all rows and extra inputs, and keep the memory."""
        super().clear()
        self.sources.clear()
        self.encoded.clear()


class TransformersDecoder(TransformersModuleDecoder):
    """A decoder of a module with a KV cache that accepts an attention mask and positions.

    Such modules are causal language models, and image-text models that contain one.

    Raises:
        UsageError: The module stores another kind of state, or ignores the given mask or positions.
    """

    def __init__(self, module: Any, *, name: str) -> None:
        config = text_config(module.config)
        self._kinds = _mask_kinds(config)
        self._additive = config._attn_implementation == "eager"
        super().__init__(module, name=name)

    def new_state(self, capacity: int, n_seqs: int = 1) -> TransformersState:
        """Return an empty state for `n_seqs` sequences, with space for `capacity` rows in each."""
        return TransformersState(
            self._shapes, n_seqs, capacity, dtype=self.dtype, device=self.device
        )

    def attach(self, state: State, source: ExtraInput, seq: int = 0) -> bool:
        """Attach extra input to a sequence. An image-text model reads the images with the prompt.

        Raises:
            UsageError: specbench does not support images of this model family.
        """
        assert isinstance(state, TransformersState)
        if not source.images or not hasattr(self.module, "get_image_features"):
            return False
        if self._image_fault is not None:
            raise UsageError(
                f"{self.family} models read no images here, only text: {self._image_fault}"
            )
        state.sources[seq] = source
        return True

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward. Skipped layers and layers outside `layers` return their input.

        Raises:
            ValueError: The rows exceed the capacity of the state, the caller skips single
                sublayers, or the layers to run have different numbers of rows.
        """
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        positions, mask, seqs = model_input.positions, model_input.mask, model_input.seqs
        layers, skip, captured_layers = (
            model_input.layers,
            model_input.skip,
            model_input.captured_layers,
        )
        assert isinstance(state, TransformersState)
        self.ran += 1
        if isinstance(x, Features):
            raise ValueError("a target reads only tokens; features are for draft heads")
        low, high = layers or (0, self.n_layers)
        over = self._skipped_layers(skip)
        run = [at for at in range(low, high) if at not in over] if over else range(low, high)
        if isinstance(x, Hidden) != (low > 0):
            raise ValueError(
                f"the input of layer {low} must be {'hidden rows' if low else 'token ids'}"
            )
        rows = self.clamp_ids(x.ids) if isinstance(x, Tokens) else x.rows
        b, n = rows.shape[:2]
        lines = range(b) if seqs is None else seqs
        starts = [state.length(seq, run[0] if run else low) for seq in lines]
        if over and any(
            state.length(seq, at) != start
            for seq, start in zip(lines, starts, strict=True)
            for at in run
        ):
            raise ValueError(
                f"{self.family} models are run by their transformers module, whose layers share one"
                " mask: all layers that run must have the same number of rows"
            )
        state.require(max(starts), n)
        if positions is None:
            steps = torch.arange(n, device=self.device)
            first = [start + state.offsets[seq] for seq, start in zip(lines, starts, strict=True)]
            positions = host.ids(first, self.device)[:, None] + steps
        if self._rotary is not None:
            # Clamp the positions: a draft beyond the context length must not change the rotary
            # frequencies of other rows.
            positions = positions.clamp(max=self.max_positions - 1)
        inputs: dict[str, Any] = {
            "input_ids" if isinstance(x, Tokens) else "inputs_embeds": rows,
            "position_ids": positions,
            "attention_mask": self._masks(starts, n, positions, mask),
            self._cache_name: Cache(
                layers=[
                    StateCacheLayer(state, at, lines, starts) for at in range(len(self._shapes))
                ]
            ),
            "use_cache": True,
        }
        if state.sources and isinstance(x, Tokens):
            inputs |= _join_images(state.sources[seq] for seq in lines if _reads_source(state, seq))
        if high < self.n_layers:
            logits_at = None
        with self._replace_layers(low, high, rows, over):
            left, logits = self._run(inputs, logits_at, {high - 1, *captured_layers}, n)
        for seq in lines:
            state.extend(seq, run, n)
        return ModelOutput(logits, left[high - 1], {at: left[at] for at in captured_layers})

    @contextmanager
    def _replace_layers(
        self, low: int, high: int, rows: Tensor, over: frozenset[int]
    ) -> Iterator[None]:
        """Make skipped layers, and layers outside low to high - 1, return their input unchanged.

        If `low` is not 0, layer `low` gets `rows` as its input. No layer is removed from the
        module, because the module looks up layer types and masks by layer index.
        """
        outside = [
            layer for at, layer in enumerate(self._layers) if not low <= at < high or at in over
        ]

        def hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
            return (hidden_states,) if self._returns_tuples else hidden_states

        for layer in outside:
            layer.forward = hand_on
        if low:
            self._layers[0].forward = lambda *_, **__: hand_on(rows)
        try:
            yield
        finally:
            for layer in outside:
                del layer.forward

    def _skipped_layers(self, skip: Skip) -> frozenset[int]:
        """Return the layers that a forward skips. Raise ValueError if it skips single sublayers."""
        sublayers = expand_skip(skip)
        over = frozenset(at for at, _ in sublayers)
        if len(sublayers) < len(SUBLAYERS) * len(over):
            raise ValueError(
                f"{self.family} models are run by their transformers module, which can skip layers"
                " but not sublayers; use a Llama, Mistral, Qwen2 or Qwen3 checkpoint"
            )
        return over

    def share(
        self, layers: tuple[int, int] | None = None, skip: Skip = frozenset(), logits: bool = True
    ) -> float:
        """Return the share of the weight bytes that a forward reads.

        All experts of an MoE layer count.
        """
        if layers is None and not skip and logits:
            return 1.0
        held = [_nbytes(layer) for layer in self._layers]
        end = _nbytes(self.module.get_output_embeddings())
        over = self._skipped_layers(skip)
        read = sum(held[at] for at in range(*(layers or (0, self.n_layers))) if at not in over)
        return (read + logits * end) / (sum(held) + end)

    def _masks(self, starts: Sequence[int], n: int, positions: Tensor, mask: Tensor | None) -> Any:
        """Return a mask [b, 1, n, seen] for each layer type. If layers have no types, return one
        mask.
        """
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

    def _trial(self, ids: Tensor) -> float:
        """Test the decoder as the base class does, and find the shapes that the layers cache.

        Meanwhile the sliding window is reduced, because the test has only a few tokens.
        """
        window = getattr(self._config, "sliding_window", None)
        if window is None:
            return self._gap(ids)
        kinds = self._kinds
        try:
            self._config.sliding_window = min(window, TRIAL_WINDOW)
            self._kinds = _mask_kinds(self._config)
            return self._gap(ids)
        finally:
            self._config.sliding_window, self._kinds = window, kinds

    def _gap(self, ids: Tensor) -> float:
        cache = DynamicCache(config=self.module.config)
        expected = self.module(input_ids=ids, **{self._cache_name: cache}, use_cache=True).logits
        self._shapes = layer_shapes(cache)
        state = self.new_state(ids.shape[1])
        return relative_difference(
            [self.forward(Tokens(part), state, logits_at="all") for part in ids.split((4, 5), 1)],
            expected,
        )

    @cached_property
    def _image_fault(self) -> str | None:
        """Reason why images are not supported, or None if they are. A test with a random image
        finds it.
        """
        config = self.module.config
        try:
            size = config.vision_config.image_size
            generator = torch.Generator().manual_seed(0)
            noise = torch.rand(1, 3, size, size, generator=generator)
            pixels = noise.to(device=self.device, dtype=self.dtype)
            with torch.inference_mode():
                rows = sum(map(len, self.module.get_image_features(pixels).pooler_output))
                places = [config.image_token_id] * rows
                ids = torch.tensor([[0, *places, 1, 2, 3]], device=self.device)
                expected = self.module(input_ids=ids, pixel_values=pixels).logits
                state = self.new_state(ids.shape[1])
                state.sources[0] = ExtraInput(images={"pixel_values": pixels})
                parts = ids.split((rows + 2, 2), 1)
                gap = relative_difference(
                    [self.forward(Tokens(p), state, logits_at="all") for p in parts], expected
                )
        except TRIAL_ERRORS as error:
            return f"the transformers module does not support specbench's calls ({error})"
        if gap <= self.rounding:
            return None
        return "with specbench's cache, the transformers module returns other logits"


def _nbytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def relative_difference(outs: Sequence[ModelOutput], expected: Tensor) -> float:
    """Return the largest relative difference between logits in several parts and the expected
    logits.

    Each difference is divided by the sum of its expected logit and the largest finite expected
    logit.
    """
    got = torch.cat([out.logits for out in outs if out.logits is not None], 1)
    differing = got != expected  # ids with -inf in both do not differ
    size = expected.abs() + expected[expected.isfinite()].abs().max()
    return float(torch.where(differing, (got - expected).abs() / size, 0.0).max())


def _reads_source(state: TransformersState, seq: int) -> bool:
    return seq in state.sources and state.length(seq) == 0


def _join_images(sources: Iterable[ExtraInput]) -> dict[str, Tensor]:
    """Return the images of several requests, joined as keyword arguments of the module."""
    found: dict[str, list[Tensor]] = {}
    for source in sources:
        for name, tensor in source.images.items():
            found.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in found.items()}


def layer_shapes(cache: Any) -> list[LayerShape]:
    """Return, for each layer of a transformers cache, the shape of one token's keys and values."""
    return [
        LayerShape(layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1])
        for layer in cache.layers
    ]


class StateCacheLayer(CacheLayerMixin):
    """A layer of a transformers cache that stores its rows in one layer of a `KVState`.

    Each object serves the sequences of one forward.
    """

    is_sliding = False

    def __init__(
        self, state: KVState, layer: int, lines: Sequence[int], starts: Sequence[int]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys, self._values = state.keys(layer), state.values(layer)
        self._lines, self._starts = lines, starts
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, because the state is already allocated."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values of new rows, [b, heads, n, d], to each sequence.

        Return the keys and values of all rows, [b, heads, seen, d].
        """
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
        """Return the number of columns of the attention mask, one per key, and the position in the
        KV cache of the first key.
        """
        return max(self._starts) + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of rows before this forward, in the longest sequence."""
        return max(self._starts)

    def get_max_length(self) -> int:
        """Return the capacity of the state in rows."""
        return self._keys.shape[2]


def _layer_list(base: nn.Module, n: int) -> nn.ModuleList:
    for child in base.modules():
        if isinstance(child, nn.ModuleList) and len(child) == n:
            return child
    raise UsageError(f"{type(base).__name__} has no list of its {n} layers")


def _final_norm(base: nn.Module) -> nn.Module:
    """Return the norm module that is applied to the output of the last layer."""
    for name in ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm"):
        if isinstance(found := getattr(base, name, None), nn.Module):
            return found
    raise UsageError(
        f"draft heads need the final norm of {type(base).__name__}, which was not found"
    )


def _mask_kinds(config: Any) -> dict[str, int | None]:
    """Return the sliding window of each layer type. The module needs one mask for each type."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return {"": window}
    windows = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(kinds) - set(windows))
    if unknown:
        raise UsageError(
            f"{config.model_type} checkpoints cannot be decoded here: layers of type"
            f" {unknown[0]!r} cache more than keys and values; only full and sliding attention are"
            " supported"
        )
    return {kind: windows[kind] for kind in dict.fromkeys(kinds)}
