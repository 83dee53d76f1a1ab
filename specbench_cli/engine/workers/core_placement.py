"""Assignment of processes to CPU cores, and their number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")
_CORES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class CorePlacement:
    """CPU cores of a process, which runs one thread per core. If empty, the process is not pinned.

    A process with a GPU uses these cores for its CPU work.
    """

    cores: tuple[int, ...] = ()


def split_cores() -> tuple[CorePlacement, CorePlacement]:
    """Split the cores of this process into two halves: for the target, and for the draft model.

    Hyperthreads of one physical core are in the same half, so that target and draft model do not
    compete for it.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores.sort(key=_physical_core)
    if len(cores) < 2:
        return CorePlacement(tuple(cores)), CorePlacement(tuple(cores))
    half = len(cores) // 2
    target, draft = cores[: len(cores) - half], cores[len(cores) - half :]
    return CorePlacement(tuple(sorted(target))), CorePlacement(tuple(sorted(draft)))


def _physical_core(core: int) -> tuple[int, int]:
    """Return the package number and the physical core number of a logical core."""
    topology = _CORES / f"cpu{core}" / "topology"
    try:
        package, own = (
            (topology / name).read_text() for name in ("physical_package_id", "core_id")
        )
        return int(package), int(own)
    except (OSError, ValueError):
        return 0, core


def apply_placement(placement: CorePlacement) -> None:
    """Pin all threads of this process to some CPU cores."""
    if placement.cores:
        torch.set_num_threads(len(placement.cores))
        for task in _thread_ids():
            _pin(task, placement.cores)


@contextmanager
def use_placement(placement: CorePlacement) -> Iterator[None]:
    """Pin this process to some cores. At the end of the context, restore its cores and threads."""
    threads, tasks = torch.get_num_threads(), _thread_ids()
    before = {task: _affinity(task) for task in tasks}
    apply_placement(placement)
    try:
        yield
    finally:
        if placement.cores:
            torch.set_num_threads(threads)
            mine = before.get(os.getpid(), ())
            for task in _thread_ids():  # new threads get the cores of the main thread
                _pin(task, before.get(task, mine))


def _thread_ids() -> list[int]:
    """Return the ids of all threads of this process. Each thread must be pinned separately."""
    return [int(task.name) for task in _TASKS.iterdir()] if _TASKS.is_dir() else []


def _affinity(task: int) -> Sequence[int]:
    try:
        return tuple(os.sched_getaffinity(task))
    except ProcessLookupError:  # the thread has ended
        return ()


def _pin(task: int, cores: Sequence[int]) -> None:
    if cores:
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(task, cores)
