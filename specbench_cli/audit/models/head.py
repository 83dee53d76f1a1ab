"""Draft heads that are tables: they notice features that are not those of the token before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from specbench_cli.audit.models.table import TableDecoder, TableState, way_of
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
            state.misread += not due
        state.rows[row] = state.rows[row]._replace(before=before)
        return before


class TableBlockHead(TableHead):
    """The same of a parallel head: a mask's row says what a draft with the table would that goes
    its own greedy way from the last token.

    Attributes:
        own_place: as of `Head`. block: places of a block. mask: an id that no text holds.
    """

    parallel = True
    block = 6

    def __init__(self, table: Tensor, target: Tensor) -> None:
        super().__init__(table, target)
        self.mask = self.vocab_size

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`; logits are of the last token's row and of the masks'."""
        x, logits_at = model_input.x, model_input.logits_at
        assert isinstance(x, Features)
        n, held = x.rows.shape[1], cast(TableState, model_input.state)
        read = Features(x.ids[:, :n], x.rows)
        out = super().execute(model_input._replace(x=read, logits_at=None))
        row = len(held.rows) - 1
        before, last = self.before(held, row), self.read(held, row)
        said = [out.hidden[0, -1]]
        for token in x.ids[0, n:].tolist():
            if not self.own_place:
                before, last = last, int(said[-1].argmax())
            said.append(self.table[before, last if token == self.mask else token])
            if self.own_place:
                before, last = last, int(said[-1].argmax())
        logits = torch.stack(said)[None]
        return ModelOutput(
            None if logits_at is None else logits[:, -1:] if logits_at == "last" else logits,
            out.hidden,
        )


class _CountedHead(FeatureHead):
    """A head whose `forward` counts, whoever calls it."""

    def __call__(self, *rows: Any, **named: Any) -> Any:
        """See `FeatureHead`."""
        return nn.Module.__call__(self, *rows, **named)


class TableFeatureHead(_CountedHead):
    """Mixed into a head without a state, it has that say what a draft with the table would.

    Features that are a row of the target's table tell the last two tokens, and what the target says
    next if it is greedy; from there on the draft's table goes its own greedy way. Where the head's
    own answer is not logits [levels, n, V] there is no saying what they are about: it stands.

    Attributes:
        tables: of the draft, and of the target.
        exact: whether all it said was the table's.
    """

    tables: tuple[Tensor, Tensor]
    exact = True

    def forward(self, rows: Tensor, *more: Any, **named: Any) -> Any:
        """See the class."""
        self.__dict__["ran"] += 1  # whoever calls it, and however
        said: Any = super().forward(rows, *more, **named)
        if not isinstance(said, Tensor) or said.shape[1:] != (len(rows), self.vocab_size):
            self.exact = False
            return said
        draft, target = self.tables
        ways = [_way(draft, target, target, row[-self.vocab_size :], len(said)) for row in rows]
        return torch.stack(ways, 1)


class TableLookAhead(_CountedHead, LookAhead):
    """Mixed into a head whose rows go through the target, it has these be what a draft with the
    table would say: a target that is a table lets them pass, if they see and stand where they
    should. What enters its first layer are embeddings, which tell one token and not two: there the
    target makes of these rows what they should be (`TableDecoder.foresees`).

    Attributes:
        tables: of the draft, and of the target; below: of what enters the layer.
    """

    tables: tuple[Tensor, Tensor]
    below: Tensor

    def forward(self, rows: Tensor) -> Tensor:
        """See the class."""
        self.__dict__["ran"] += 1  # whoever calls it, and however
        if not self.layer:
            return torch.full((len(rows), self.sizes["levels"], self.vocab_size), -1.0)
        ways = [_way(*self.tables, self.below, row, self.sizes["levels"]) for row in rows]
        return torch.stack(ways)


