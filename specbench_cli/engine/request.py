"""Request (one prompt to decode), and its place in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import ExtraInput


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to decode.

    Attributes:
        ids: Tokens of the prompt, with the chat template. For a target with an encoder, the first
            tokens of the target's decoder (`Decoder.split_prompt`).
        source: Further input, such as encoder ids or images.
        topic: Category of the task, for methods that learn.
    """

    prompt_id: str
    turn: int
    ids: tuple[int, ...]
    stop: StopRule
    source: ExtraInput | None = None
    topic: str = ""

    @classmethod
    def create(
        cls,
        target: Decoder,
        prompt_id: str,
        turn: int,
        ids: Sequence[int],
        stop: StopRule,
        topic: str = "",
    ) -> Request:
        """Create the request for a prompt, in the form that the target reads."""
        text, source = target.split_prompt(ids)
        return cls(prompt_id, turn, text, stop, source, topic)

    def state(self, decoder: Decoder, capacity: int) -> State:
        """Return a new state of a decoder for this request, with its extra input attached."""
        state = decoder.new_state(capacity)
        if self.source is not None:
            decoder.attach(state, self.source)
        return state


@dataclass(frozen=True, slots=True)
class BatchSlot:
    """A session's index in a batch, and the trace that all sessions of the batch share."""

    meter: Meter
    place: int
