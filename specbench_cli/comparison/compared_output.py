"""An output in a comparison: a digest of its token ids, its counters and its times.

The classes have no slots, because hundreds of thousands of objects come from other processes.
Unpickling a frozen class with slots calls a setter for every field.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import NamedTuple

PromptTurn = tuple[str, int]
"""Prompt id and turn."""


class PairKey(NamedTuple):
    """Key that two outputs must share to be compared."""

    prompt_id: str
    turn: int
    label: str
    pass_: int
    seed: int

    @property
    def prompt_turn(self) -> PromptTurn:
        """Prompt id and turn."""
        return self.prompt_id, self.turn


class RowKey(NamedTuple):
    """A row of the comparison: the outputs of one method for one task."""

    task: str
    label: str


@dataclass(frozen=True)
class Counters:
    """Counters of an output, summed over its steps.

    A counter is None if the method does not report it (methods of other programs).

    committed: number of tokens after the first.
    levels, nodes: number of drafted levels and tokens.
    tested, accepted: number of levels.
    """

    n_tokens: int | None
    committed: int | None
    steps: int | None
    levels: int | None
    nodes: int | None
    tested: int | None
    accepted: int | None
    target_forwards: int | None
    draft_forwards: int | None

    @classmethod
    def total(cls, counters: Collection[Counters]) -> Counters:
        """Return the sums over outputs; None if one of them is None."""
        columns = ([getattr(each, f.name) for each in counters] for f in fields(cls))
        return cls(*(None if None in column else sum(column) for column in columns))

    @property
    def contradiction(self) -> str | None:
        """Contradiction between the counters of one output; None if there is none."""
        if self.steps is None or self.n_tokens is None:
            return None
        counts = [self.accepted or 0, self.tested or 0, self.levels or 0, self.nodes or 0]
        if counts != sorted(counts):
            return "not accepted <= tested <= levels <= nodes"
        if self.committed != self.n_tokens - 1 or (self.committed or 0) < (self.accepted or 0):
            return "committed must be n_tokens - 1, and not less than accepted"
        if self.target_forwards is not None and self.target_forwards <= self.steps:
            return "fewer target forwards than prefill and steps need"
        return None

    @property
    def mat(self) -> float | None:
        """Mean accepted tokens: committed tokens per step; None without steps."""
        return self.committed / self.steps if self.committed is not None and self.steps else None


@dataclass(frozen=True)
class Times:
    """Times of an output in nanoseconds; None if the method does not report a time.

    decode, draft, verify, host, total: as in the records; peers report only the total.
    draft_forward, verify_forward: mean over the kinds of forwards that draft or verify (same model,
        layers and number of tokens) of each kind's median, weighted by count. Vanilla's
        verify_forward is its forward over one token.
    draft_fastest: like draft_forward, with each kind's minimum instead of its median. None in
        baselines of older versions.
    """

    decode: int | None
    draft: int | None
    verify: int | None
    host: int | None
    draft_forward: int | None
    verify_forward: int | None
    total: int | None = None
    draft_fastest: int | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedOutput:
    """An output of one method for one prompt.

    key: key that two outputs must share to be compared.
    ids: the first 16 hexadecimal digits of the SHA-256 of its token ids; None if it failed.
    verdict: kind of the verdict; None if it failed.
    times: None if the output failed or its time is noisy.
    """

    key: PairKey
    task: str
    family: str
    cluster: str
    method: str
    sampling: str
    guarantee: str
    peer: bool
    ids: str | None
    counters: Counters
    finish: str
    verdict: str | None
    error: str | None
    times: Times | None

    @property
    def row(self) -> RowKey:
        """Key of the row to which the output belongs."""
        return RowKey(self.task, self.key.label)
