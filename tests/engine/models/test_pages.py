"""Weights in large memory pages keep their values."""

import mmap

import pytest
import torch

from specbench_cli.engine.models.linear import (
    ALIGNMENT,
    CHUNK,
    PAGE,
    WeightArena,
    prefer_large_pages,
)

RANDOM = torch.Generator().manual_seed(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_weights_keep_values_and_order(dtype):
    pages = WeightArena()
    parts = [torch.randn(size, generator=RANDOM).to(dtype).t() for size in ((3, 5), (7, 1), (2, 9))]
    stored = [pages.store(part) for part in parts]
    for part, moved in zip(parts, stored, strict=True):
        assert torch.equal(part, moved)
        assert moved.is_contiguous()
        assert moved.data_ptr() % ALIGNMENT == 0


def test_a_weight_larger_than_a_chunk_gets_its_own_chunk():
    pages = WeightArena()
    small, large = torch.ones(4), torch.full((CHUNK // 4 + 1,), 2.0)
    first, second, third = map(pages.store, (small, large, small))
    assert torch.equal(first, small) and torch.equal(second, large) and torch.equal(third, small)


def test_an_empty_list_is_moved_as_an_empty_list():
    assert WeightArena().store(torch.empty(0, 3)).shape == (0, 3)


def test_a_system_without_large_pages_keeps_the_tensor(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    tensor = torch.arange(6.0)
    assert WeightArena().store(tensor) is tensor


def test_memory_of_another_library_keeps_its_address_and_values():
    tensor = torch.arange(3.0 * PAGE // 4).view(3, -1)
    place, before = tensor.data_ptr(), tensor.clone()
    prefer_large_pages(place, tensor.nbytes)
    assert tensor.data_ptr() == place
    assert torch.equal(tensor, before)
    prefer_large_pages(1 << 46, 4 * PAGE)  # refused by the system, without harm
