"""An output in a comparison: a digest of its token ids, its counters and its times.

The classes have no slots. Hundreds of thousands of objects are unpickled, and a frozen class with
slots is slow to unpickle: Python calls a setter for every field.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import NamedTuple

PromptTurn = tuple[str, int]
"""Prompt id and turn."""


class PairKey(NamedTuple):
    """Key of an output. Outputs of BASE and NEW are compared if they have the same key."""

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

    A counter is None if the method does not report it, such as a method of another engine.

    committed: number of tokens after the first.
    levels: number of drafted levels. A level is a position after the context; a tree can have
        several tokens at one level.
    nodes: number of drafted tokens.
    tested: number of drafted levels that verification reached.
    accepted: number of drafted levels with an accepted token.
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
        """Return the sums over outputs. A sum is None if the counter of an output is None."""
        columns = ([getattr(each, f.name) for each in counters] for f in fields(cls))
        return cls(*(None if None in column else sum(column) for column in columns))

    @property
    def contradiction(self) -> str | None:
        """Contradiction between the counters of this output; None if there is none."""
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

    Forwards are of the same kind if they have the same model, layers and number of tokens.

    decode, draft, verify, host, total: as in the records. Other engines report only the total.
    draft_forward: mean of the medians of each kind of draft forward, weighted by the number of
        forwards of the kind.
    verify_forward: same as draft_forward, for verify forwards. For vanilla, its forwards over one
        token.
    draft_fastest: like draft_forward, with the minimum of each kind instead of the median. None in
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
    ids: the first 16 hexadecimal digits of the SHA-256 of the output's token ids; None if the
        output failed. verdict: result of the comparison with vanilla's output; None if the output
        failed.
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
        """Key of the row (method and task) to which the output belongs."""
        return RowKey(self.task, self.key.label)
