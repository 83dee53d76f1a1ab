"""The text of one request: its prompt, what was committed to it, when, and why it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, device

from specbench_cli.engine import host
from specbench_cli.engine.types import Origin, Outcome, Tokens

# ---- where an output ends -----------------------------------------------------------------------

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class StopRule:
    """When an output ends.

    eos: ids that end it (kept); max_new_tokens: the budget, reached exactly; strings: texts that
    end it with the token completing them (kept), looked for in `decode` of the output's ids.
    """

    eos: frozenset[int]
    max_new_tokens: int
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; prefill alone gives 1")

    def cut(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, Finish | None]:
        """How many of the `new` tokens are kept after `output`, and why the output ends there, if
        it does."""
        for kept, token in enumerate(new, start=1):
            if token in self.eos:
                return kept, "eos"
            if self.strings and self._completes_stop_string([*output, *new[:kept]]):
                return kept, "stop"
            if len(output) + kept == self.max_new_tokens:
                return kept, "length"
        return len(new), None

    def _completes_stop_string(self, ids: list[int]) -> bool:
        assert self.decode is not None, "stop strings need a decoder of ids"
        text = self.decode(ids)
        return any(string in text for string in self.strings)


# ---- an output that is walked again -------------------------------------------------------------

PAST_END = -1
"""What is recorded behind the last token: no draft token equals it, and it is never committed,
since the stop rule ends the output before it."""


class RecordedOutput:
    """An output to be walked again.

    Args:
        ids: its tokens, from output index 0.
        device: where choices are wanted.
    """

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self._ids = host.ids([*ids, PAST_END], device)

    def choices(self, first: int, depths: Sequence[int]) -> Tensor:
        """The tokens [n] recorded at output indices first + depth; `END` beyond the last."""
        end = self._ids.shape[0] - 1
        at = host.ids([min(first + depth, end) for depth in depths], self._ids.device)
        return self._ids[at]


# ---- the text -----------------------------------------------------------------------------------


class Text:
    """Grows by `append` alone, which is where the stop rule cuts.

    Args:
        ids: the prompt's.
        stop: where the output ends.
        now: nanoseconds of the clock that it is timed by.

    Attributes:
        tokens: all ids, the prompt's and the committed ones; read only.
        prompt_length: how many of them are the prompt's.
        origin: how each committed token came to be.
        finish: why the output ended; None while it has not.
        decided: a token that verification chose last, as the host knows it and as it is on the
            device, [1]: if the text then ends with it, no id has to travel there again.
        started_ns, first_ns, last_ns: when the timer started, and when the first and the latest
            tokens were there.
    """

    def __init__(
        self,
        ids: Sequence[int],
        stop: StopRule,
        device: device,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.stop, self.device, self._now = stop, device, now
        self.tokens = list(ids)
        self.prompt_length = len(ids)
        self.origin: list[Origin] = []
        self.finish: Finish | None = None
        self.last_choice: tuple[int, Tensor] | None = None
        self._prompt = host.ids(ids, device)
        self._end: Tensor | None = self._prompt[-1:]
        self.start()

    def start(self) -> None:
        """Start the timer."""
        self.started_ns = self.first_ns = self.last_ns = self._now()

    @property
    def position(self) -> int:
        """Index of the next output token: how many there are."""
        return len(self.tokens) - self.prompt_length

    @property
    def output(self) -> Sequence[int]:
        """The committed ids."""
        return self.tokens[self.prompt_length :]

    @property
    def end(self) -> Tensor:
        """[1], the last token, the prompt's if nothing was committed, on the device."""
        if self._end is None:
            self._end = host.ids(self.tokens[-1:], self.device)
        return self._end

    @property
    def max_draft_length(self) -> int:
        """Most draft levels of use: the remaining budget, less the token that verification adds."""
        return self.stop.max_new_tokens - self.position - 1

    @property
    def steps(self) -> int:
        """Steps made, prefill being one: each ended in a token that was not drafted."""
        return sum(origin not in ("accepted", "relaxed") for origin in self.origin)

    def pending_tokens(self, length: int) -> Tokens:
        """The tokens that a state of `length` rows has not seen."""
        if not self.position:
            return Tokens(self._prompt[None, length:])
        if length == len(self.tokens) - 1:
            return Tokens(self.end[None])
        return Tokens(host.ids(self.tokens[length:], self.device)[None])

    def append(self, outcome: Outcome) -> Outcome:
        """Take an outcome as far as the stop rule lets it; `finish` is set if the output ends."""
        kept, self.finish = self.stop.cut(self.output, outcome.committed)
        self.tokens.extend(outcome.committed[:kept])
        self.origin.extend(outcome.origin[:kept])
        # Whoever made the outcome, the text ends with its last token.
        known = self.last_choice is not None and self.last_choice[0] == self.tokens[-1]
        self._end = self.last_choice[1] if self.last_choice is not None and known else None
        self.last_ns = self._now()
        if self.position == kept:  # these are the first tokens
            self.first_ns = self.last_ns
        if kept == len(outcome.committed):
            return outcome
        return Outcome(
            path=outcome.path[:kept],
            committed=outcome.committed[:kept],
            origin=outcome.origin[:kept],
            tested=min(outcome.tested, kept),
        )
