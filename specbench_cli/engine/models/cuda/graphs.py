"""Forwards that are recorded once and replayed: CUDA graphs over buffers that stay where they are.

A forward over few rows is hundreds of kernels of a few microseconds each. A fast device runs them
sooner than the host launches them one by one, and waits: most of a small draft's step is launching.
Recorded as a graph, all are launched by one call. What differs from replay to replay lies in
buffers on the device: ids, how many rows were written before, a tree's mask and positions. As the
number of rows that attention reads is part of a recording, it is a multiple of `SEEN_MULTIPLE`;
those that are not there yet are masked.
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
"""Most rows of a forward that is recorded: wider ones keep the device busy for as long as their
launches take."""

SEEN_MULTIPLE = 256
"""Rows in whose multiples a recording's attention looks."""


class GraphKey(NamedTuple):
    """What makes two forwards the same recording, beside how many rows they see.

    n: new rows. width: numbers beside each id; 0: ids alone. logits: how many rows get some by an
    index, else "last", "all" or None. taps: layers. mask_width: columns of its mask; 0: the usual
    one.
    has_positions: whether its positions are its own.
    """

    n: int
    width: int
    logits: str | int | None
    taps: tuple[int, ...]
    mask_width: int
    has_positions: bool

    @classmethod
    def of(cls, model_input: ModelInput) -> GraphKey | None:
        """That of a forward; None where it is none that is recorded."""
        x, logits_at, mask = model_input.x, model_input.logits_at, model_input.mask
        if isinstance(x, Hidden) or x.ids.shape[0] > 1 or x.ids.shape[1] > MAX_ROWS:
            return None
        return cls(
            n=x.ids.shape[1],
            width=x.rows.shape[-1] if isinstance(x, Features) else 0,
            logits=len(logits_at) if isinstance(logits_at, Tensor) else logits_at,
            taps=tuple(model_input.taps),
            mask_width=0 if mask is None else mask.shape[1],
            has_positions=model_input.positions is not None,
        )


class Buffers:
    """What a recorded forward reads that differs from replay to replay.

    Attributes:
        start: [2] int64, rows written before and the position of the first new row.
        x: the input [1, n]. positions: [1, n]; mask: [n, w + n]; index: of the rows that get
            logits; each None where the shape has none.
    """

    def __init__(self, shape: GraphKey, device: torch.device, dtype: torch.dtype) -> None:
        def whole(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        n = shape.n
        self.start = whole(2)
        ids = whole(1, n)
        rows = torch.zeros(1, n, shape.width, dtype=dtype, device=device)
        self.x: Tokens | Features = Features(ids, rows) if shape.width else Tokens(ids)
        self.positions = whole(1, n) if shape.has_positions else None
        self.mask = (
            torch.ones(n, shape.mask_width, dtype=torch.bool, device=device)
            if shape.mask_width
            else None
        )
        self.index = whole(shape.logits) if isinstance(shape.logits, int) else None

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
"""A forward over `Buffers`, and what it gives: on a device in the same tensors at each replay."""

Capture = Callable[[Body], Body]
"""Records a body; what it gives replays it."""

Build = Callable[[KVState, Buffers, GraphKey, int], Body]
"""Makes the body of a shape on a state, over so many rows, those to come included."""


class CudaGraphs:
    """Captures on one device. All recordings share memory: what one gives is copied before the next
    one runs."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, body: Body) -> Body:
        """See `Capture`."""
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            body()  # what is set up at first use is then no part of the recording
            graph.capture_begin(self._pool, "thread_local")
            out = body()
            graph.capture_end()
        here.wait_stream(self._stream)

        def replay(_: Body = body) -> ModelOutput:  # which holds what the graph reads
            graph.replay()
            return out

        return replay


class Recorder:
    """The recordings of one decoder, by the states that they work on.

    Attributes:
        n_recorded: how many there are or were.
    """

    def __init__(self, capture: Capture, build: Build) -> None:
        self.n_recorded = 0
        self._capture, self._build = capture, build
        self._kept: WeakKeyDictionary[KVState, dict[GraphKey, tuple[Buffers, dict[int, Body]]]] = (
            WeakKeyDictionary()
        )

    def run(self, shape: GraphKey, model_input: ModelInput, state: KVState) -> ModelOutput:
        """A forward of that shape, recorded where it is the first one on a state that sees as many
        times `SEEN_MULTIPLE` rows.

        Raises:
            ValueError: more rows than the state has room for.
        """
        start = state.lengths[0][0]
        state.require(start, shape.n)
        kept = self._kept.setdefault(state, {})
        if shape not in kept:
            like = state.buffers[0]
            kept[shape] = Buffers(shape, like.device, like.dtype), {}
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
