"""Energy that a decoding takes, by the machine's own counters: RAPL of the CPUs' packages, NVML of
a GPU. Where no counter can be read there is none, and a reason.

Counters are of the whole package or board: what other programs take is in them, and so is what an
idle machine takes. RAPL's counter moves about every millisecond, NVML's every tenth of a second, so
that of a short decoding the figure is coarse, and of a row's sum it is not.
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
    """A counter of joules. read: it, now. wraps: where it begins again at 0; 0: nowhere."""

    name: str
    read: Callable[[], float]
    wraps: float = 0.0


class EnergyMeter:
    """What decodings on a device take.

    Attributes:
        counters: all that can be read: the CPUs', and the device's if it is a GPU.
        why_not: why there is no figure; None where there is one.
    """

    def __init__(self, counters: Sequence[Counter], why_not: str | None = None) -> None:
        self.counters, self.why_not = tuple(counters), why_not
        self._before: list[float] = []

    @classmethod
    def of(cls, device: torch.device) -> EnergyMeter:
        """Of a run on a device: all of its counters, or none."""
        counters, why_not = rapl_counters()
        if device.type == "cuda":
            board, missing = nvml_counter(device.index or 0)
            why_not = why_not or missing
            counters = [*counters, *([board] if board else [])]
        return cls([] if why_not else counters, why_not)

    def begin(self) -> None:
        """Note where the counters are."""
        self._before = [each.read() for each in self.counters]

    def end(self) -> float | None:
        """Joules since `begin`, of all counters; None where there is none."""
        before, self._before = self._before, []
        if not before:
            return None
        total = 0.0
        for counter, was in zip(self.counters, before, strict=True):
            moved = counter.read() - was
            total += moved + (counter.wraps if moved < 0 else 0.0)
        return total

    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        return {"counters": [each.name for each in self.counters], "why_not": self.why_not}


def rapl_counters() -> tuple[list[Counter], str | None]:
    """The CPUs' packages by RAPL (Linux' powercap; Intel's and AMD's), or why not."""
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
    """A GPU's board by NVML, or why not.

    Args:
        library: NVML's, as ctypes loads it; for tests.
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
