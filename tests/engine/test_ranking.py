"""The best of rows of scores: what torch finds."""

import pytest
import torch

from specbench_cli.engine import ranking


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (17, 400), (3, 20_000)], ids=str)
def test_the_greatest_entry_is_torchs(dtype, shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = ranking.argmax(rows)
    assert found.dtype == torch.int64
    assert torch.equal(found, rows.argmax(-1))


def test_of_equal_entries_the_first_is_the_greatest():
    rows = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf] * 3])
    assert ranking.argmax(rows).tolist() == [1, 0]


@pytest.mark.parametrize("vocab", [5, 4096, 1 << 14, 20_001])
@pytest.mark.parametrize("k", [1, 4, 5])
def test_the_greatest_entries_are_torchs(vocab, k):
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
