"""A draft head that is a table: it notices features that are not those of the token before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specbench_cli.audit.table_model import TableDecoder, TableState
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.head import NORMED, Head, Trained
from specbench_cli.engine.types import Features


class TableHead(TableDecoder, Head):
    """A draft head that says what a draft with its table would.

    Row i holds the token i + 1 of the text and should come beside the target's row of token i, or,
    in a draft, the head's own of it. Beside any other row the token before reads as another one:
    stale or displaced features change the logits.

    Args:
        target: the table [V, V, V] whose rows its features are.
    """

    reads = Features
    taps = (NORMED,)

    def __init__(self, table: Tensor, target: Tensor) -> None:
        super().__init__("head", table)
        self.target = target

    def before(self, state: TableState, row: int) -> int:
        """The token before, which the row that it follows holds; row 0 has its features alone."""
        _, _, follows, features, _ = state.rows[row]
        assert features is not None
        if follows < 0:
            before = _place(self.target[0], features)
        else:
            at = state.rows[follows].before, self.read(state, follows)
            due = any(torch.equal(features, table[at]) for table in (self.target, self.table))
            before = at[1] if due else (at[1] + 1) % self.vocab_size
        state.rows[row] = state.rows[row]._replace(before=before)
        return before


def make_on_tables(decoders: Mapping[str, Decoder], wanted: Trained) -> Any:
    """A trained module for a run on tables: any head speaks from the draft's table.

    Args:
        decoders: tables by role, "target" and "draft".
    """
    if not issubclass(wanted.kind, Head):
        return wanted.kind.random(decoders)
    target, draft = (cast(TableDecoder, decoders[role]).table for role in ("target", "draft"))
    return TableHead(draft, target)


def features_out_of_place(state: Any, text: Sequence[int], target: Tensor) -> str | None:
    """What is wrong with the features that a head's state was made of; None if nothing.

    Args:
        state: a `TableState`, whose ids are those of the text.
        text: the committed ids.
        target: the table whose rows they should be, each of the token before.
    """
    for row, held in enumerate(state.rows):
        before = text[row - 1] if row else 0
        if held.features is not None and not torch.equal(held.features, target[before, text[row]]):
            return f"row {row} was made of features that are not the target's of token {row}"
    return None


def _place(rows: Tensor, row: Tensor) -> int:
    """Which of the rows [V, V] it is; the last one if none."""
    same = (rows == row).all(-1).nonzero()
    return int(same[0]) if len(same) else rows.shape[0] - 1
