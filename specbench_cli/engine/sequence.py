"""Text of one request: the prompt and the committed tokens with their times.

Also the rule that ends an output, and recorded outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, device

from specbench_cli.engine import host
from specbench_cli.engine.types import Origin, Outcome, Tokens
from specbench_cli.former_names import renamed_members

# ---- stop rule ----------------------------------------------------------------------------------

Finish = Literal["eos", "stop", "length"]


@renamed_members(cut="truncate")
@dataclass(frozen=True, slots=True)
class StopRule:
    """Rule that ends an output.

    eos: Token ids that end the output. Such an id is kept.
    max_new_tokens: Maximum number of output tokens.
    strings: Stop strings. The token that completes one of them is kept.
    decode: Function that returns the text of the output's ids, to search it for stop strings.
    """

    eos: frozenset[int]
    max_new_tokens: int
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; prefill alone gives 1")

    def truncate(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, Finish | None]:
        """Return how many of the `new` tokens to keep, and the reason why the output ends.

        The reason is None if the output does not end.
        """
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


# ---- replay -------------------------------------------------------------------------------------

PAST_END = -1
"""Choice after the end of a recorded output. It equals no draft token, so such tokens are rejected.
It is never committed, because the stop rule ends the output first."""


class RecordedOutput:
    """Output of an earlier run, whose tokens replace the target's choices in a replay.

    Args:
        ids: Tokens of the output.
        device: Device of the tensors that `choices` returns.
    """

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self._ids = host.ids([*ids, PAST_END], device)

    def choices(self, first: int, depths: Sequence[int]) -> Tensor:
        """Return the recorded tokens [n] at the output indices first + depth.

        After the end of the output, the result is `PAST_END`.
        """
        end = self._ids.shape[0] - 1
        at = host.ids([min(first + depth, end) for depth in depths], self._ids.device)
        return self._ids[at]


# ---- the text -----------------------------------------------------------------------------------


class Text:
    """Text of a request. Only the function `append` extends the text, and it applies the stop rule.

    Args:
        ids: Token ids of the prompt.
        stop: The rule that ends the output.
        now_ns: Function that returns the time in ns.

    Attributes:
        tokens: Token ids of the prompt, then the committed ids. Read only.
        prompt_length: Number of prompt tokens.
        origin: For each committed token, whether it was drafted or chosen by the target.
        finish: Reason why the output ended. None while it has not ended.
        last_choice: Last token that verification chose, as a number and as a tensor [1] on the
            device. If the text ends with this token, no copy to the device is needed.
        started_ns, first_ns, last_ns: Start of the timer, and times of the first and last token.
    """

    def __init__(
        self,
        ids: Sequence[int],
        stop: StopRule,
        device: device,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.stop, self.device, self._now = stop, device, now_ns
        self.tokens = list(ids)
        self.prompt_length = len(ids)
        self.origin: list[Origin] = []
        self.finish: Finish | None = None
        self.last_choice: tuple[int, Tensor] | None = None
        self._prompt = host.ids(ids, device)
        self._last_token: Tensor | None = self._prompt[-1:]
        self.start()

    def start(self) -> None:
        """Start the timer."""
        self.started_ns = self.first_ns = self.last_ns = self._now()

    @property
    def position(self) -> int:
        """Index of the next output token. It equals the number of output tokens so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def output(self) -> Sequence[int]:
        """Token ids of the output so far."""
        return self.tokens[self.prompt_length :]

    @property
    def last_token(self) -> Tensor:
        """Last token of the text, as a tensor [1] on the device."""
        if self._last_token is None:
            self._last_token = host.ids(self.tokens[-1:], self.device)
        return self._last_token

    @property
    def max_draft_length(self) -> int:
        """Maximum useful draft length.

        It is the remaining token budget minus the token that verification adds.
        """
        return self.stop.max_new_tokens - self.position - 1

    @property
    def steps(self) -> int:
        """Number of steps, including prefill. Each step commits exactly one token that was not
        drafted.
        """
        return sum(origin not in ("accepted", "relaxed") for origin in self.origin)

    def pending_tokens(self, length: int) -> Tokens:
        """Return the tokens of the text that a model state with `length` rows has not processed."""
        if not self.position:
            return Tokens(self._prompt[None, length:])
        if length == len(self.tokens) - 1:
            return Tokens(self.last_token[None])
        return Tokens(host.ids(self.tokens[length:], self.device)[None])

    def append(self, outcome: Outcome) -> Outcome:
        """Append the tokens of a verification outcome, up to the end of the output.

        If the output ends, set `finish`.
        """
        kept, self.finish = self.stop.truncate(self.output, outcome.committed)
        self.tokens.extend(outcome.committed[:kept])
        self.origin.extend(outcome.origin[:kept])
        # If the text ends with the token that verification chose, reuse the copy of this token on
        # the device.
        ends_with_choice = self.last_choice is not None and self.last_choice[0] == self.tokens[-1]
        self._last_token = (
            self.last_choice[1] if self.last_choice is not None and ends_with_choice else None
        )
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
