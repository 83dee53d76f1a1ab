"""The peak is that since the last reset."""

import pytest
import torch

from specbench_cli.measure import memory

CPU = torch.device("cpu")
MIB = 2**20


def grow_and_shrink(device: torch.device, mib: int) -> None:
    block = torch.ones(mib * MIB // 4, device=device)
    assert block.sum() > 0


def test_peak_on_the_cpu_follows_allocation_and_reset():
    can_reset = memory.reset_peak(CPU)
    start = memory.peak_bytes(CPU)
    grow_and_shrink(CPU, 64)
    grown = memory.peak_bytes(CPU)
    assert grown - start > 48 * MIB
    if can_reset:
        memory.reset_peak(CPU)
        assert memory.peak_bytes(CPU) < grown - 32 * MIB


def test_without_the_kernels_files_the_peak_is_that_of_the_whole_process(monkeypatch, tmp_path):
    known = memory.peak_bytes(CPU)
    monkeypatch.setattr(memory, "STATUS", tmp_path / "absent")
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    assert not memory.reset_peak(CPU)
    assert memory.peak_bytes(CPU) >= known * 0.9


@pytest.mark.gpu
def test_peak_on_cuda_follows_allocation_and_reset():
    device = torch.device("cuda")
    assert memory.reset_peak(device)
    start = memory.peak_bytes(device)
    grow_and_shrink(device, 64)
    assert memory.peak_bytes(device) - start >= 64 * MIB
    memory.reset_peak(device)
    assert memory.peak_bytes(device) < start + 32 * MIB
