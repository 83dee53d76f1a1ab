"""KVState, compared with plain lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specbench_cli.engine.models.state import KVState, LayerShape

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 3, 3), LayerShape(2, 3, 3), LayerShape(1, 2, 4)]
LAYERS, SEQS, CAPACITY = len(SHAPES), 2, 12


def make() -> KVState:
    return KVState(SHAPES, SEQS, CAPACITY, dtype=torch.float32, device=CPU)


def write(state: KVState, seq: int, layers: range, rows: list[int]) -> None:
    """Append rows filled with the given numbers."""
    for layer in layers:
        start = state.length(seq, layer)
        for at, number in enumerate(rows, start):
            state.keys(layer)[seq, :, at] = number
            state.values(layer)[seq, :, at] = -number
    state.extend(seq, layers, len(rows))


def rows_of(state: KVState, seq: int, layer: int) -> list[int]:
    """Return the numbers of a layer's rows, after comparing keys with values."""
    n = state.length(seq, layer)
    keys, values = state.keys(layer)[seq, :, :n], state.values(layer)[seq, :, :n]
    rows = keys[0, :, 0]
    assert (keys == rows[None, :, None]).all()
    assert (values == -rows[None, :, None]).all()
    return [int(row) for row in rows]


class StateAgainstLists(RuleBasedStateMachine):
    """Run every operation on the state and on lists."""

    def __init__(self) -> None:
        super().__init__()
        self.state = make()
        self.rows = [[[] for _ in range(LAYERS)] for _ in range(SEQS)]
        self.committed = [[0] * LAYERS for _ in range(SEQS)]
        self.next = 1

    @rule(
        seq=st.integers(0, SEQS - 1),
        n=st.integers(1, 4),
        layers=st.sampled_from([range(3), range(2), range(2, 3), range(1, 3)]),
    )
    def write(self, seq: int, n: int, layers: range) -> None:
        if max(self.state.length(seq, layer) for layer in layers) + n > CAPACITY:
            return
        new = list(range(self.next, self.next + n))
        self.next += n
        write(self.state, seq, layers, new)
        for layer in layers:
            self.rows[seq][layer] += new

    @rule(seq=st.integers(0, SEQS - 1), data=st.data())
    def commit(self, seq: int, data: st.DataObject) -> None:
        rows, committed = self.rows[seq], self.committed[seq]
        written = max(len(have) - base for have, base in zip(rows, committed, strict=True))
        path = sorted(data.draw(st.sets(st.integers(0, written - 1)))) if written else []
        if data.draw(st.booleans()):  # a chain
            path = range(len(path))
        loose = data.draw(st.integers(0, len(path)))
        self.state.commit(seq, path, loose)
        for layer in range(LAYERS):
            base, have = committed[layer], rows[layer]
            accepted = [at for at in path if base + at < len(have)]
            rows[layer] = have[:base] + [have[base + at] for at in accepted]
            firm = [at for at in accepted if at in path[: len(path) - loose]]
            committed[layer] = base + len(firm)

    @rule(
        seq=st.integers(0, SEQS - 1),
        n=st.integers(0, CAPACITY),
        layers=st.sampled_from([None, range(1), range(1, 3)]),
    )
    def rollback(self, seq: int, n: int, layers: range | None) -> None:
        self.state.rollback(seq, n, layers)
        for layer in range(LAYERS) if layers is None else layers:
            self.rows[seq][layer] = self.rows[seq][layer][:n]
            self.committed[seq][layer] = min(self.committed[seq][layer], n)

    @rule()
    def clear(self) -> None:
        self.state.clear()
        self.rows = [[[] for _ in range(LAYERS)] for _ in range(SEQS)]
        self.committed = [[0] * LAYERS for _ in range(SEQS)]

    @invariant()
    def holds_the_same_rows(self) -> None:
        for seq in range(SEQS):
            for layer in range(LAYERS):
                assert rows_of(self.state, seq, layer) == self.rows[seq][layer]


StateAgainstLists.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)
TestStateAgainstLists = StateAgainstLists.TestCase


def test_commit_of_a_prefix_moves_no_rows() -> None:
    state = make()
    write(state, 0, range(3), [1, 2, 3, 4])
    before = [buffer.clone() for buffer in state.buffers]
    state.commit(0, (0, 1))
    assert state.length(0) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, state.buffers, strict=True))


def test_commit_of_a_tree_path_gathers_its_rows() -> None:
    state = make()
    write(state, 0, range(3), [10, 11])
    state.commit(0, (0, 1))
    write(state, 0, range(3), [1, 2, 3, 4, 5])
    state.commit(0, (0, 2, 4))
    assert [rows_of(state, 0, layer) for layer in range(3)] == [[10, 11, 1, 3, 5]] * 3


@pytest.mark.parametrize("path", [(0, 0, 2), (1, 0), (0, 3), (-1, 0)])
def test_a_path_out_of_order_is_refused(path: tuple[int, ...]) -> None:
    state = make()
    write(state, 0, range(3), [1, 2, 3])
    with pytest.raises(ValueError, match="path"):
        state.commit(0, path)
    assert rows_of(state, 0, 0) == [1, 2, 3]


@pytest.mark.parametrize(("key_dim", "value_dim"), [(2, 4), (4, 2)])
def test_keys_and_values_may_have_different_widths(key_dim: int, value_dim: int) -> None:
    shape = LayerShape(3, key_dim, value_dim)
    state = KVState([shape], SEQS, CAPACITY, dtype=torch.float32, device=CPU)
    assert state.keys(0).shape == (SEQS, 3, CAPACITY, key_dim)
    assert state.values(0).shape == (SEQS, 3, CAPACITY, value_dim)


def test_length_defaults_to_the_first_sequence_and_layer() -> None:
    state = make()
    write(state, 0, range(3), [1, 2])
    write(state, 0, range(1), [3])
    write(state, 1, range(3), [1])
    assert (state.length(), state.length(0, 1), state.length(1)) == (3, 2, 1)


def test_more_rows_than_capacity_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into a state of 12 rows"):
        make().require(9, 4)


def test_nbytes_is_computed_from_the_shapes() -> None:
    assert make().nbytes == 4 * SEQS * CAPACITY * (12 + 12 + 8)
