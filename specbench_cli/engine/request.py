"""Request: one prompt to continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import ExtraInput


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    Attributes:
        ids: Tokens of the prompt with its template. For a target with an encoder, these are the
            first tokens of the decoder (`Decoder.split_prompt`).
        topic: The task's category, for methods that learn from ended requests.
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
        """Return the request for a prompt as the target reads it."""
        text, source = target.split_prompt(ids)
        return cls(prompt_id, turn, text, stop, source, topic)

    def state(self, decoder: Decoder, capacity: int) -> State:
        """Return a new state of a decoder for this request."""
        state = decoder.new_state(capacity)
        if self.source is not None:
            decoder.attach(state, self.source)
        return state


@dataclass(frozen=True, slots=True)
class BatchSlot:
    """The batch of a session: its trace, and the session's place in it."""

    meter: Meter
    place: int
