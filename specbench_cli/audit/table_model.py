"""Models that are tables: small enough for every outcome of a decoding to be walked.

The logits of a row are an entry of a table: by the token before it and by its own. A vocabulary of
3 to 5 tokens makes the law of a few tokens a list of a few hundred numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specbench_cli.engine.decoder import Decoder, LogitsAt, State
from specbench_cli.engine.types import Embeds, Hidden, Out, Tokens


class TableState:
    """Of every row fed: its id, its position, and the row that it follows (-1: none)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[tuple[int, int, int]] = []
        self.kept = 0

    @property
    def ids(self) -> list[int]:
        """The id of each row."""
        return [token for token, _, _ in self.rows]

    @property
    def positions(self) -> list[int]:
        """The position that each row was computed at."""
        return [position for _, position, _ in self.rows]

    def length(self, seq: int = 0, layer: int = 0) -> int:
        """See `State`."""
        return len(self.rows)

    def append(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Write rows. Raises ValueError where there is no room for them."""
        start = len(self.rows)
        if start + len(rows) > self.capacity:
            raise ValueError(f"{len(rows)} rows do not fit behind {start} of {self.capacity}")
        self.rows.extend(rows)

    def commit(self, seq: int, path: Sequence[int]) -> None:
        """See `State`."""
        written = self.rows[self.kept :]
        for at, row in enumerate(path):
            token, position, _ = written[row]
            self.rows[self.kept + at] = token, position, self.kept + at - 1
        self.kept += len(path)
        del self.rows[self.kept :]

    def truncate(self, seq: int, n: int, layers: range | None = None) -> None:
        """See `State`."""
        del self.rows[n:]
        self.kept = min(self.kept, n)

    def snapshot(self) -> object:
        """See `State`."""
        return list(self.rows), self.kept

    def restore(self, handle: object) -> None:
        """See `State`."""
        rows, self.kept = cast(tuple[list[tuple[int, int, int]], int], handle)
        self.rows = list(rows)

    def clear(self) -> None:
        """See `State`."""
        self.truncate(0, 0)

    @property
    def nbytes(self) -> int:
        """See `State`."""
        return 24 * self.capacity


class TableDecoder(Decoder):
    """Logits are an entry of `table` [V, V, V]: by the token before the last, then by the last.

    What it reads is what its state holds, so a stale or missing row changes the logits, as does a
    row at a wrong position: it reads as another token. The first row of a sequence has no token
    before it and takes id 0 in its place; a tree's row follows the last row that its mask shows.
    """

    def __init__(self, name: str, table: Tensor) -> None:
        self.name = name
        self.table = table
        self.vocab_size = table.shape[-1]
        self.n_layers = self.hidden_size = 1
        self.max_positions = 1 << 20
        self.device = table.device
        self.dtype = table.dtype
        self.weight_bytes = table.nbytes

    def new_state(self, capacity: int, n_seqs: int = 1) -> TableState:
        """See `Decoder`."""
        return TableState(capacity)

    def forward(
        self,
        x: Tokens | Embeds | Hidden,
        state: State,
        *,
        seqs: Sequence[int] | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        layers: tuple[int, int] | None = None,
        skip: frozenset[int] = frozenset(),
        logits_at: LogitsAt = "last",
        taps: Sequence[int] = (),
    ) -> Out:
        """See `Decoder`; one sequence of ids at a time."""
        if not isinstance(x, Tokens) or x.ids.shape[0] != 1 or not isinstance(state, TableState):
            raise ValueError("a table reads the ids of one sequence, on a state of its own")
        start, n = state.length(), x.ids.shape[1]
        at = range(start, start + n) if positions is None else positions[0].tolist()
        follows = range(start - 1, start + n - 1) if mask is None else _parents(mask, start)
        state.append(list(zip(x.ids[0].tolist(), at, follows, strict=True)))
        hidden = self.table.new_zeros(1, n, 1)
        if logits_at is None:
            return Out(None, hidden)
        rows = list(range(start, start + n))
        if isinstance(logits_at, Tensor):
            rows = [rows[row] for row in logits_at.tolist()]
        elif logits_at == "last":
            rows = rows[-1:]
        last = [self._read(state, row) for row in rows]
        before = [self._read(state, state.rows[row][2]) for row in rows]
        return Out(self.table[before, last][None], hidden)

    def _read(self, state: TableState, row: int) -> int:
        """The token of a row, shifted by how far its position is off."""
        if row < 0:
            return 0
        token, position, follows = state.rows[row]
        due = 0 if follows < 0 else state.rows[follows][1] + 1
        return (token + position - due) % self.vocab_size


def _parents(mask: Tensor, start: int) -> list[int]:
    """The last row of the state that each new row sees, itself left out; -1 for none."""
    n, width = mask.shape
    first = start + n - width  # the row that column 0 stands for
    found = []
    for row, seen in enumerate(mask.tolist(), start=start):
        before = [first + column for column in range(row - first) if seen[column]]
        found.append(before[-1] if before else first - 1)
    return found


Pair = tuple[Tensor, Tensor]
"""The tables of a target and of its draft."""

KINDS = ("peaked", "flat", "near", "equal", "disjoint")
"""How a pair's laws lie to each other."""


def random_table(vocab: int, seed: int, scale: float = 1.0) -> Tensor:
    """A table [V, V, V] of float64 logits; the larger `scale`, the more peaked the laws."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64)


def successor_table(follow: Sequence[int]) -> Tensor:
    """A table whose greedy choice after any token t is `follow[t]`, by a gap of 10."""
    vocab = len(follow)
    table = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    for last, following in enumerate(follow):
        table[:, last, following] = 10.0
    return table


def pair(kind: str, vocab: int = 3, seed: int = 21) -> Pair:
    """Two tables by how they lie to each other, one of `KINDS`.

    "disjoint": the draft can only say tokens of the vocabulary's upper half, the target only those
    of its lower half, so that no draft token can stand.
    """
    scale = {"peaked": 4.0, "flat": 0.2}.get(kind, 1.5)
    target, draft = (random_table(vocab, s, scale) for s in (seed, seed + 1))
    if kind == "near":
        draft = target + 0.3 * draft
    if kind == "equal":
        draft = target.clone()
    if kind == "disjoint":
        draft[..., : vocab // 2] = target[..., vocab // 2 :] = -math.inf
    return target, draft


def settled(tables: Pair, prompt: Sequence[int], token: int) -> Pair:
    """The pair with a target that is sure of the token after `prompt`: fewer outcomes to walk."""
    target = tables[0].clone()
    before, last = prompt[-2:]
    target[before, last] = -math.inf
    target[before, last, token] = 0.0
    return target, tables[1]


def rows_out_of_place(state: Any, text: Sequence[int]) -> str | None:
    """What is wrong with a table's state, which should hold a prefix of the text; None if nothing.

    Args:
        state: a `TableState`.
        text: the committed ids.
    """
    if state.length() > len(text):
        return f"{state.length()} rows for {len(text)} committed tokens"
    for row, (held, truth) in enumerate(zip(state.ids, text, strict=False)):
        if held != truth:
            return f"row {row} holds token {held} where the text has {truth}"
    for row, position in enumerate(state.positions):
        if position != row:
            return f"row {row} was computed at position {position}"
    return None
