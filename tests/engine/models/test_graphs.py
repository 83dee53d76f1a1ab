"""Recorded forwards give the results of other forwards, whatever is in their buffers.

Without a GPU, a recording runs its body again. This tests everything but the CUDA graph.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.engine.models.cuda import graphs
from specbench_cli.engine.models.fused import FusedDecoder
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.types import Tokens

CLOSE = 1e-5
FAMILIES = (
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("mistral", {"sliding_window": 5}),
    ("qwen3", {}),
)


def again(body):
    return body


@pytest.fixture(params=FAMILIES, ids=lambda case: f"{case[0]}-{len(case[1])}")
def pair(request, tiny_checkpoint, monkeypatch):
    """Two decoders with states: one records its forwards, the other does not."""
    monkeypatch.setattr(graphs, "SEEN_MULTIPLE", 16)
    family, overrides = request.param
    folder = tiny_checkpoint(family, **overrides)
    pair_ = [load_decoder(folder, name="target") for _ in range(2)]
    for each in pair_:
        assert isinstance(each, FusedDecoder)
    pair_[0].record(again)
    return [(each, each.new_state(75)) for each in pair_]


def both(pair, n, *, seed=0, **how):
    """Run the same forward on both, and assert equal results."""
    ids = torch.randint(0, 197, (1, n), generator=torch.Generator().manual_seed(seed + 100 * n))
    one, other = (decoder.forward(Tokens(ids), state, **how) for decoder, state in pair)
    assert (one.logits is None) == (other.logits is None)
    if one.logits is not None:
        torch.testing.assert_close(one.logits, other.logits, atol=CLOSE, rtol=CLOSE)
    torch.testing.assert_close(one.hidden, other.hidden, atol=CLOSE, rtol=CLOSE)
    assert one.aux_hidden_states.keys() == other.aux_hidden_states.keys()
    for at, rows in one.aux_hidden_states.items():
        torch.testing.assert_close(rows, other.aux_hidden_states[at], atol=CLOSE, rtol=CLOSE)
    return one


def commit(pair, path, loose=0):
    for _, state in pair:
        state.commit(0, path, loose)


def same_rows(pair):
    (_, one), (_, other) = pair
    assert one.lengths == other.lengths
    n = one.length()
    torch.testing.assert_close(
        one.buffers[0][..., :n, :], other.buffers[0][..., :n, :], atol=CLOSE, rtol=CLOSE
    )


def test_a_text_in_blocks_over_several_recordings_is_unchanged(pair):
    for seed, (n, at) in enumerate(
        itertools.product((1, 7, 3, 12), ("last", "all", None, torch.tensor([0])))
    ):
        if pair[0][1].length() + n > 75:
            break
        both(pair, n, seed=seed, logits_at=at, captured_layers=(0,) if n == 3 else ())
        commit(pair, range(n))
    same_rows(pair)
    assert pair[0][0].recorded > 0


def test_a_shape_is_recorded_once_per_state_and_sixteen_rows(pair):
    decoder = pair[0][0]
    for rows in range(2, 64, 2):
        both(pair, 2)
        assert decoder.recorded == -(-rows // 16)
    for _, state in pair:
        state.rollback(0, 10)
    for _ in range(26):
        both(pair, 2)
    assert decoder.recorded == 4
    both(pair, 13)
    with pytest.raises(ValueError, match="do not fit"):
        both(pair, 2)


def test_rolled_back_rows_are_not_visible(pair):
    both(pair, 9)
    commit(pair, range(9))
    both(pair, 5)
    for _, state in pair:
        state.rollback(0, 10)
    both(pair, 5, seed=1)
    same_rows(pair)


def test_skipped_rows_keep_their_positions(pair):
    both(pair, 12)
    for _, state in pair:
        state.select([0, 1, 7, 8, 9, 10, 11])
    both(pair, 3)
    same_rows(pair)


def test_a_wide_block_is_not_recorded(pair):
    both(pair, graphs.MAX_ROWS + 1)
    assert pair[0][0].recorded == 0


def tree(parents):
    """Return the mask of a tree. Node i has the parent parents[i], where -1 is the root in row
    0."""
    n = len(parents) + 1
    mask = torch.zeros(n, n, dtype=torch.bool)
    depth = [0] * n
    mask[:, 0] = True
    for node, parent in enumerate(parents, 1):
        mask[node] = mask[parent + 1]
        mask[node, 0] = mask[node, node] = True
        depth[node] = depth[parent + 1] + 1
    return mask, torch.tensor([depth])


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_tree_is_unchanged(tiny_checkpoint, data):
    folder = tiny_checkpoint("llama")
    pair = []
    for records in (True, False):
        decoder = load_decoder(folder, name="target")
        if records:
            decoder.record(again)
        pair.append((decoder, decoder.new_state(300)))
    both(pair, 8)
    commit(pair, range(8))
    for seed in range(2):
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(data.draw(st.integers(1, 9)))]
        mask, depth = tree(parents)
        start = pair[0][1].position()
        both(pair, len(mask), seed=seed, mask=mask, positions=start + depth, logits_at="all")
        leaf = len(parents)
        path = mask[leaf].nonzero()[:, 0].tolist()
        commit(pair, path)
        same_rows(pair)
    # A second level that sees some rows of the first level.
    both(pair, 4, seed=5)
    wide = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]], dtype=torch.bool)
    at = torch.tensor([[30, 31]])
    both(pair, 2, seed=6, mask=wide, positions=at, logits_at="all")


def test_nan_in_a_branch_does_not_reach_its_siblings(tiny_checkpoint):
    decoder = load_decoder(tiny_checkpoint("llama"), name="target")
    decoder.record(again)
    state = decoder.new_state(40)
    decoder.forward(Tokens(torch.tensor([[5, 6, 7]])), state)
    decoder.weights.embedding[9] = torch.nan
    mask, depth = tree([-1, -1])
    out = decoder.forward(
        Tokens(torch.tensor([[8, 9, 10]])), state, mask=mask, positions=3 + depth, logits_at="all"
    )
    assert out.rows.isfinite().all(-1).tolist() == [True, False, True]
