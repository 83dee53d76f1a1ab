"""What a comparison sees of one output: a digest of its ids, its counters, its times.

No class has slots: hundreds of thousands of them come from other processes, and unpickling one that
is frozen and has slots sets every field by a call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import NamedTuple

PromptTurn = tuple[str, int]
"""A prompt's turn."""


class PairKey(NamedTuple):
    """What two cells must share to be a pair."""

    prompt_id: str
    turn: int
    label: str
    pass_: int
    seed: int

    @property
    def prompt_turn(self) -> PromptTurn:
        """Return the prompt's turn."""
        return self.prompt_id, self.turn


class RowKey(NamedTuple):
    """A row of the comparison: a method's cells of one task."""

    task: str
    label: str


@dataclass(frozen=True)
class Counters:
    """Sums over a cell's steps; null what the method cannot see (peers).

    committed: tokens after the first. levels, nodes: drafted. tested, accepted: levels.
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
        """The sums of cells; null where one is."""
        columns = ([getattr(each, f.name) for each in counters] for f in fields(cls))
        return cls(*(None if None in column else sum(column) for column in columns))

    @property
    def contradiction(self) -> str | None:
        """What cannot be of these counts of one output; null where nothing."""
        if self.steps is None or self.n_tokens is None:
            return None
        counts = [self.accepted or 0, self.tested or 0, self.levels or 0, self.nodes or 0]
        if counts != sorted(counts):
            return "not accepted <= tested <= levels <= nodes"
        if self.committed != self.n_tokens - 1 or (self.committed or 0) < (self.accepted or 0):
            return "committed tokens are not all but the first, the accepted ones among them"
        if self.target_forwards is not None and self.target_forwards <= self.steps:
            return "fewer target forwards than steps and prefill take"
        return None

    @property
    def mat(self) -> float | None:
        """Mean accepted tokens: committed per step; null where there is no step."""
        return self.committed / self.steps if self.committed is not None and self.steps else None


@dataclass(frozen=True)
class Times:
    """Of one cell, in nanoseconds; null what the method cannot see.

    decode, draft, verify, host, total: as in the records; peers say nothing but total.
    draft_forward, verify_forward: of the forwards that draft and that verify, mean over their kinds
    (same model and layers, same number of tokens) of a kind's median, weighted by count. Vanilla's
    verify_forward is its forward over one token. draft_fastest: draft_forward with each kind's
    fastest in place of its median; null in baselines of older versions.
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
    """One output.

    ids: the first 16 hexadecimal digits of the SHA-256 of its token ids. verdict: its kind; null
    where it failed, as ids are. times: null where it failed or was void.
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
        """The row that it belongs to."""
        return RowKey(self.task, self.key.label)
