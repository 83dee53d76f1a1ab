"""The draft's side of a parallel method: a state machine, and all that it may touch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specbench_cli.engine import host
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.meter import Meter, Metered
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import ExtraInput, Tokens
from specbench_cli.engine.verify.choosing import Chooser
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.workers.message import Message
from specbench_cli.former_names import renamed_members

TARGET, DRAFTER = 0, 1
"""Numbers of the workers in traces."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a worker is told of a request before it begins.

    capacity: rows that its states need; vocab_size: the target's; source: see `Request`.
    """

    prompt_id: str
    turn: int
    pass_: int
    ids: tuple[int, ...]
    sampling: Sampling
    capacity: int
    vocab_size: int
    source: ExtraInput | None = None


@renamed_members(since="pending_tokens")
class DraftSession:
    """All that a drafter may touch: the drafting half of a session.

    Attributes:
        model: the draft behind a meter.
        text: the prompt, what the drafter was told is committed, and what it drafts on its own; the
            drafter keeps it. Rows of its states stand for these tokens.
        prompt_length: tokens of the prompt.
        chooser: how draft tokens are chosen; its positions are those of the output.
        held: the states handed out, each with its model.
    """

    def __init__(
        self,
        request: DraftRequest,
        model: Decoder,
        allocate_state: Callable[[Decoder, int], State],
        chooser: Chooser | None = None,
    ) -> None:
        self.device = model.device
        self.meter = Meter(model.device)
        self.model = Metered(model, self.meter, role="draft", worker=DRAFTER)
        self.text = list(request.ids)
        self.prompt_length = len(request.ids)
        self.chooser = chooser or _create_chooser(request, model.device)
        self.states: list[tuple[Decoder, State]] = []
        self._allocate_state = allocate_state
        self._source = request.source

    def new_state(self, model: Metered, slack: int = 0) -> State:
        """A cleared state, preallocated for the longest sequence of the run plus `slack` rows."""
        state = self._allocate_state(model.decoder, slack)
        if self._source is not None:
            model.decoder.attach(state, self._source)
        self.states.append((model.decoder, state))
        return state

    def pending_tokens(self, length: int) -> Tokens:
        """The tokens of the text that a state of `length` rows has not seen."""
        return Tokens(host.ids([self.text[length:]], self.device))

    @property
    def position(self) -> int:
        """Index in the output of the token that follows the text."""
        return len(self.text) - self.prompt_length


@renamed_members(desk="session")
class Drafter(ABC):
    """The draft's side of a parallel method: from orders to answers, without input or output of
    its own, so that it runs wherever a worker is.

    Its class stands at the top level of a module, so that another process can import it. What it
    answers must follow from the prompt, the orders and `desk.chooser` alone.
    """

    def __init__(self, session: DraftSession, params: MethodParams) -> None:
        self.session = session
        self.params: Any = params

    def start(self) -> None:
        """A new prompt: prefill the draft. `desk.text` holds the prompt."""

    @abstractmethod
    def handle(self, message: Message) -> Message | None:
        """Carry out an order; returns the answer, None where none is due."""


def _create_chooser(request: DraftRequest, device: torch.device) -> Chooser:
    """With the target's noise, and with draws of the drafter's own."""
    who = (request.sampling.seed, request.prompt_id, request.turn)
    return Chooser(
        request.sampling,
        SeededRandom(*who, request.pass_, device, worker=DRAFTER),
        Noise(*who, request.vocab_size, device),
        request.vocab_size,
    )
