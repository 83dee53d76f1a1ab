"""Draft heads whose logits come from a table (`audit.models.table`).

The features that a head reads decide which entry of the table it returns. So a method that gives a
head wrong features gets wrong drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from specbench_cli.audit.models.table import TableDecoder, TableState, continue_greedily
from specbench_cli.engine.models.artifact import Artifact, ArtifactSpec
from specbench_cli.engine.models.decoder import Decoder, ModelInput
from specbench_cli.engine.models.head import (
    NORMED,
    FeatureHead,
    Head,
    LevelOutput,
    LookAhead,
    SequentialHead,
)
from specbench_cli.engine.types import Features, ModelOutput


class TableHead(TableDecoder, Head):
    """A recurrent draft head (`Head`) whose logits are entries of a table.

    Row i reads token i + 1, with the target's features of token i or, during drafting, the head's
    own features. Any other features make the head read another previous token. So stale or
    misplaced features change the logits.

    Args:
        table: table [V, V, V] of the draft's logits.
        target: table [V, V, V] of the target's logits, which are the features.
    """

    reads = Features
    captured_layers = (NORMED,)

    def __init__(self, table: Tensor, target: Tensor) -> None:
        super().__init__("head", table)
        self.target = target

    def previous_token(self, state: TableState, row: int) -> int:
        """Return the id of the token before a row's token.

        It comes from the parent row. For row 0, it comes from the features.
        """
        _, _, parent, features, _ = state.rows[row]
        assert features is not None
        if parent < 0:
            before = _find_row(self.target[0], features)
        else:
            at = state.rows[parent].previous_id, self.read_token(state, parent)
            due = any(torch.equal(features, table[at]) for table in (self.target, self.table))
            before = at[1] if due else (at[1] + 1) % self.vocab_size
            state.misread += not due
        state.rows[row] = state.rows[row]._replace(previous_id=before)
        return before


class TableBlockHead(TableHead):
    """A parallel draft head: it drafts a block of tokens in one forward over mask tokens.

    The logits of a mask are those of the table after the greedy tokens of the masks before it.

    Attributes:
        predicts_own_position: see `Head`.
        block: number of positions of a block.
        mask: an id that no text contains.
    """

    parallel = True
    block = 6

    def __init__(self, table: Tensor, target: Tensor) -> None:
        super().__init__(table, target)
        self.mask = self.vocab_size

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`. Logits belong to the rows of the last token and of the masks."""
        x, logits_at = model_input.x, model_input.logits_at
        assert isinstance(x, Features)
        n, held = x.rows.shape[1], cast(TableState, model_input.state)
        read = Features(x.ids[:, :n], x.rows)
        out = super().execute(model_input._replace(x=read, logits_at=None))
        row = len(held.rows) - 1
        before, last = self.previous_token(held, row), self.read_token(held, row)
        logit_rows = [out.hidden[0, -1]]
        for token in x.ids[0, n:].tolist():
            if not self.predicts_own_position:
                before, last = last, int(logit_rows[-1].argmax())
            logit_rows.append(self.table[before, last if token == self.mask else token])
            if self.predicts_own_position:
                before, last = last, int(logit_rows[-1].argmax())
        logits = torch.stack(logit_rows)[None]
        return ModelOutput(
            None if logits_at is None else logits[:, -1:] if logits_at == "last" else logits,
            out.hidden,
        )


class _CountedHead(FeatureHead):
    """A head that counts its forwards, including forwards that the engine does not measure."""

    def __call__(self, *rows: Any, **named: Any) -> Any:
        """See `FeatureHead`."""
        return nn.Module.__call__(self, *rows, **named)


class TableFeatureHead(_CountedHead):
    """Mixin that replaces the logits of a stateless head (such as Medusa) by entries of a table.

    The features are a row of the target's table, which identifies the last two tokens and so the
    target's greedy next token. From there the draft's table continues greedily. The head's own
    output is used if it does not have the shape [levels, n, V].

    Attributes:
        tables: tables of the draft and of the target.
        exact: True if all outputs so far came from the table.
    """

    tables: tuple[Tensor, Tensor]
    exact = True

    def forward(self, rows: Tensor, *more: Any, **named: Any) -> Any:
        """See the class."""
        self.__dict__["ran"] += 1  # also counts calls that bypass the meter
        logits: Any = super().forward(rows, *more, **named)
        if not isinstance(logits, Tensor) or logits.shape[1:] != (len(rows), self.vocab_size):
            self.exact = False
            return logits
        draft, target = self.tables
        ways = [
            _continue_greedily(draft, target, target, row[-self.vocab_size :], len(logits))
            for row in rows
        ]
        return torch.stack(ways, 1)


class TableLookAhead(_CountedHead, LookAhead):
    """Mixin for a `LookAhead` head, whose rows pass through the target's own layers.

    The rows are logits of the draft's table. `TableDecoder` returns them unchanged if their mask
    and positions are right. If the rows enter before the first layer, they depend on one token
    only. Then the target computes the logits itself (`TableDecoder.look_ahead_table`).

    Attributes:
        tables: tables of the draft and of the target.
        input_table: table of the rows that enter the layer.
    """

    tables: tuple[Tensor, Tensor]
    input_table: Tensor

    def forward(self, rows: Tensor) -> Tensor:
        """See the class."""
        self.__dict__["ran"] += 1  # also counts calls that bypass the meter
        if not self.layer:
            return torch.full((len(rows), self.sizes["levels"], self.vocab_size), -1.0)
        ways = [
            _continue_greedily(*self.tables, self.input_table, row, self.sizes["levels"])
            for row in rows
        ]
        return torch.stack(ways)


