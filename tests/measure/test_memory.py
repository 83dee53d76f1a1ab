"""Tests of measuring peak memory since the last reset."""

import subprocess
import sys

import pytest
import torch

from specbench_cli.measure import memory

CPU = torch.device("cpu")
MIB = 2**20


def grow_and_shrink(device: torch.device, mib: int) -> None:
    block = torch.ones(mib * MIB // 4, device=device)
    assert block.sum() > 0


FOLLOWS = """
import torch
from specbench_cli.measure import memory

cpu = torch.device("cpu")
can_reset = memory.reset_peak(cpu)
start = memory.peak_bytes(cpu)
assert torch.ones(64 * 2**20 // 4).sum() > 0
grown = memory.peak_bytes(cpu)
assert grown - start > 48 * 2**20, (start, grown)
if can_reset:
    memory.reset_peak(cpu)
    assert memory.peak_bytes(cpu) < grown - 32 * 2**20
"""


def test_peak_on_the_cpu_follows_allocation_and_reset():
    # A new process is needed, because this one may reuse memory that it has already allocated.
    command = [sys.executable, "-c", FOLLOWS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_peak_of_a_worker_is_included():
    waits = "import sys; block = b'x' * 2**25; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        worker.stdout.readline()
        memory.reset_peak(CPU, worker.pid)
        assert memory.peak_bytes(CPU, worker.pid) - memory.peak_bytes(CPU) > 2**25
        worker.communicate()
    assert (
        memory.peak_bytes(CPU, worker.pid) > 0
    )  # the worker has ended, so only this process counts


def test_without_proc_files_the_peak_is_that_of_the_whole_process(monkeypatch, tmp_path):
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
