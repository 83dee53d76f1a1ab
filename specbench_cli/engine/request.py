"""A request: one prompt to continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.meter import Meter
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import ExtraInput


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `ids` are the prompt's tokens, template included; of a target that
    reads the prompt otherwise (`Decoder.parted`) those that its text begins with. `topic` is
    its task's category, for what learns from it once it has ended."""

    prompt_id: str
    turn: int
    ids: tuple[int, ...]
    stop: StopRule
    source: ExtraInput | None = None
    topic: str = ""

    @classmethod
    def of(
        cls,
        target: Decoder,
        prompt_id: str,
        turn: int,
        ids: Sequence[int],
        stop: StopRule,
        topic: str = "",
    ) -> Request:
        """A prompt as a target reads it."""
        text, source = target.parted(ids)
        return cls(prompt_id, turn, text, stop, source, topic)

    def state(self, decoder: Decoder, capacity: int) -> State:
        """A state of a decoder for this request."""
        state = decoder.new_state(capacity)
        if self.source is not None:
            decoder.attach(state, self.source)
        return state


@dataclass(frozen=True, slots=True)
class BatchSlot:
    """What the sessions of a batch have in common, a trace, and the place of one among them."""

    meter: Meter
    place: int