class TableSequentialHead(_CountedHead, SequentialHead):
    """Mixin for a sequential head (such as Hydra) whose logits are entries of a table.

    Its rows identify the last two tokens of the text or of a tree node. Stale or misplaced rows, or
    the token of another node, give other logits.

    Attributes:
        tables: tables of the draft and of the target.
    """

    tables: tuple[Tensor, Tensor]

    def forward(self, rows: Tensor, ids: Tensor, level: int) -> LevelOutput:  # type: ignore[override]
        """See the class."""
        self.__dict__["ran"] += 1  # also counts calls that bypass the meter
        draft, target = self.tables
        known = (draft if level else target).flatten(0, 1)
        lasts = [_find_row(known, row[-self.vocab_size :]) % self.vocab_size for row in rows]
        logits = draft[torch.tensor(lasts), ids]
        return LevelOutput(logits, logits)


class TableParallel(TableDecoder):
    """A table draft model that drafts several tokens in one forward over mask tokens.

    The logits of a mask are those after the greedy tokens of the masks before it.

    Attributes:
        mask: an id that no text contains.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__("head", table)
        self.mask = self.vocab_size

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`."""
        logits_at = model_input.logits_at
        out = super().execute(model_input._replace(logits_at=None))
        rows, held = out.hidden[0].clone(), cast(TableState, model_input.state)
        start, last_two = len(held.rows) - len(rows), (0, 0)
        for at, row in enumerate(range(start, len(held.rows))):
            if held.rows[row].id != self.mask:
                last_two = self.previous_token(held, row), self.read_token(held, row)
            else:
                last_two = last_two[1], int(self.table[last_two].argmax())
                rows[at] = self.table[last_two]
        logits = (
            None if logits_at is None else rows[None, -1:] if logits_at == "last" else rows[None]
        )
        return ModelOutput(logits, rows[None])


def make_table_artifact(decoders: Mapping[str, Decoder], wanted: ArtifactSpec) -> Any:
    """Return a head or another artifact of a method, with outputs from the draft's table.

    Args:
        decoders: table decoders by role, "target" and "draft".
        wanted: specification of the artifact. Kinds without a table version get random weights.
    """
    kind: type[Artifact] = wanted.kind
    if issubclass(kind, FeatureHead):
        target = cast(TableDecoder, decoders["target"])
        head = copy(_make_table_head(kind, target.vocab_size, target.n_layers))
        head.target, head.tables = target, _tables(decoders)
        if isinstance(head, TableLookAhead):
            head.input_table, target.look_ahead_table = target.layers[0], head.tables[0]
        return head
    if issubclass(kind, Head):
        if not kind.parallel:
            return TableHead(*_tables(decoders))
        own = {"predicts_own_position": kind.predicts_own_position}
        return type("TableBlockHead", (TableBlockHead,), own)(*_tables(decoders))
    return (
        TableParallel(_tables(decoders)[0]) if issubclass(kind, Decoder) else kind.random(decoders)
    )


@cache
def _make_table_head(kind: type[FeatureHead], vocab_size: int, n_layers: int) -> Any:
    """Return a head for a vocabulary size and a number of target layers.

    Heads are cached, because creating modules would take most of the time of a short audit case.
    """
    mixed: type[FeatureHead] = TableFeatureHead
    if issubclass(kind, LookAhead):
        mixed = TableLookAhead
    elif issubclass(kind, SequentialHead):
        mixed = TableSequentialHead
    table = torch.zeros((), dtype=torch.float64).expand((vocab_size,) * 3)
    target = TableDecoder("target", table, table if n_layers > 1 else None, inner=n_layers - 2)
    head: type[FeatureHead] = type(kind.__name__, (mixed, kind), {})
    return head.random({"target": target, "draft": TableDecoder("draft", table)})


def _tables(decoders: Mapping[str, Decoder]) -> tuple[Tensor, Tensor]:
    """Return the tables of the draft and of the target."""
    draft, target = (cast(TableDecoder, decoders[role]).table for role in ("draft", "target"))
    return draft, target


def find_wrong_features(state: Any, text: Sequence[int], target: Tensor) -> str | None:
    """Return a description of wrong features in a head's state, or None if all are right.

    Args:
        state: a `TableState` with the ids of the text.
        text: committed ids.
        target: table whose rows the features should be.
    """
    for row, held in enumerate(state.rows):
        before = text[row - 1] if row else 0
        if held.features is not None and not torch.equal(held.features, target[before, text[row]]):
            return f"row {row} was made of features that are not the target's of token {row}"
    return None


def _continue_greedily(
    draft: Tensor, target: Tensor, known: Tensor, row: Tensor, levels: int
) -> Tensor:
    """Return the logits [levels, V] of the tokens after the target's greedy next token.

    Args:
        known: table that contains the row.
        row: features [V] that identify the last two tokens.
    """
    return continue_greedily(
        draft, target, divmod(_find_row(known.flatten(0, 1), row), draft.shape[-1]), levels
    )


def _find_row(rows: Tensor, row: Tensor) -> int:
    """Return the index of `row` among rows [n, V]. Return the last index if `row` is not among
    them.
    """
    same = (rows == row).all(-1).nonzero()
    return int(same[0]) if len(same) else rows.shape[0] - 1
