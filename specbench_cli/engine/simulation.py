"""Simulation of a method under load, without running models.

`specbench predict` uses it. The simulation runs the engine's own batches, sessions, methods and
length rules. It replaces two parts:

* The models are `ScriptedDecoder`s. They return tokens that are known in advance from a recorded
  run: the output of each request, and which of its tokens the draft model predicted correctly.
* The clock is a `SimulatedClock`. It advances by the cost of each forward, which a cost function
  returns. If no request is being decoded, it advances to the arrival of the next request.
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
    """Clock that advances only when `sleep` is called.

    Attributes:
        model: Model of the last forward.
    """

    model = ""

    def __init__(self) -> None:
        self._at = 0
        super().__init__()

    def now_ns(self) -> int:
        """Return the simulated time in ns."""
        return self._at

    def sleep(self, ns: int) -> None:
        """Advance the clock by `ns` nanoseconds."""
        self._at += ns


class SimulatedTimeDecoder(Decoder):
    """Wrapper of a decoder that advances the simulated clock by the cost of each forward.

    Args:
        cost: Function that returns the time of a forward, including CPU work.
    """

    def __init__(self, decoder: Decoder, clock: SimulatedClock, cost: CostFunction) -> None:
        self._decoder, self._clock, self._cost = decoder, clock, cost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the decoder."""
        return self._decoder.name

    def new_state(self, capacity: int, n_seqs: int = 1) -> State:
        """Return an empty state of the wrapped decoder."""
        return self._decoder.new_state(capacity, n_seqs)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run a forward, and advance the clock by its cost."""
        self._spend([(model_input, not model_input.state.length())])
        return self._decoder.run(model_input)

    def forward_batch(
        self, parts: Sequence[ModelInput], *, captured_layers: Sequence[int] = ()
    ) -> list[ModelOutput]:
        """Run a forward over several sequences, and advance the clock by its cost."""
        self._spend([(part, part.prompt or not part.state.length()) for part in parts])
        return self._decoder.forward_batch(parts, captured_layers=captured_layers)

    def _spend(self, parts: Sequence[tuple[ModelInput, bool]]) -> None:
        rows = [SequenceRows(part.shape[1], part.state.length(), prompt) for part, prompt in parts]
        warm = self.name == self._clock.model == "target"
        self._clock.model = self.name
        self._clock.sleep(round(self._cost(ForwardWork(self.name, rows, warm=warm))))


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A request whose output is known in advance, for the simulation.

    Attributes:
        prompt, output: Token ids.
        draft_correct: For each output token, whether the draft model predicts it correctly.
        budget: Maximum number of new tokens.
        eos: True if the output ended with an end-of-text token, False if it ended at the budget.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    draft_correct: tuple[bool, ...]
    budget: int
    eos: bool = False

    def request(self, place: int) -> Request:
        """Return the request in the engine's form. `place` is its index in the batch."""
        stop = StopRule(frozenset(self.output[-1:] if self.eos else ()), self.budget)
        return Request(f"simulated/{place}", 1, self.prompt, stop)


class ScriptedState:
    """State of a `ScriptedDecoder`. It contains no tensors.

    Args:
        row_bytes: Number of bytes per token that `nbytes` reports.

    Attributes:
        text: Prompt tokens so far.
        script: The scripted request whose prompt is `text`. None before the prompt is complete.
    """

    by_row = True

    def __init__(self, capacity: int, row_bytes: int = 0) -> None:
        self.capacity, self._row_bytes = capacity, row_bytes
        self._written = self._kept = 0
        self.text: tuple[int, ...] = ()
        self.script: ScriptedRequest | None = None

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """Return the number of tokens processed so far."""
        return self._written

    def position(self, seq: int = 0) -> int:
        """Return the position of the next token: the number of tokens processed so far."""
        return self._written

    def write(self, n: int) -> None:
        """Count n more processed tokens."""
        self._written += n

    def commit(self, seq: int, path: Sequence[int], loose: int = 0) -> None:
        """Keep the tokens at `path` and drop all other tokens since the last commit."""
        self._written = self._kept + len(path)
        self._kept = self._written - loose

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        """Drop all tokens from position n on."""
        self._written = min(self._written, n)
        self._kept = min(self._kept, n)

    def leave_out(self, seq: int, layers: Iterable[int], n: int) -> None:
        """Do nothing, because a scripted decoder has no layers to skip."""

    def clear(self) -> None:
        """Drop all tokens."""
        self._written = self._kept = 0
        self.text, self.script = (), None

    @property
    def nbytes(self) -> int:
        """Number of bytes that a real state with this capacity would take."""
        return self.capacity * self._row_bytes


