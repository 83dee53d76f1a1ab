"""Table model of two layers. The first layer has its own logits, and the second detects wrong
input."""

from __future__ import annotations

import pytest
import torch

from specbench_cli.audit.models.table import (
    TableDecoder,
    find_wrong_rows,
    make_exit_table,
    random_table,
)
from specbench_cli.engine.types import Hidden, Tokens

TABLE = random_table(4, 1)
EXITS = make_exit_table(TABLE)
IDS = Tokens(torch.tensor([[1, 0, 2]]))


def decoder() -> TableDecoder:
    return TableDecoder("target", TABLE, EXITS)


def test_the_first_layer_is_the_exit_table_and_both_are_the_whole_table() -> None:
    model = decoder()
    whole, state = model.new_state(4), model.new_state(4)
    due = model.forward(IDS, whole, logits_at="all").logits
    first = model.forward(IDS, state, layers=(0, 1))
    assert first.logits is None
    assert torch.equal(first.hidden[0], EXITS[[0, 1, 0], [1, 0, 2]])
    assert [state.length(0, layer) for layer in (0, 1)] == [3, 0]
    assert find_wrong_rows(state, (1, 0, 2)) == "layers of [3, 0] rows"
    rest = model.forward(Hidden(first.hidden), state, layers=(1, 2), logits_at="all")
    assert torch.equal(rest.logits, due)
    assert torch.equal(due[0], TABLE[[0, 1, 0], [1, 0, 2]])
    assert find_wrong_rows(state, (1, 0, 2)) is None


@pytest.mark.parametrize("row", range(3))
def test_changed_hidden_states_change_the_second_layers_logits(row: int) -> None:
    model = decoder()
    state = model.new_state(4)
    rows = model.forward(IDS, state, layers=(0, 1)).hidden.clone()
    rows[0, row] += 1e-3
    found = model.forward(Hidden(rows), state, layers=(1, 2), logits_at="all").logits[0]
    due = TABLE[[0, 1, 0], [1, 0, 2]]
    assert [not torch.equal(*pair) for pair in zip(found, due, strict=True)] == [
        at == row for at in range(3)
    ]


def test_skipped_sublayers_change_the_logits_and_have_no_state() -> None:
    before, last = [0, 1, 0], [1, 0, 2]
    shifted = [2, 1, 3]
    due = {
        (1,): (EXITS[before, last], [3, 0]),
        ((1, "attention"),): (TABLE[[0, 0, 0], last], [3, 0]),
        ((1, "mlp"),): (TABLE[before, [0, 0, 0]], [3, 3]),
        ((0, "attention"),): (TABLE[before, shifted], [0, 3]),
        (0,): (TABLE[before, shifted], [0, 3]),
        (0, 1): (torch.eye(4, dtype=TABLE.dtype)[last], [0, 0]),
    }
    for skip, (rows, lengths) in due.items():
        model = decoder()
        state = model.new_state(4)
        out = model.forward(IDS, state, skip=frozenset(skip), logits_at="all")
        assert torch.equal(out.logits[0], rows)
        assert state.lengths == lengths
        assert state.length(0, 0) == lengths[0]
        assert len(state.rows) == max(lengths)


def test_layers_with_fewer_rows_keep_them() -> None:
    state = decoder().new_state(8)
    decoder().forward(IDS, state, layers=(0, 1))
    state.commit(0, (0, 2))
    assert (state.ids, state.lengths) == ([1, 2], [2, 0])
    state.rollback(0, 1)
    assert (state.ids, state.lengths) == ([1], [1, 0])


def test_rows_without_a_position_can_be_skipped() -> None:
    model = decoder()
    state = model.new_state(8)
    model.forward(IDS, state)
    state.commit(0, (0, 1, 2), loose=2)
    model.forward(Tokens(torch.tensor([[3]])), state)
    state.commit(0, (0, 2))
    assert (state.ids, state.lengths) == ([1, 0, 3], [3, 3])
