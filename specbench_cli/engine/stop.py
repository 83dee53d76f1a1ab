"""The one stop rule: the first EOS, the first completed stop string, or the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
            if self.strings and self._completes([*output, *new[:kept]]):
                return kept, "stop"
            if len(output) + kept == self.max_new_tokens:
                return kept, "length"
        return len(new), None

    def _completes(self, ids: list[int]) -> bool:
        assert self.decode is not None, "stop strings need a decoder of ids"
        text = self.decode(ids)
        return any(string in text for string in self.strings)
