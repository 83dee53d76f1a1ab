"""Fused decoder of Llama, Mistral, Qwen2 and Qwen3.

Touvron et al., arXiv:2302.13971; Jiang et al., arXiv:2310.06825; Yang et al., arXiv:2407.10671 and
arXiv:2505.09388. All four architectures are the same decoder, with three differences: a bias on q,
k and v (Qwen2), norms on q and k (Qwen3), and a sliding window (Mistral, some Qwen).

A small model spends its time on reading weights and on dispatching torch operations, so this
decoder uses few operations. One product computes q, k and v, and one product computes gate and up.
The output projections add to the residual in place. The views for rotation, cache writes and
attention are created once (`forward_plan`), and buffers are reused.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from specbench_cli.engine import host
from specbench_cli.engine.models.attention import Rotary, Table
from specbench_cli.engine.models.checkpoint import read_output_ids
from specbench_cli.engine.models.cuda import find_triton_kernels
from specbench_cli.engine.models.cuda.graphs import (
    Body,
    Capture,
    GraphBuffers,
    GraphKey,
    GraphRecorder,
)
from specbench_cli.engine.models.decoder import Decoder, ModelInput, State
from specbench_cli.engine.models.forward_plan import (
    BufferSizes,
    ForwardPlan,
    LayerView,
    Planner,
    Scratch,
)
from specbench_cli.engine.models.layers import (
    FusedWeights,
    LayerReader,
    LayerWeights,
    sublayer_bytes,
)
from specbench_cli.engine.models.linear import (
    Linear,
    LinearBackend,
    PlainLinear,
    find_numba_kernels,
)
from specbench_cli.engine.models.state import KVState, LayerShape
from specbench_cli.engine.types import (
    SUBLAYERS,
    Features,
    Hidden,
    Input,
    ModelOutput,
    Skip,
    Sublayer,
    Tokens,
    expand_skip,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE variants whose frequencies do not depend on the text length."""

NO_SUBLAYERS: frozenset[Sublayer] = frozenset()
"""Skipped sublayers of a full forward."""


