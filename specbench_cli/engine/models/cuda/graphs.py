"""CUDA graphs of a decoder's forwards: captured once, and replayed with new inputs.

A forward over few rows launches hundreds of kernels that take a few microseconds each. A fast GPU
runs kernels faster than the host launches them. So launches dominate the time of a small draft
model. A graph launches all kernels in one call.

Inputs that differ between replays are copied to buffers on the device: ids, the number of cached
rows, and a tree's mask and positions. In a graph, attention reads a fixed number of cached rows,
which is a multiple of `SEEN_MULTIPLE`. A mask hides the rows that are not written yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import ModelInput
from specbench_cli.engine.models.state import KVState
from specbench_cli.engine.types import Features, Hidden, ModelOutput, Tokens

MAX_ROWS = 64
"""Maximum number of new rows of a captured forward. With more, launches do not limit the speed."""

SEEN_MULTIPLE = 256
"""Attention in a graph reads a multiple of this number of rows."""


class GraphKey(NamedTuple):
    """Key of a CUDA graph: the shapes that are fixed in the graph.

    The number of rows that attention reads is fixed too. `GraphRecorder` adds it to the key.

    Attributes:
        n: Number of new rows.
        width: Width of the features of each id. 0 means that the input has only ids.
        logits: Rows that get logits: "last", "all", None, or the length of an index tensor.
        captured_layers: Layers whose output is captured.
        mask_width: Number of columns of the mask. 0 means a causal mask.
        has_positions: Whether the forward has explicit positions.
    """

    n: int
    width: int
    logits: str | int | None
    captured_layers: tuple[int, ...]
    mask_width: int
    has_positions: bool

    @classmethod
    def from_input(cls, model_input: ModelInput) -> GraphKey | None:
        """Return the key of a forward, or None if a CUDA graph cannot represent the forward."""
        x, logits_at, mask = model_input.x, model_input.logits_at, model_input.mask
        if isinstance(x, Hidden) or x.ids.shape[0] > 1 or x.ids.shape[1] > MAX_ROWS:
            return None
        return cls(
            n=x.ids.shape[1],
            width=x.rows.shape[-1] if isinstance(x, Features) else 0,
            logits=len(logits_at) if isinstance(logits_at, Tensor) else logits_at,
            captured_layers=tuple(model_input.captured_layers),
            mask_width=0 if mask is None else mask.shape[1],
            has_positions=model_input.positions is not None,
        )


class GraphBuffers:
    """Input buffers of a CUDA graph. Their contents differ between replays.

    Attributes:
        start: [2] int64, the number of cached rows and the position of the first new row.
        x: Input ids or features [1, n].
        positions: Positions [1, n], or None.
        mask: Attention mask [n, w + n], or None.
        index: Indices of the rows that get logits, or None.
    """

    def __init__(self, shape: GraphKey, device: torch.device, dtype: torch.dtype) -> None:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        n = shape.n
        self.start = zeros(2)
        ids = zeros(1, n)
        rows = torch.zeros(1, n, shape.width, dtype=dtype, device=device)
        self.x: Tokens | Features = Features(ids, rows) if shape.width else Tokens(ids)
        self.positions = zeros(1, n) if shape.has_positions else None
        self.mask = (
            torch.ones(n, shape.mask_width, dtype=torch.bool, device=device)
            if shape.mask_width
            else None
        )
        self.index = zeros(shape.logits) if isinstance(shape.logits, int) else None

    def fill(self, model_input: ModelInput, state: KVState) -> None:
        """Copy the input of a forward into the buffers."""
        x, positions, mask = model_input.x, model_input.positions, model_input.mask
        logits_at = model_input.logits_at
        assert not isinstance(x, Hidden)
        start = (state.lengths[0][0], state.position())
        self.start.copy_(host.cached_ids(start, self.start.device))
        self.x.ids.copy_(x.ids)
        if isinstance(self.x, Features) and isinstance(x, Features):
            self.x.rows.copy_(x.rows)
        if self.positions is not None and positions is not None:
            self.positions.copy_(positions)
        if self.mask is not None and mask is not None:
            self.mask.copy_(mask)
        if self.index is not None and isinstance(logits_at, Tensor):
            self.index.copy_(logits_at)


Body = Callable[[], ModelOutput]
"""A forward that reads `GraphBuffers`. On a device, each replay returns the same tensors."""

Capture = Callable[[Body], Body]
"""A function that captures a `Body` and returns a function that replays it."""

Build = Callable[[KVState, GraphBuffers, GraphKey, int], Body]
"""A function that returns the `Body` for a key and a state.

The integer is the number of cached rows that attention reads."""


class CudaGraphs:
    """Function object that captures CUDA graphs on one device.

    All graphs share memory. So the output of one graph must be copied before the next graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, body: Body) -> Body:
        """Capture a function as a CUDA graph. Return a function that replays the graph."""
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            body()  # warm up, so that one-time initialization is not captured
            graph.capture_begin(self._pool, "thread_local")
            out = body()
            graph.capture_end()
        here.wait_stream(self._stream)

        def replay(_: Body = body) -> ModelOutput:  # the reference keeps the graph's inputs alive
            graph.replay()
            return out

        return replay


class GraphRecorder:
    """Cache of the CUDA graphs of one decoder. Each model state has its own graphs.

    Attributes:
        n_recorded: Number of graphs captured so far.
    """

    def __init__(self, capture: Capture, build: Build) -> None:
        self.n_recorded = 0
        self._capture, self._build = capture, build
        self._kept: WeakKeyDictionary[
            KVState, dict[GraphKey, tuple[GraphBuffers, dict[int, Body]]]
        ] = WeakKeyDictionary()

    def run(self, shape: GraphKey, model_input: ModelInput, state: KVState) -> ModelOutput:
        """Replay the CUDA graph of a forward. If there is none for its key, state and length,
        capture it.

        Raises:
            ValueError: The rows exceed the capacity of the state.
        """
        start = state.lengths[0][0]
        state.require(start, shape.n)
        kept = self._kept.setdefault(state, {})
        if shape not in kept:
            like = state.buffers[0]
            kept[shape] = GraphBuffers(shape, like.device, like.dtype), {}
        buffers, bodies = kept[shape]
        buffers.fill(model_input, state)
        end = min(-(-(start + shape.n) // SEEN_MULTIPLE) * SEEN_MULTIPLE, state.capacity)
        if end not in bodies:
            bodies[end] = self._capture(self._build(state, buffers, shape, end))
            self.n_recorded += 1
        out = bodies[end]()
        return ModelOutput(
            None if out.logits is None else out.logits.clone(),
            out.hidden.clone(),
            {at: rows.clone() for at, rows in out.aux_hidden_states.items()},
        )
