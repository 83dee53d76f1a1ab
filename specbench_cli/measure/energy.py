"""Energy of decoding, from hardware counters: RAPL for CPU packages (sockets), NVML for a GPU.

If a counter cannot be read, no energy is reported, and the manifest contains the reason. The
counters measure the whole CPU package or GPU board. This includes other programs and idle power.
RAPL updates its counter about every millisecond, and NVML about every 100 ms. So the energy of one
short output is inexact. The sum over all outputs of a method is reliable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")
LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class Counter:
    """A hardware counter of energy in joules.

    read: Function that returns the current value of the counter.
    wraps: Value at which the counter overflows and restarts from 0. It is 0 for a counter that
        never overflows.
    """

    name: str
    read: Callable[[], float]
    wraps: float = 0.0


class EnergyMeter:
    """Meter of the energy that decoding uses.

    Attributes:
        counters: Counters of the CPU packages, and of the GPU if the run uses one.
        unavailable_reason: Reason why energy cannot be measured. None if it can be measured.
    """

    def __init__(self, counters: Sequence[Counter], unavailable_reason: str | None = None) -> None:
        self.counters, self.unavailable_reason = tuple(counters), unavailable_reason
        self._before: list[float] = []

    @classmethod
    def for_device(cls, device: torch.device) -> EnergyMeter:
        """Return the energy meter for a run on a device.

        If any hardware counter cannot be read, the meter has no counters and reports no energy.
        """
        counters, reason = rapl_counters()
        if device.type == "cuda":
            board, missing = nvml_counter(device.index or 0)
            reason = reason or missing
            counters = [*counters, *([board] if board else [])]
        return cls([] if reason else counters, reason)

    def begin(self) -> None:
        """Store the current values of the energy counters."""
        self._before = [each.read() for each in self.counters]

    def end(self) -> float | None:
        """Return the energy since `begin` in joules, summed over all counters.

        None if there is no counter.
        """
        start_values, self._before = self._before, []
        if not start_values:
            return None
        total = 0.0
        for counter, start in zip(self.counters, start_values, strict=True):
            difference = counter.read() - start
            total += difference + (counter.wraps if difference < 0 else 0.0)
        return total

    def facts(self) -> dict[str, Any]:
        """Return the manifest entry about the energy meter."""
        return {
            "counters": [each.name for each in self.counters],
            "why_not": self.unavailable_reason,
        }


def rapl_counters() -> tuple[list[Counter], str | None]:
    """Return the RAPL energy counters of all CPU packages, and the reason if they cannot be read.

    RAPL counters exist on Intel and AMD processors. Linux provides them under `powercap`.
    """
    zones = sorted(POWERCAP.glob("intel-rapl:[0-9]*"))
    packages = [zone for zone in zones if zone.name.count(":") == 1]
    if not packages:
        return (
            [],
            f"no RAPL on this system ({POWERCAP}/intel-rapl:0): virtual machines do not have it",
        )
    try:
        counters = [_rapl_counter(zone) for zone in packages]
        for counter in counters:
            counter.read()
    except (OSError, ValueError) as fault:
        what = getattr(fault, "strerror", None) or str(fault)
        return [], f"{packages[0]}/energy_uj cannot be read: {what}"
    return counters, None


def _rapl_counter(zone: Path) -> Counter:
    file = zone / "energy_uj"
    name = (zone / "name").read_text().strip()
    span = float((zone / "max_energy_range_uj").read_text())
    return Counter(f"RAPL {name}", lambda: float(file.read_text()) / 1e6, span / 1e6)


def nvml_counter(index: int, library: Any = None) -> tuple[Counter | None, str | None]:
    """Return the NVML energy counter of a GPU, or the reason why it cannot be read.

    Args:
        index: Index of the GPU.
        library: Replacement of the NVML library in tests.
    """
    try:
        nvml = ctypes.CDLL(LIBRARY) if library is None else library
    except OSError:
        return None, f"NVML ({LIBRARY}) is not on this machine"
    handle, found = ctypes.c_void_p(), ctypes.c_ulonglong()

    def check(code: int) -> None:
        if code:
            raise OSError(f"NVML error code {code}")

    def read() -> float:
        check(nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(found)))
        return found.value / 1e3

    try:
        check(nvml.nvmlInit_v2())
        check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)))
        read()
    except OSError as fault:
        return None, f"NVML cannot read the energy of GPU {index}: {fault}"
    return Counter(f"NVML GPU {index}", read), None
