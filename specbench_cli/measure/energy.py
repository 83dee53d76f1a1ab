"""Energy of decoding, from hardware counters: RAPL of the CPU packages, NVML of a GPU.

If no counter can be read, there is no figure but a reason. Counters cover the whole package or
board, including other programs and idle power. RAPL updates about every millisecond, NVML about
every 100 ms, so the figure of a short output is coarse, but that of a method's sum is not.
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
    """A counter of joules.

    read: Returns the current value.
    wraps: Value at which the counter restarts at 0; 0 if it never does.
    """

    name: str
    read: Callable[[], float]
    wraps: float = 0.0


class EnergyMeter:
    """Meter of the energy that decoding on a device uses.

    Attributes:
        counters: The counters of the CPUs, and of the device if it is a GPU.
        why_not: Reason why there is no figure; None if there is one.
    """

    def __init__(self, counters: Sequence[Counter], why_not: str | None = None) -> None:
        self.counters, self.unavailable_reason = tuple(counters), why_not
        self._before: list[float] = []

    @classmethod
    def for_device(cls, device: torch.device) -> EnergyMeter:
        """Return the meter of a device. It has all counters of the device, or none."""
        counters, why_not = rapl_counters()
        if device.type == "cuda":
            board, missing = nvml_counter(device.index or 0)
            why_not = why_not or missing
            counters = [*counters, *([board] if board else [])]
        return cls([] if why_not else counters, why_not)

    def begin(self) -> None:
        """Store the current values of the counters."""
        self._before = [each.read() for each in self.counters]

    def end(self) -> float | None:
        """Return the joules of all counters since `begin`; None if there is no counter."""
        before, self._before = self._before, []
        if not before:
            return None
        total = 0.0
        for counter, was in zip(self.counters, before, strict=True):
            moved = counter.read() - was
            total += moved + (counter.wraps if moved < 0 else 0.0)
        return total

    def facts(self) -> dict[str, Any]:
        """Return the manifest entry."""
        return {
            "counters": [each.name for each in self.counters],
            "why_not": self.unavailable_reason,
        }


def rapl_counters() -> tuple[list[Counter], str | None]:
    """Return the RAPL counters of the CPU packages (Linux powercap, Intel and AMD), or why there
    are none."""
    zones = sorted(POWERCAP.glob("intel-rapl:[0-9]*"))
    whole = [zone for zone in zones if zone.name.count(":") == 1]
    if not whole:
        return (
            [],
            f"no RAPL on this system ({POWERCAP}/intel-rapl:0): virtual machines have none",
        )
    try:
        counters = [_rapl_counter(zone) for zone in whole]
        for counter in counters:
            counter.read()
    except (OSError, ValueError) as fault:
        what = getattr(fault, "strerror", None) or str(fault)
        return [], f"{whole[0]}/energy_uj cannot be read: {what}"
    return counters, None


def _rapl_counter(zone: Path) -> Counter:
    file = zone / "energy_uj"
    name = (zone / "name").read_text().strip()
    span = float((zone / "max_energy_range_uj").read_text())
    return Counter(f"RAPL {name}", lambda: float(file.read_text()) / 1e6, span / 1e6)


def nvml_counter(index: int, library: Any = None) -> tuple[Counter | None, str | None]:
    """Return the NVML counter of a GPU, or why there is none.

    Args:
        library: NVML as loaded by ctypes, for tests.
    """
    try:
        nvml = ctypes.CDLL(LIBRARY) if library is None else library
    except OSError:
        return None, f"NVML ({LIBRARY}) is not on this machine"
    handle, found = ctypes.c_void_p(), ctypes.c_ulonglong()

    def check(code: int) -> None:
        if code:
            raise OSError(f"NVML's code {code}")

    def read() -> float:
        check(nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(found)))
        return found.value / 1e3

    try:
        check(nvml.nvmlInit_v2())
        check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)))
        read()
    except OSError as fault:
        return None, f"NVML tells no energy of GPU {index}: {fault}"
    return Counter(f"NVML GPU {index}", read), None
