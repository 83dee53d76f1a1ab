"""Which cores a process computes on, and with how many threads."""

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
    """Cores, with a thread on each; none: wherever the system has it compute, as it was.

    What computes on a GPU has its host's work on these cores.
    """

    cores: tuple[int, ...] = ()


def split_cores() -> tuple[CorePlacement, CorePlacement]:
    """The cores that this process may use, split in two: the target's, then the draft's.

    The threads of a physical core stay together: two workers on it would wait for each other.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores.sort(key=_physical_core)
    if len(cores) < 2:
        return CorePlacement(tuple(cores)), CorePlacement(tuple(cores))
    half = len(cores) // 2
    target, draft = cores[: len(cores) - half], cores[len(cores) - half :]
    return CorePlacement(tuple(sorted(target))), CorePlacement(tuple(sorted(draft)))


def _physical_core(core: int) -> tuple[int, int]:
    """The package and the physical core in it that a core is a thread of."""
    topology = _CORES / f"cpu{core}" / "topology"
    try:
        package, own = (
            (topology / name).read_text() for name in ("physical_package_id", "core_id")
        )
        return int(package), int(own)
    except (OSError, ValueError):
        return 0, core


def apply_placement(place: CorePlacement) -> None:
    """Have this process compute at a place from now on."""
    if place.cores:
        torch.set_num_threads(len(place.cores))
        for task in _thread_ids():
            _pin(task, place.cores)


@contextmanager
def use_placement(place: CorePlacement) -> Iterator[None]:
    """Have this process compute at a place; cores and threads are as they were afterwards."""
    threads, tasks = torch.get_num_threads(), _thread_ids()
    before = {task: _affinity(task) for task in tasks}
    apply_placement(place)
    try:
        yield
    finally:
        if place.cores:
            torch.set_num_threads(threads)
            mine = before.get(os.getpid(), ())
            for task in _thread_ids():  # threads that were started since are children of this one's
                _pin(task, before.get(task, mine))


def _thread_ids() -> list[int]:
    """The threads of this process: torch's keep the cores that they were started with."""
    return [int(task.name) for task in _TASKS.iterdir()] if _TASKS.is_dir() else []


def _affinity(task: int) -> Sequence[int]:
    try:
        return tuple(os.sched_getaffinity(task))
    except ProcessLookupError:  # it ended meanwhile
        return ()


def _pin(task: int, cores: Sequence[int]) -> None:
    if cores:
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(task, cores)