def fits(config: Any) -> bool:
    """Return True if `FusedDecoder` supports the model of a transformers config."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and getattr(config, "quantization_config", None) is None
        and rope.get("rope_type") in ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and kinds <= {"full_attention", "sliding_attention"}
    )


class FusedStack(Decoder):
    """A stack of fused layers. Subclasses define the input of the first layer and the output.

    All forwards of a decoder use the same buffers, so only one may run at a time.

    Args:
        config: transformers config, with heads, sizes and windows.
        rotary: Cosines and sines of positions.
    """

    def __init__(
        self, config: Any, rotary: nn.Module, *, name: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.name, self.device, self.dtype = name, device, dtype
        self.hidden_size = config.hidden_size
        self.n_layers, self.max_positions = config.num_hidden_layers, config.max_position_embeddings
        heads = config.num_attention_heads
        self._sizes = BufferSizes(
            hidden=config.hidden_size,
            mlp=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )
        # specbench's own kernels, if `find_numba_kernels` selects them. On CUDA this is set only
        # while a graph is captured.
        self._kernels: Any = None
        kernels = find_numba_kernels(device, dtype)
        if kernels is not None and self._sizes.head_dim % kernels.STEP == 0:
            kernels.compile_kernels()
            self._kernels = kernels
        # Both flags are for CPUs, because CUDA has fused kernels. `_own_norm`: in half precision,
        # torch's RMSNorm takes ten operations, and the one of this class takes three. `_lean`: in
        # float32, use attention and norm with the fewest operations. In half precision, torch's
        # attention computes in float32.
        self._own_norm = device.type == "cpu" and dtype.itemsize <= 4 and self._kernels is None
        self._lean = self._own_norm and dtype == torch.float32
        self._eps = config.rms_norm_eps
        self._eps_size = torch.full((1, 1), (self._eps * self.hidden_size) ** 0.5)
        self._rotary = Rotary(
            rotary, self._sizes.head_dim, interleaved=self._lean, dtype=dtype, device=device
        )
        self._rotate = self._rotary.rotate
        like = torch.empty(0, dtype=dtype, device=device)
        self._planner = Planner(
            *(self._sizes, self._rotary, _windows(config)),
            lean=self._lean,
            like=like,
            kernels=self._kernels,
        )
        self._windowed = any(_windows(config))
        self._all_layers = range(self.n_layers)
        self._recorder: GraphRecorder | None = None

    def record(self, capture: Capture) -> None:
        """Enable CUDA graph capture for forwards of few rows over one sequence (see `graphs`)."""
        self._recorder = GraphRecorder(capture, self._body)

    @property
    def recorded(self) -> int:  # type: ignore[override]
        """Number of CUDA graphs captured so far."""
        return 0 if self._recorder is None else self._recorder.n_recorded

    def _reader(
        self, config: Any, tensors: Mapping[str, Tensor], backend: LinearBackend | None = None
    ) -> LayerReader:
        """Return the object that reads and fuses the weights of this stack's layers."""
        return LayerReader(
            config,
            tensors,
            self._rotary,
            device=self.device,
            dtype=self.dtype,
            norm_factor=self._norm_factor,
            backend=backend,
        )

    @property
    def _norm_factor(self) -> float | None:
        """Factor by which `LayerReader` multiplies norm weights.

        specbench's norms need float32 weights, so a factor is set. torch's norm needs weights in
        the model's dtype, so the factor is None.
        """
        whole: float = self.hidden_size**0.5
        return whole if self._own_norm else None if self._kernels is None else 1.0

    @property
    @abstractmethod
    def _stack(self) -> Sequence[LayerWeights]:
        """Weights of all layers of the stack."""

    @abstractmethod
    def _enter(self, x: Input, layers: tuple[int, int] | None) -> tuple[Tensor, int, int]:
        """Return the input of the first layer as a new tensor [b n, hidden], and the
        sizes b and n."""

    @abstractmethod
    def _logits(
        self, h: Tensor, b: int, at: Literal["last", "all"] | Tensor, scratch: Scratch
    ) -> Tensor:
        """Return the logits [b, r, V] of the last layer's output rows h [b n, hidden]."""

    @property
    def _end_bytes(self) -> int:
        """Size in bytes of this model's own weights that the function `_logits` reads."""
        return 0

    def share(
        self, layers: tuple[int, int] | None = None, skip: Skip = NO_SUBLAYERS, logits: bool = True
    ) -> float:
        """Return the share of the weight bytes that a forward reads."""
        if layers is None and not skip and logits:
            return 1.0
        run, over = range(*layers) if layers else self._all_layers, expand_skip(skip)
        held = [sublayer_bytes(layer) for layer in self._stack]
        read = sum(
            size
            for at in run
            for kind, size in zip(SUBLAYERS, held[at], strict=True)
            if (at, kind) not in over
        )
        return (read + logits * self._end_bytes) / (sum(map(sum, held)) + self._end_bytes)

    def _attention_input(self, layer: LayerWeights, h: Tensor, scratch: Scratch) -> Tensor:
        """Return the input of a layer's attention: the rows h [b n, hidden], after a norm if there
        is one.
        """
        return self._norm(h, layer.norm, scratch.size, scratch.normed)

    def new_state(self, capacity: int, n_seqs: int = 1) -> KVState:
        """Return an empty state for `n_seqs` sequences, with space for `capacity` rows in each."""
        self._planner.reserve(capacity)
        shape = LayerShape(self._sizes.kv_heads, self._sizes.head_dim, self._sizes.head_dim)
        return KVState(
            [shape] * self.n_layers, n_seqs, capacity, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward."""
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        positions, mask, seqs = model_input.positions, model_input.mask, model_input.seqs
        layers, skip, captured_layers = (
            model_input.layers,
            model_input.skip,
            model_input.captured_layers,
        )
        assert isinstance(state, KVState)
        self.ran += 1
        if self._recorder is not None and not layers and not skip and not seqs:
            replayed = self._replay(self._recorder, model_input, state)
            if replayed is not None:
                return replayed
        h, b, n = self._enter(x, layers)
        lines = range(b) if seqs is None else seqs
        span = range(*layers) if layers else self._all_layers
        run: Sequence[int] = span  # layers whose attention runs
        over = expand_skip(skip) if skip else NO_SUBLAYERS
        if mask is None and positions is None and not skip:
            plan = self._planner.plan_plain(state, lines, span, n)
        else:
            run = [at for at in span if (at, "attention") not in over]
            plan = self._planner.plan_masked(state, lines, run, n, mask, positions)
        h, captured = self._run_layers(plan, span, h, captured_layers, over)
        if plan.assumes_finite and not math.isfinite(h.sum()):
            plan = self._planner.plan_masked(
                state, lines, run, n, mask, positions, replace_nonfinite=True
            )
            h, captured = self._run_layers(
                plan, span, self._enter(x, layers)[0], captured_layers, over
            )
        for seq in lines:
            state.extend(seq, run, n)
        logits = None
        if logits_at is not None and (not layers or layers[1] == self.n_layers):
            logits = self._logits(h, b, logits_at, plan.scratch)
        return ModelOutput(
            logits, h.view(b, n, -1), {at: rows.view(b, n, -1) for at, rows in captured}
        )

    def _replay(
        self, recorder: GraphRecorder, model_input: ModelInput, state: KVState
    ) -> ModelOutput | None:
        """Replay a captured CUDA graph. Return None if a graph cannot represent this forward."""
        shape, lengths = GraphKey.from_input(model_input), state.lengths[0]
        if (
            shape is None
            or state.n_seqs > 1
            or lengths.count(lengths[0]) < len(lengths)
            or (self._windowed and (shape.mask_width or shape.has_positions))
        ):
            return None
        out = recorder.run(shape, model_input, state)
        state.extend(0, self._all_layers, shape.n)
        return out

    def _body(self, state: KVState, buffers: GraphBuffers, shape: GraphKey, seen: int) -> Body:
        """Return the function whose operations are captured in a CUDA graph."""
        rows = state.buffers[0][:, 0]
        # The function keeps references to both objects, because a graph reads their memory
        # addresses.
        scratch, tables = self._planner.scratch_for((shape.n,)), self._rotary.tables
        at: Any = buffers.index if isinstance(shape.logits, int) else shape.logits
        kernels = find_triton_kernels(self.device, self.dtype)

        def body(_: Table = tables) -> ModelOutput:
            usual, self._kernels = self._kernels, kernels
            try:
                plan = self._planner.plan_recorded(rows, buffers, scratch, seen, kernels)
                h = self._enter(buffers.x, None)[0]
                h, captured = self._run_layers(plan, self._all_layers, h, shape.captured_layers)
                logits = None if at is None else self._logits(h, 1, at, scratch)
            finally:
                self._kernels = usual
            return ModelOutput(logits, h[None], {at: left[None] for at, left in captured})

        return body

    @torch.inference_mode()
    def forward_batch(
        self, parts: Sequence[ModelInput], *, captured_layers: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """Run one forward over several sequences. The weights are read once for all rows."""
        if len(parts) == 1:
            return super().forward_batch(parts, captured_layers=captured_layers)
        self.ran += 1
        ns = [part.shape[1] for part in parts]
        x = _join_inputs([part.x for part in parts])
        plan = self._planner.plan_batch(parts, self._all_layers)
        h, captured = self._run_layers(
            plan, self._all_layers, self._enter(x, None)[0], captured_layers
        )
        if plan.assumes_finite and not math.isfinite(h.sum()):
            plan = self._planner.plan_batch(parts, self._all_layers, replace_nonfinite=True)
            h, captured = self._run_layers(
                plan, self._all_layers, self._enter(x, None)[0], captured_layers
            )
        for part, n in zip(parts, ns, strict=True):
            cast(KVState, part.state).extend(0, self._all_layers, n)
        # Row indices that get logits for each part: its last row, or all of its rows.
        spans = [range(end - n, end) for end, n in zip(accumulate(ns), ns, strict=True)]
        wanted = [
            span[:0] if part.logits_at is None else span[-1:] if part.logits_at == "last" else span
            for part, span in zip(parts, spans, strict=True)
        ]
        rows = list(chain.from_iterable(wanted))
        logits: Tensor | None = None
        if rows:
            whole = len(rows) == len(h)
            index = None if whole else host.ids(rows, self.device)
            logits = self._logits(h, 1, "all" if index is None else index, plan.scratch)
        # Use one split for all parts. With hundreds of parts, one torch call per part would take as
        # long as the forward.
        hidden = h[None].split(ns, 1)
        captured_parts = {at: left[None].split(ns, 1) for at, left in captured}
        logits_parts = () if logits is None else logits.split([len(own) for own in wanted], 1)
        return [
            ModelOutput(
                logits_parts[i] if logits_parts and own else None,
                hidden[i],
                {at: each[i] for at, each in captured_parts.items()},
            )
            for i, own in enumerate(wanted)
        ]

    def _run_layers(
        self,
        plan: ForwardPlan,
        span: Sequence[int],
        h: Tensor,
        captured_layers: Sequence[int],
        over: frozenset[Sublayer] = NO_SUBLAYERS,
    ) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Run rows [b n, hidden] through the layers of the range `span`.

        Args:
            over: Sublayers to skip.

        Returns:
            The output rows, and the output of each layer in `captured_layers`.
        """
        captured, views = [], iter(plan.views)
        for at in span:
            seen = next(views) if not over or (at, "attention") not in over else None
            mlp = not over or (at, "mlp") not in over
            h = self._run_layer(self._stack[at], h, plan, seen, mlp)
            if at in captured_layers:
                captured.append((at, h.clone()))  # the next layer adds to h
        return h, captured

    def _run_layer(
        self,
        layer: LayerWeights,
        h: Tensor,
        plan: ForwardPlan,
        views: tuple[LayerView, ...] | None,
        mlp: bool,
    ) -> Tensor:
        """Run one layer on rows [b n, hidden]. The function may overwrite the rows.

        Args:
            views: Attention inputs of the layer. None skips the attention.
            mlp: False skips the MLP.
        """
        scratch = plan.scratch
        if views is not None:
            h = self._attend(layer, h, plan, views)
        if not mlp:
            return h
        normed = self._norm(h, layer.mlp_norm, scratch.size, scratch.normed)
        self._multiply(layer.gate_up, normed, scratch.gate_up)
        if self._kernels is not None:
            return self._multiply_add(layer.down, h, self._kernels.silu_mul(scratch.gate_up))
        torch._C._nn.silu_(scratch.gate)
        return layer.down.add_to(h, scratch.gate.mul_(scratch.up))

    def _attend(
        self, layer: LayerWeights, h: Tensor, plan: ForwardPlan, views: tuple[LayerView, ...]
    ) -> Tensor:
        """Run the attention of one layer."""
        self._write_kv(layer, self._attention_input(layer, h, plan.scratch), plan, views)
        for (q, mixed, _), (_, k, v, bias, attend) in zip(plan.sequence_views, views, strict=True):
            attend(q, k, v, bias, mixed)
        return self._multiply_add(layer.out, h, plan.scratch.attention_output)

    def _multiply(self, by: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product of rows x [n, in]. If `out` is given, write it there."""
        if (own := self._row_weights(by, x)) is None:
            return by(x, out)
        out = x.new_empty(1, len(own[0])) if out is None else out
        return cast(Tensor, self._kernels.multiply_row(x, *own, out))

    def _multiply_add(self, by: Linear, h: Tensor, x: Tensor) -> Tensor:
        """Return rows h [n, out] plus the product of rows x [n, in]. The function may
        overwrite h."""
        if (own := self._row_weights(by, x)) is None:
            return by.add_to(h, x)
        return cast(Tensor, self._kernels.multiply_row(x, *own, h, add=True))

    def _row_weights(self, by: Linear, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Return weights [out, in] and bias for the kernel `multiply_row`.

        Return None if the kernel does not support this product.
        """
        if self._kernels is None or x.shape[0] > 1 or not isinstance(by, PlainLinear):
            return None
        if self.device.type == "cpu":
            return None  # the CPU kernels are called by `TiledLinear`
        weight = by.weight.t()
        return (weight, by.bias) if weight.is_contiguous() else None

    def _write_kv(
        self, layer: LayerWeights, rows: Tensor, plan: ForwardPlan, views: tuple[LayerView, ...]
    ) -> None:
        """Compute queries, keys and values of a layer, and write keys and values to the cache."""
        scratch = plan.scratch
        self._multiply(layer.qkv, rows, scratch.qkv)
        if layer.heads_norm is not None:
            heads = torch.rms_norm(scratch.qk, (self._sizes.head_dim,), None, self._eps)
            torch.mul(heads, layer.heads_norm, out=scratch.qk)
        if not plan.rotates:
            self._rotate(scratch.rotary_pairs, plan.table)
        for (_, _, row), (write, *_) in zip(plan.sequence_views, views, strict=True):
            write(row)

    @torch.inference_mode()
    def append_kv(self, rows: Tensor, state: State, layers: range, positions: Tensor) -> None:
        """Append keys and values to the cache of layers that a forward skipped.

        Nothing else of these layers is computed.
        """
        assert isinstance(state, KVState)
        self.ran += 1
        n = rows.shape[1]
        plan = self._planner.plan_masked(state, range(1), layers, n, None, positions)
        for at, views in zip(layers, plan.views, strict=True):
            layer = self._stack[at]
            self._write_kv(layer, self._attention_input(layer, rows[0], plan.scratch), plan, views)
        state.extend(0, layers, n)

    def append_kv_share(self, layers: range) -> float:
        """Return the share of the weights that `append_kv` reads.

        The share includes the query weights, because one matrix contains query, key and value
        weights.
        """
        whole = sum(sum(sublayer_bytes(layer)) for layer in self._stack) + self._end_bytes
        return sum(self._stack[at].qkv.nbytes for at in layers) / whole

    def _append_kv_to_all(self, rows: Tensor, state: State) -> None:
        """Append keys and values of the same rows [n, hidden] to all layers, for cross-attention.

        The state has only one sequence.
        """
        assert isinstance(state, KVState)
        plan = self._planner.plan_plain(state, range(1), self._all_layers, len(rows))
        for layer, views in zip(self._stack, plan.views, strict=True):
            self._write_kv(layer, rows, plan, views)
        state.extend(0, self._all_layers, len(rows))

    def _norm(
        self,
        h: Tensor,
        weight: Tensor | None,
        size: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the RMSNorm (Zhang and Sennrich, arXiv:1910.07467) of rows. `out` is an optional
        buffer.
        """
        if weight is None:
            return h
        if self._kernels is not None:
            return cast(Tensor, self._kernels.rms_norm(h, weight, self._eps))
        if not self._own_norm:
            return torch.rms_norm(h, (self.hidden_size,), weight, self._eps)
        # RMSNorm divides by sqrt((sum of squares + H eps) / H), where H is the hidden size. `hypot`
        # computes sqrt(sum of squares + H eps). The norm weights already include the factor
        # sqrt(H).
        wide = h.float()
        size = torch.linalg.vector_norm(wide, 2, -1, True, out=size)
        torch.hypot(size, self._eps_size, out=size)
        if self._lean:
            return torch.div(h, size, out=out).mul_(weight)
        return wide.div_(size).mul_(weight).to(self.dtype)


class FusedDecoder(FusedStack):
    """A decoder of one of the model families in `FAMILIES`, from the tensors of its checkpoint.

    The output matrix may have rows for only some ids (see `read_output_ids`). All other ids then
    have logits of -inf.

    Args:
        config: transformers config that `fits` accepts.
        tensors: Tensors of the checkpoint by transformers name, in any floating dtype.
        rotary: Cosines and sines of positions.
        backend: Backend of the linear layers. None uses `choose_backend`.

    Raises:
        KeyError: A tensor is missing.
    """

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, Tensor],
        rotary: nn.Module,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        backend: LinearBackend | None = None,
    ) -> None:
        super().__init__(config, rotary, name=name, device=device, dtype=dtype)
        self.vocab_size = config.vocab_size
        output_ids, read = (
            read_output_ids(tensors, self.vocab_size, name),
            self._reader(config, tensors, backend),
        )
        self.weights = FusedWeights(config, read, self._rotary, output_ids)
        self.weight_bytes = self.weights.nbytes

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        return torch.embedding(self.weights.embedding, ids)

    def norm(self, rows: Tensor) -> Tensor:
        """Apply the final norm to the output [..., hidden] of a layer."""
        return self._norm(rows, self.weights.final_norm)

    def unembed(self, rows: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., hidden] to which the final norm was
        applied.
        """
        flat = rows.reshape(-1, self.hidden_size)
        return self.weights.logits(flat, self._multiply).view(*rows.shape[:-1], -1)

    def unembed_ids(self, rows: Tensor, ids: Tensor) -> Tensor | None:
        """Return the logits [..., k] of only the ids [k], or None if all logits must
        be computed."""
        outputs = self.weights.outputs
        return None if outputs is None else rows @ outputs[ids].mT

    @property
    def _stack(self) -> Sequence[LayerWeights]:
        return self.weights.layers

    @property
    def _end_bytes(self) -> int:
        return self.weights.final_norm.nbytes + self.weights.head.nbytes

    def _enter(self, x: Input, layers: tuple[int, int] | None) -> tuple[Tensor, int, int]:
        if isinstance(x, Features):
            raise ValueError("a target reads tokens alone; features are for draft heads")
        if isinstance(x, Tokens):
            if layers and layers[0]:
                raise ValueError(f"layer {layers[0]} is entered with hidden rows, not token ids")
            b, n = x.ids.shape
            return torch.embedding(self.weights.embedding, self.clamp_ids(x.ids).reshape(-1)), b, n
        b, n, width = x.rows.shape
        return x.rows.to(self.dtype, copy=True).view(b * n, width), b, n

    def _logits(
        self, h: Tensor, b: int, at: Literal["last", "all"] | Tensor, scratch: Scratch
    ) -> Tensor:
        norm = self.weights.final_norm
        if isinstance(at, Tensor):
            picked = h.view(b, -1, self.hidden_size).index_select(1, at)
            rows = self._norm(picked.view(-1, self.hidden_size), norm)
        elif at == "last" and h.shape[0] > b:
            rows = self._norm(h.view(b, -1, self.hidden_size)[:, -1], norm)
        else:
            rows = self._norm(h, norm, scratch.size, scratch.normed)
        return self.weights.logits(rows, self._multiply).view(b, -1, self.vocab_size)


def _join_inputs(xs: Sequence[Input]) -> Tokens | Features:
    """Concatenate the inputs of several sequences, as if they were one sequence."""
    ids = torch.cat([x.ids for x in xs if not isinstance(x, Hidden)], 1)
    if isinstance(xs[0], Features):
        return Features(ids, torch.cat([x.rows for x in xs if isinstance(x, Features)], 1))
    return Tokens(ids)


def _windows(config: Any) -> list[int | None]:
    """Return the sliding window size of each layer. None means full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mistral" or kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