class ScriptedDecoder(Decoder):
    """Decoder that returns the known tokens of scripted requests.

    Args:
        perfect: True if the decoder always predicts the right token, as the target does. If False,
            it predicts a wrong token where `ScriptedRequest.draft_correct` is False.

    Raises:
        ValueError: Two requests have the same prompt and different outputs.
    """

    n_layers = hidden_size = 1
    weight_bytes = 0
    max_positions = 1 << 30
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(
        self, name: str, scripts: Sequence[ScriptedRequest], *, perfect: bool, row_bytes: int = 0
    ) -> None:
        self.name, self._perfect, self._row_bytes = name, perfect, row_bytes
        self._script_of = {script.prompt: script for script in scripts}
        if any(self._script_of[script.prompt].output != script.output for script in scripts):
            raise ValueError("two requests have one prompt and different outputs")
        self.vocab_size = 2 + max(max(s.prompt + s.output) for s in scripts)

    def new_state(self, capacity: int, n_seqs: int = 1) -> ScriptedState:
        """Return an empty state. It contains no tensors."""
        return ScriptedState(capacity, self._row_bytes)

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Return logits that predict the scripted tokens.

        Only chains and forwards through all layers are supported.

        Raises:
            MethodFault: The input is not supported.
        """
        x, state, at = model_input.x, model_input.state, model_input.logits_at
        if not isinstance(x, Tokens) or model_input.options.keys() - {"logits_at"}:
            raise MethodFault(
                "a simulation supports only chains from a draft model or a lookup: no trees, no"
                " draft heads, no partial forwards of the target"
            )
        assert isinstance(state, ScriptedState)
        self.ran += 1
        ids, first = x.ids[0].tolist(), state.length()
        if first == len(state.text):  # a prompt may be prefilled in chunks
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

    def _next_token(self, script: ScriptedRequest, position: int) -> int:
        """Return the predicted token at a position of the text. After the end of the text, return
        0.
        """
        at = position - len(script.prompt)
        if at >= len(script.output):
            return 0
        token = script.output[at]
        return token if self._perfect or script.draft_correct[at] else (token + 1) % self.vocab_size


def simulate(
    method: Method,
    scripts: Sequence[ScriptedRequest],
    cost: CostFunction,
    *,
    size: int,
    chunk: int | None = None,
    arrivals: Sequence[float] = (),
    costs: Callable[..., float] | None = None,
) -> Batch:
    """Decode scripted requests as a batch, on a simulated clock that begins at 0.

    Args:
        cost: Function that returns the time of a forward.
        size, chunk, arrivals: Arguments of `Batch`: batch size, prompt tokens per forward, and
            arrival times of the requests.
        costs: Forward costs that draft length rules read (`Workspace.costs`).

    Raises:
        MethodFault: The method needs trees, heads or forwards through only some layers.
    """
    clock = SimulatedClock()
    decoders: Mapping[str, Decoder] = {
        name: SimulatedTimeDecoder(
            ScriptedDecoder(name, scripts, perfect=name == "target"), clock, cost
        )
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
    """Decode requests as a batch, on a simulated clock.

    The models of the workspace must be `SimulatedTimeDecoder`s.
    """
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
