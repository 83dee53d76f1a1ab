"""Base class of drafters, and the session that a drafter uses.

A drafter is the part of a parallel method that drafts while the target verifies.
"""

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
"""Worker indices in traces."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Description of a request for a drafter. It can be sent to another process.

    Attributes:
        capacity: Number of rows that the drafter's model states need.
        vocab_size: Vocabulary size of the target.
        source: Further input, such as encoder ids or images.
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
    """Interface through which a drafter drafts for one request.

    Attributes:
        model: The draft model, with metered forwards.
        text: The prompt, the committed tokens that the drafter received, and the drafter's own
            draft tokens. The drafter must update it. The rows of its states belong to these tokens.
        prompt_length: Number of prompt tokens.
        chooser: Object that chooses draft tokens. It counts positions from the start of the output.
        states: Allocated model states, each with its model.
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
        """Return an empty state for the longest sequence of the run plus `slack` rows."""
        state = self._allocate_state(model.decoder, slack)
        if self._source is not None:
            model.decoder.attach(state, self._source)
        self.states.append((model.decoder, state))
        return state

    def pending_tokens(self, length: int) -> Tokens:
        """Return the tokens of the text that a model state with `length` rows has not processed."""
        return Tokens(host.ids([self.text[length:]], self.device))

    @property
    def position(self) -> int:
        """Index in the output of the token that follows the text."""
        return len(self.text) - self.prompt_length


@renamed_members(desk="session")
class Drafter(ABC):
    """The drafting part of a parallel method. It handles orders of the method and returns answers.

    Answers must depend only on the prompt, the orders and `session.chooser`, so that the drafter
    can run in any worker. Define the class at the top level of a module, so that another process
    can import it.
    """

    def __init__(self, session: DraftSession, params: MethodParams) -> None:
        self.session = session
        self.params: Any = params

    def start(self) -> None:
        """Prefill the draft model with the prompt in `session.text`."""

    @abstractmethod
    def handle(self, message: Message) -> Message | None:
        """Handle an order of the method. Return the answer, or None if the order has no answer."""


def _create_chooser(request: DraftRequest, device: torch.device) -> Chooser:
    """Return a chooser that shares the target's noise, but makes its own random draws."""
    who = (request.sampling.seed, request.prompt_id, request.turn)
    return Chooser(
        request.sampling,
        SeededRandom(*who, request.pass_, device, worker=DRAFTER),
        Noise(*who, request.vocab_size, device),
        request.vocab_size,
    )
