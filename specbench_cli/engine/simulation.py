"""Batches decoded without models: scripts say what these would have said, a table what it costs.

A discrete-event simulation with the engine's own driver: batches, sessions, methods and their
policies are those that measure. Two things are others: `ScriptedDecoder` decoders, which know the
outputs and which of their tokens the draft model gets right, and a `Clock` that moves by what a
forward costs, and to the next arrival where nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbench_cli.engine.batch import Batch
from specbench_cli.engine.forward_cost import CostFunction, ForwardWork, SequenceRows
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.decoder import Decoder, ModelInput, State
from specbench_cli.engine.models.meter import HostClock
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import ModelOutput, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault


class SimulatedClock(HostClock):
    """Time that passes only where it is spent.

    Attributes:
        model: The model whose forward moved it last.
    """

    model = ""

    def __init__(self) -> None:
        self._at = 0
        super().__init__()

    def now(self) -> int:
        """Nanoseconds spent so far."""
        return self._at

    def sleep(self, ns: int) -> None:
        """Spend some."""
        self._at += ns


class PricedDecoder(Decoder):
    """A decoder whose forwards take what a cost function returns, the host's work included; what
    they compute is the decoder's own."""

    def __init__(self, decoder: Decoder, clock: SimulatedClock, cost: CostFunction) -> None:
        self._decoder, self._clock, self._cost = decoder, clock, cost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The decoder's."""
        return self._decoder.name

    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """See `Decoder`."""
        return self._decoder.new_state(capacity, n_seqs)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`."""
        self._spend([(model_input, not model_input.state.length())])
        return self._decoder.run(model_input)

    def forward_batch(
        self, parts: Sequence[ModelInput], *, taps: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """See `Decoder`."""
        self._spend([(part, part.prompt or not part.state.length()) for part in parts])
        return self._decoder.forward_batch(parts, taps=taps)

    def _spend(self, parts: Sequence[tuple[ModelInput, bool]]) -> None:
        rows = [SequenceRows(part.shape[1], part.state.length(), prompt) for part, prompt in parts]
        warm = self.name == self._clock.model == "target"
        self._clock.model = self.name
        self._clock.sleep(round(self._cost(ForwardWork(self.name, rows, warm=warm))))


@dataclass(frozen=True, slots=True)
class Script:
    """A request as it went.

    prompt, output: ids. right: of each token of the output, whether the draft model says it after
    the text before it. budget: most tokens. eos: whether its last token ended it.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    draft_correct: tuple[bool, ...]
    budget: int
    eos: bool = False

    def request(self, place: int) -> Request:
        """The request."""
        stop = StopRule(frozenset(self.output[-1:] if self.eos else ()), self.budget)
        return Request(f"simulated/{place}", 1, self.prompt, stop)


class ScriptState:
    """How many rows were fed, what stands before the first that was taken back, and of which script
    that is; `row_bytes` is what a row would take."""

    by_row = True

    def __init__(self, capacity: int, row_bytes: int = 0) -> None:
        self.capacity, self._row_bytes = capacity, row_bytes
        self._written = self._kept = 0
        self.text: tuple[int, ...] = ()
        self.script: Script | None = None

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """See `State`."""
        return self._written

    def position(self, seq: int = 0) -> int:
        """See `State`."""
        return self._written

    def write(self, n: int) -> None:
        """Count n rows more."""
        self._written += n

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """See `State`."""
        self._written = self._kept + len(path)
        self._kept = self._written - loose

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """See `State`."""
        self._written = min(self._written, n)
        self._kept = min(self._kept, n)

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """See `State`: a script has no layers."""

    def clear(self) -> None:
        """See `State`."""
        self._written = self._kept = 0
        self.text, self.script = (), None

    @property
    def nbytes(self) -> int:
        """See `State`."""
        return self.capacity * self._row_bytes


class ScriptedDecoder(Decoder):
    """Says the tokens of scripts: the target all of them, the draft model those that it gets right,
    and another one in place of each that it does not.

    Raises:
        ValueError: two scripts begin alike and go on otherwise.
    """

    n_layers = hidden_size = 1
    weight_bytes = 0
    max_positions = 1 << 30
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(
        self, name: str, scripts: Sequence[Script], *, perfect: bool, row_bytes: int = 0
    ) -> None:
        self.name, self._perfect, self._row_bytes = name, perfect, row_bytes
        self._script_of = {script.prompt: script for script in scripts}
        if any(self._script_of[script.prompt].output != script.output for script in scripts):
            raise ValueError("two requests have one prompt and different outputs")
        self.vocab_size = 2 + max(max(s.prompt + s.output) for s in scripts)

    def new_state(self, capacity: int, n_seqs: int = 1) -> ScriptState:
        """See `Decoder`."""
        return ScriptState(capacity, self._row_bytes)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`; chains through the whole model alone.

        Raises:
            MethodFault: anything else.
        """
        x, state, at = model_input.x, model_input.state, model_input.logits_at
        if not isinstance(x, Tokens) or model_input.options.keys() - {"logits_at"}:
            raise MethodFault(
                "a simulation knows chains of a draft model and of lookups: no trees, no heads, no"
                " parts of the target"
            )
        assert isinstance(state, ScriptState)
        self.ran += 1
        ids, first = x.ids[0].tolist(), state.length()
        if first == len(state.text):  # a prompt may come in parts
            state.text += tuple(ids)
            state.script = self._script_of.get(state.text, state.script)
        state.write(len(ids))
        rows = range(len(ids)) if at == "all" else range(len(ids) - 1, len(ids))
        hidden = torch.zeros(1, len(ids), self.hidden_size)
        if at is None:
            return ModelOutput(None, hidden)
        assert state.script is not None
        logits = torch.zeros(1, len(rows), self.vocab_size)
        for row, place in enumerate(rows):
            logits[0, row, self._next_token(state.script, first + place + 1)] = 1.0
        return ModelOutput(logits, hidden)

    def _next_token(self, script: Script, position: int) -> int:
        """The token that is said at a position of the text; 0 behind its end."""
        at = position - len(script.prompt)
        if at >= len(script.output):
            return 0
        token = script.output[at]
        return token if self._perfect or script.draft_correct[at] else (token + 1) % self.vocab_size


def simulate(
    method: Method,
    scripts: Sequence[Script],
    cost: CostFunction,
    *,
    size: int,
    chunk: int | None = None,
    arrivals: Sequence[float] = (),
    costs: Callable[..., float] | None = None,
) -> Batch:
    """Decode scripted requests as a batch would; all times are the clock's, from 0.

    Args:
        size, chunk, arrivals: see `Batch`.
        cost: what forwards take.
        costs: what policies are told of forwards; see `Workspace.costs`.
    Raises:
        MethodFault: the method asks for more than scripts know.
    """
    clock = SimulatedClock()
    decoders: Mapping[str, Decoder] = {
        name: PricedDecoder(ScriptedDecoder(name, scripts, perfect=name == "target"), clock, cost)
        for name in ("target", "draft")
    }
    requests = [script.request(place) for place, script in enumerate(scripts)]
    longest = max(len(script.prompt) + script.budget for script in scripts)
    workspace = Workspace(decoders, longest, costs=costs)
    return run_batch(method, workspace, requests, clock, size=size, chunk=chunk, arrivals=arrivals)


def run_batch(
    method: Method,
    workspace: Workspace,
    requests: Sequence[Request],
    clock: SimulatedClock,
    *,
    size: int,
    chunk: int | None = None,
    arrivals: Sequence[float] = (),
) -> Batch:
    """Decode requests as a batch to its end on such a clock, which `PricedDecoder` decoders
    move."""
    batch = Batch(
        workspace,
        requests,
        Sampling(),
        size=size,
        slots=method.max_sequences(size),
        chunk=chunk,
        arrivals=arrivals,
        clock=clock,
    )
    for session in batch.sessions:
        session.harness.begin()
    for _ in method.generate_batch(batch):
        pass
    return batch
