"""Ranking of scores: the most likely tokens, compared with torch."""

import pytest
import torch

from specbench_cli.engine.verify import ranking


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (17, 400), (3, 20_000)], ids=str)
def test_the_argmax_equals_torchs(dtype, shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = ranking.argmax(rows)
    assert found.dtype == torch.int64
    assert torch.equal(found, rows.argmax(-1))


def test_a_tie_is_won_by_the_first_entry():
    rows = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf] * 3])
    assert ranking.argmax(rows).tolist() == [1, 0]


@pytest.mark.parametrize("vocab", [5, 4096, 1 << 14, 20_001])
@pytest.mark.parametrize("k", [1, 4, 5])
def test_the_top_k_equals_torchs(vocab, k):
    rows = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    rows[0, 3] = rows[1, :2] = -torch.inf
    values, at = ranking.top(rows, k)
    best = rows.topk(k)
    assert torch.equal(values, best.values)
    assert torch.equal(rows.gather(1, at), values)
    assert torch.equal(at[2:], best.indices[2:])


def test_more_entries_than_chunks_are_found():
    rows = torch.randn(2, 1 << 14, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ranking.top(rows, 300)[0], rows.topk(300).values)


@pytest.mark.parametrize("vocab", [5, 4096, 1 << 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_the_host_the_result_is_equal_and_the_input_unchanged(vocab, dtype):
    rows = torch.randn(3, vocab, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows[0, 1:4] = -torch.inf
    before = rows.clone()
    values, at = ranking.top_lists(rows, 4)
    best = ranking.top(rows, 4)
    assert (values, at) == (best[0].tolist(), best[1].tolist())
    assert torch.equal(ranking.top_indices(rows, 4), best[1])
    assert torch.equal(rows, before)
    assert all(len(set(row)) == 4 for row in at)


def test_rows_that_share_memory_are_not_changed():
    row = torch.randn(300, generator=torch.Generator().manual_seed(7))
    values, at = ranking.top(row.expand(4, -1), 3)
    assert torch.equal(at, row.topk(3).indices.expand(4, -1))
    assert torch.equal(values, row.topk(3).values.expand(4, -1))
