"""Llama, Mistral, Qwen2 and Qwen3 as one lean function of fused weights.

Touvron et al., arXiv:2302.13971; Jiang et al., arXiv:2310.06825; Yang et al., arXiv:2407.10671 and
arXiv:2505.09388. All four are the same decoder up to a bias on q, k and v (Qwen2), norms on q and k
(Qwen3) and a sliding window (Mistral, some Qwen).

On a small model the time goes into dispatching operations, so there are few of them: one product for
q, k and v, one for gate and up, one for each residual; rotation, cache write and attention on views that
are made once a forward; nothing allocated that a buffer can hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from specbench_cli.engine.attention import (
    FEW,
    CausalBias,
    attend_few,
    attend_many,
    attend_tree,
    visible,
)
from specbench_cli.engine.decoder import Decoder, LogitsAt, State
from specbench_cli.engine.layers import FusedWeights, Layer
from specbench_cli.engine.linear import Form
from specbench_cli.engine.rotary import Rotary, Table
from specbench_cli.engine.state import KVState, LayerShape
from specbench_cli.engine.types import Embeds, Hidden, Out, Tokens

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose frequencies do not change while a text grows."""


def fits(config: Any) -> bool:
    """Whether a transformers config describes a model that this module computes."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and getattr(config, "quantization_config", None) is None
        and rope.get("rope_type") in ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and set(getattr(config, "layer_types", None) or ())
        <= {"full_attention", "sliding_attention"}
    )


class Sight(NamedTuple):
    """What the new rows see of the rows up to themselves.

    bias: for `attend_few` [n, seen] additive; for `attend_many` a bool mask. None: everything, or
        what `causal` says.
    tree: [n, seen] bool for `attend_tree`; takes the place of all else.
    """

    bias: Tensor | None
    causal: bool
    tree: Tensor | None


View = tuple[Tensor, Tensor, Tensor, Sight]
"""One sequence at one layer: where new rows go [2 kv, n, d], keys [kv, d, seen], values [kv, seen, d]."""


Plan = tuple[list[tuple[View, ...]], Table, "Scratch"]
"""For each layer the views of all sequences; rotary tables of the rows; buffers."""

MAX_PLANS = 512
"""Plans kept with a state, of the order of 10 kB each."""


class Line(NamedTuple):
    """The views of one sequence of a forward on the buffers of `Scratch`.

    q, mixed: [heads, n, d], or [kv, heads / kv, d] for one row, whose heads are as good as rows.
    row: [2 kv, n, d], keys and values; value: its second half.
    """

    q: Tensor
    mixed: Tensor
    row: Tensor
    value: Tensor


class Scratch:
    """Buffers for forwards of b sequences with n rows each, and the views that a layer works on."""

    def __init__(self, model: FusedDecoder, b: int, n: int) -> None:
        rows, d, heads, kv = b * n, model.head_dim, model.heads, model.kv_heads
        new = model.weights.embedding.new_empty
        self.few = model.few(n)
        self.size = new(rows, 1)
        self.normed = new(rows, model.hidden_size)
        self.qkv = new(rows, (heads + 2 * kv) * d)
        self.qk = self.qkv[:, : (heads + kv) * d].unflatten(-1, (heads + kv, d))
        self.turning = model.rotary.view(self.qk)
        self.mixed = new(rows, heads * d)
        self.gate_up = new(rows, 2 * model.mlp_size)
        self.gate, self.up = self.gate_up.chunk(2, -1)
        self.lines = []
        for at in range(0, rows, n):
            qkv = self.qkv[at : at + n].unflatten(-1, (heads + 2 * kv, d)).transpose(0, 1)
            q, mixed = qkv[:heads], self.mixed[at : at + n].unflatten(-1, (heads, d)).transpose(0, 1)
            if n == 1 and self.few:
                q, mixed = q.view(kv, heads // kv, d), mixed.view(kv, heads // kv, d)
            self.lines.append(Line(q, mixed, qkv[heads:], qkv[heads + kv :]))


class FusedDecoder(Decoder):
    """A decoder of one of `FAMILIES` from its checkpoint's tensors.

    Args:
        config: transformers' config, for which `fits` holds.
        tensors: the checkpoint, by transformers' names; any floating dtype.
        rotary: transformers' rotary module of the config.
        form: form of the linears; default: the rule of `linear`.

    Raises:
        KeyError: a tensor is missing.
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
        form: Form | None = None,
    ) -> None:
        self.name, self.device, self.dtype = name, device, dtype
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.n_layers, self.max_positions = config.num_hidden_layers, config.max_position_embeddings
        self.mlp_size = config.intermediate_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or self.hidden_size // self.heads
        # What fewest operations take depends on where they run: torch's fused kernels win on CUDA, and
        # half precisions need their inner float32. `_lean` is the rest.
        self._lean = device.type == "cpu" and dtype == torch.float32
        self._eps = config.rms_norm_eps
        self._eps_size = torch.full((1, 1), (self._eps * self.hidden_size) ** 0.5)
        self.rotary = Rotary(rotary, self.head_dim, dtype=dtype, device=device)
        self.weights = FusedWeights(
            config,
            tensors,
            self.rotary,
            device=device,
            dtype=dtype,
            norm_factor=self.hidden_size**0.5 if self._lean else 1.0,
            form=form,
        )
        self.weight_bytes = self.weights.nbytes
        self._windows = _windows(config)
        self._biases = {
            window: CausalBias(window, dtype=dtype, device=device) for window in set(self._windows)
        }
        self._all = range(self.n_layers)
        self._scratch: dict[tuple[int, int], Scratch] = {}

    def few(self, n: int) -> bool:
        """Whether blocks of n rows take `attend_few`."""
        return self._lean and n <= FEW and (n == 1 or self.heads == self.kv_heads)

    def new_state(self, capacity: int, n_seqs: int = 1) -> KVState:
        """A cleared state with room for `capacity` rows in each of `n_seqs` sequences."""
        self.rotary.reserve(capacity)
        for bias in self._biases.values():
            bias.reserve(capacity)
        shape = LayerShape(self.kv_heads, self.head_dim, self.head_dim)
        return KVState(
            [shape] * self.n_layers, n_seqs, capacity, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def forward(
        self,
        x: Tokens | Embeds | Hidden,
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
        """See `Decoder.forward`."""
        assert isinstance(state, KVState)
        h, b, n = self._enter(x, layers)
        lines = range(b) if seqs is None else seqs
        if mask is None and positions is None and not layers and not skip:
            run: Sequence[int] = self._all
            views, table, scratch = self._plain_plan(state, lines, n)
        else:
            run = [at for at in range(*(layers or (0, self.n_layers))) if at not in skip]
            views, table, scratch = self._plan(state, lines, run, n, mask, positions)
        tapped = {}
        for at, seen in zip(run, views, strict=True):
            h = self._run_layer(self.weights.layers[at], h, scratch, table, seen)
            if at in taps:
                tapped[at] = h.view(b, n, -1).clone()  # the next layer adds to h
        for seq in lines:
            state.extend(seq, run, n)
        logits = None
        if logits_at is not None and (not layers or layers[1] == self.n_layers):
            logits = self._logits(h, b, logits_at, scratch)
        return Out(logits, h.view(b, n, -1), tapped)

    def _run_layer(
        self, layer: Layer, h: Tensor, scratch: Scratch, table: Table, views: Sequence[View]
    ) -> Tensor:
        """One layer: rows [b * n, hidden] in and out; what comes in may be overwritten."""
        normed = scratch.normed
        layer.qkv(self._norm(h, layer.norm, scratch.size, normed), scratch.qkv)
        if layer.heads_norm is not None:
            heads = torch.rms_norm(scratch.qk, (self.head_dim,), None, self._eps)
            torch.mul(heads, layer.heads_norm, out=scratch.qk)
        self.rotary.turn(scratch.turning, table)
        for line, (new, k, v, sight) in zip(scratch.lines, views, strict=True):
            if sight.tree is not None:
                line.value.nan_to_num_()
            new.copy_(line.row)
            if sight.tree is not None:
                attend_tree(line.q, k, v, sight.tree, self.rotary.scale, line.mixed)
            elif scratch.few:
                attend_few(line.q, k, v, sight.bias, line.mixed)
            else:
                attend_many(line.q, k, v, sight.bias, sight.causal, self.rotary.scale, line.mixed)
        h = layer.out.add_to(h, scratch.mixed)
        layer.gate_up(self._norm(h, layer.mlp_norm, scratch.size, normed), scratch.gate_up)
        torch._C._nn.silu_(scratch.gate)
        return layer.down.add_to(h, scratch.gate.mul_(scratch.up))

    def _norm(
        self, h: Tensor, weight: Tensor, size: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) of rows, into `out`."""
        if not self._lean:
            return torch.rms_norm(h, (self.hidden_size,), weight, self._eps)
        # sqrt(sum of squares + H eps) is a hypotenuse; the factor sqrt(H) is in the weights.
        size = torch.linalg.vector_norm(h, 2, -1, True, out=size)
        torch.hypot(size, self._eps_size, out=size)
        return torch.div(h, size, out=out).mul_(weight)

    def _logits(
        self, h: Tensor, b: int, at: Literal["last", "all"] | Tensor, scratch: Scratch
    ) -> Tensor:
        """Logits [b, r, V] of rows h [b * n, hidden]."""
        if not isinstance(at, Tensor) and (at == "all" or len(h) == b):
            rows = self._norm(h, self.weights.final_norm, scratch.size, scratch.normed)
        else:
            lines = h.view(b, -1, self.hidden_size)
            lines = lines.index_select(1, at) if isinstance(at, Tensor) else lines[:, -1]
            rows = self._norm(lines.reshape(-1, self.hidden_size), self.weights.final_norm)
        return self.weights.head(rows).view(b, -1, self.vocab_size)

    def _enter(
        self, x: Tokens | Embeds | Hidden, layers: tuple[int, int] | None
    ) -> tuple[Tensor, int, int]:
        """Rows [b * n, hidden] of our own that enter the first layer, b and n."""
        if isinstance(x, Tokens):
            if layers and layers[0]:
                raise ValueError(f"layer {layers[0]} is entered with hidden rows, not token ids")
            b, n = x.ids.shape
            return torch.embedding(self.weights.embedding, x.ids.view(-1)), b, n
        b, n, width = x.rows.shape
        return x.rows.to(self.dtype, copy=True).view(b * n, width), b, n

    def _plain_plan(self, state: KVState, lines: Sequence[int], n: int) -> Plan:
        """The plan of a forward without extras; that of a single sequence is kept for the next time."""
        if len(lines) > 1 or n > FEW:
            return self._plan(state, lines, self._all, n, None, None)
        lengths = state.lengths[lines[0]]
        start = lengths[0]
        if lengths.count(start) < len(lengths):
            return self._plan(state, lines, self._all, n, None, None)
        key = (lines[0], start, n)
        plan: Plan | None = state.plans.get(key)
        if plan is None:
            if len(state.plans) >= MAX_PLANS:
                state.plans.clear()
            plan = state.plans[key] = self._plan(state, lines, self._all, n, None, None)
        return plan

    def _plan(
        self,
        state: KVState,
        lines: Sequence[int],
        run: Sequence[int],
        n: int,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> Plan:
        """Views of every layer on every sequence, rotary tables and buffers."""
        views = [
            self._views(state, seq, run, n, mask, None if positions is None else positions[i])
            for i, seq in enumerate(lines)
        ]
        starts = [state.lengths[seq][run[0] if run else 0] for seq in lines]
        table = self._table(starts, n, positions)
        return list(zip(*views, strict=True)), table, self._scratch_for(len(lines), n)

    def _views(
        self,
        state: KVState,
        seq: int,
        run: Sequence[int],
        n: int,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> list[View]:
        """For each layer, where n new rows of a sequence go and what they attend to."""
        lengths, windows = state.lengths[seq], self._windows
        if len(self._biases) == 1 and lengths.count(lengths[0]) == len(lengths) and run:
            return self._open(state, seq, lengths[0], windows[0], run, n, mask, positions)
        views = []
        for (start, window), same in groupby(run, key=lambda at: (lengths[at], windows[at])):
            views += self._open(state, seq, start, window, list(same), n, mask, positions)
        return views

    def _open(
        self,
        state: KVState,
        seq: int,
        start: int,
        window: int | None,
        run: Sequence[int],
        n: int,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> list[View]:
        """The same for layers of one length and window."""
        state.require(start, n)
        first = 0  # rows before it are out of every new row's window
        if mask is not None or (positions is not None and window is not None):
            tree = visible(
                start, n, device=self.device, mask=mask, positions=positions, window=window
            )
            sight = Sight(None, False, tree)
        else:
            if window is not None:
                first = max(0, start + 1 - window)
            sight = self._sight(start, first, n, window)
        buffer, kv = state.buffers[0], self.kv_heads
        low, across = run[0], run[-1] - run[0] + 1
        rows = buffer[low : low + across, seq]
        new = rows[:, :, start : start + n]
        seen = rows[:, :, first : start + n]
        k, v = seen[:, :kv].mT, seen[:, kv:]
        views = [(*view, sight) for view in zip(new.unbind(), k.unbind(), v.unbind(), strict=True)]
        return views if across == len(run) else [views[at - low] for at in run]

    def _sight(self, start: int, first: int, n: int, window: int | None) -> Sight:
        """What n rows after `start` see of the rows from `first` on, without a mask."""
        if n == 1:
            return Sight(None, False, None)
        if self.few(n):
            return Sight(self._biases[window].of(start, first, n), False, None)
        if start == 0 and (window is None or n <= window):
            return Sight(None, True, None)
        return Sight(visible(start, n, device=self.device, window=window)[:, first:], False, None)

    def _table(self, starts: Sequence[int], n: int, positions: Tensor | None) -> Table:
        """Rotary tables of all rows."""
        if positions is None:
            if len(starts) == 1:
                return self.rotary.at(starts[0], n)
            steps = torch.arange(n, device=self.device)
            positions = torch.tensor(starts, device=self.device)[:, None] + steps
        return self.rotary.select(positions.reshape(-1))

    def _scratch_for(self, b: int, n: int) -> Scratch:
        scratch = self._scratch.get((b, n))
        if scratch is None:
            scratch = Scratch(self, b, n)
            if n <= FEW:  # longer blocks are rare, and their buffers large
                self._scratch[b, n] = scratch
        return scratch


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, None where it sees everything."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "mistral" or kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