class TableSequentialHead(_CountedHead, SequentialHead):
    """Mixed into a head that reads the tokens drafted so far, it has that say what a draft with the
    table would.

    Its rows tell the last two tokens: the target's row those behind which it is, its own rows those
    of the node that left them. With stale or displaced rows, or with another node's token, the
    logits are of another place.

    Attributes:
        tables: of the draft, and of the target.
    """

    tables: tuple[Tensor, Tensor]

    def forward(self, rows: Tensor, ids: Tensor, level: int) -> LevelOutput:  # type: ignore[override]
        """See the class."""
        self.__dict__["ran"] += 1  # whoever calls it, and however
        draft, target = self.tables
        known = (draft if level else target).flatten(0, 1)
        lasts = [_place(known, row[-self.vocab_size :]) % self.vocab_size for row in rows]
        said = draft[torch.tensor(lasts), ids]
        return LevelOutput(said, said)


class TableParallel(TableDecoder):
    """A draft model that reads mask tokens: a mask's row says what a draft with the table would
    that goes its own greedy way from the last token before the masks.

    Attributes:
        mask: an id that no text holds.
    """

    def __init__(self, table: Tensor) -> None:
        super().__init__("head", table)
        self.mask = self.vocab_size

    def execute(self, model_input: ModelInput) -> ModelOutput:
        """See `Decoder`."""
        logits_at = model_input.logits_at
        out = super().execute(model_input._replace(logits_at=None))
        rows, held = out.hidden[0].clone(), cast(TableState, model_input.state)
        start, way = len(held.rows) - len(rows), (0, 0)
        for at, row in enumerate(range(start, len(held.rows))):
            if held.rows[row].id != self.mask:
                way = self.before(held, row), self.read(held, row)
            else:
                way = way[1], int(self.table[way].argmax())
                rows[at] = self.table[way]
        logits = (
            None if logits_at is None else rows[None, -1:] if logits_at == "last" else rows[None]
        )
        return ModelOutput(logits, rows[None])


def make_on_tables(decoders: Mapping[str, Decoder], wanted: ArtifactSpec) -> Any:
    """A trained module for a run on tables: any head or draft speaks from the draft's table.

    Args:
        decoders: tables by role, "target" and "draft".
    """
    kind: type[Artifact] = wanted.kind
    if issubclass(kind, FeatureHead):
        target = cast(TableDecoder, decoders["target"])
        made = copy(_head_of(kind, target.vocab_size, target.n_layers))
        made.target, made.tables = target, _tables(decoders)
        if isinstance(made, TableLookAhead):
            made.below, target.foresees = target.layers[0], made.tables[0]
        return made
    if issubclass(kind, Head):
        if not kind.parallel:
            return TableHead(*_tables(decoders))
        own = {"own_place": kind.own_place}
        return type("TableBlockHead", (TableBlockHead,), own)(*_tables(decoders))
    return (
        TableParallel(_tables(decoders)[0]) if issubclass(kind, Decoder) else kind.random(decoders)
    )


@cache
def _head_of(kind: type[FeatureHead], vocab_size: int, n_layers: int) -> Any:
    """A head for tables of a size, whose weights are those for all of them: made once, since short
    walks would spend most of their time on making modules."""
    mixed: type[FeatureHead] = TableFeatureHead
    if issubclass(kind, LookAhead):
        mixed = TableLookAhead
    elif issubclass(kind, SequentialHead):
        mixed = TableSequentialHead
    table = torch.zeros((), dtype=torch.float64).expand((vocab_size,) * 3)
    target = TableDecoder("target", table, table if n_layers > 1 else None, inner=n_layers - 2)
    made: type[FeatureHead] = type(kind.__name__, (mixed, kind), {})
    return made.random({"target": target, "draft": TableDecoder("draft", table)})


def _tables(decoders: Mapping[str, Decoder]) -> tuple[Tensor, Tensor]:
    """The draft's and the target's."""
    draft, target = (cast(TableDecoder, decoders[role]).table for role in ("draft", "target"))
    return draft, target


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


def _way(draft: Tensor, target: Tensor, known: Tensor, row: Tensor, levels: int) -> Tensor:
    """Logits [levels, V] of the tokens behind the one that the target says next.

    Args:
        known, row: a table, and the row of it at the place in question.
    """
    return way_of(draft, target, divmod(_place(known.flatten(0, 1), row), draft.shape[-1]), levels)


def _place(rows: Tensor, row: Tensor) -> int:
    """Which of the rows [n, V] it is; the last one if none."""
    same = (rows == row).all(-1).nonzero()
    return int(same[0]) if len(same) else rows.shape[0] - 1
