"""Tests of energy counters, with simulated RAPL files and a fake NVML."""

import ctypes

import pytest
import torch

from specbench_cli.measure import energy
from specbench_cli.measure.energy import Counter, EnergyMeter, nvml_counter, rapl_counters

CPU = torch.device("cpu")


@pytest.fixture
def zones(tmp_path, monkeypatch):
    """Two RAPL packages at 1 and 2 J, the first with a subzone. The value sets a counter."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)

    def set_counter(name, microjoules):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"package-{name[-1]}\n")
        (folder / "max_energy_range_uj").write_text("10000000\n")
        (folder / "energy_uj").write_text(f"{microjoules}\n")

    for name, value in (("intel-rapl:0", 1_000_000), ("intel-rapl:1", 2_000_000),
                        ("intel-rapl:0:0", 5_000_000)):  # fmt: skip
        set_counter(name, value)
    return set_counter


def test_packages_are_summed_without_their_subzones(zones):
    meter = EnergyMeter.for_device(CPU)
    assert meter.facts() == {"counters": ["RAPL package-0", "RAPL package-1"], "why_not": None}
    meter.begin()
    zones("intel-rapl:0", 1_250_000)
    zones("intel-rapl:1", 2_500_000)
    zones("intel-rapl:0:0", 9_000_000)
    assert meter.end() == pytest.approx(0.75)


def test_a_counter_overflow_is_handled(zones):
    meter = EnergyMeter.for_device(CPU)
    zones("intel-rapl:0", 9_900_000)
    meter.begin()
    zones("intel-rapl:0", 300_000)
    assert meter.end() == pytest.approx(0.4)


def test_a_machine_without_counters_has_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    meter = EnergyMeter.for_device(CPU)
    meter.begin()
    assert meter.end() is None
    assert "no RAPL on this system" in meter.facts()["why_not"]


def test_an_unreadable_counter_has_a_reason(zones, tmp_path):
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert rapl_counters()[1].startswith(f"{tmp_path}/intel-rapl:0/energy_uj cannot be read")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("what?")
    assert "cannot be read" in rapl_counters()[1]


class FakeNvml:
    """A fake NVML with a GPU at 7 J, or without a GPU."""

    def __init__(self, code=0):
        self.code, self.millijoules = code, 7000

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        assert index.value == 2
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, found):  # noqa: N802
        ctypes.cast(found, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
        return self.code


def test_a_gpu_is_read_by_nvml():
    library = FakeNvml()
    counter, why_not = nvml_counter(2, library)
    assert (counter.name, why_not) == ("NVML GPU 2", None)
    meter = EnergyMeter([counter])
    meter.begin()
    library.millijoules += 250
    assert meter.end() == pytest.approx(0.25)
    assert nvml_counter(2, FakeNvml(code=3)) == (
        None,
        "NVML cannot read the energy of GPU 2: NVML error code 3",
    )


def test_a_machine_without_nvml_has_a_reason(monkeypatch):
    monkeypatch.setattr(energy, "LIBRARY", "libnothing.so.0")
    assert nvml_counter(0) == (None, "NVML (libnothing.so.0) is not on this machine")


def test_a_missing_counter_gives_no_energy(zones, monkeypatch):
    monkeypatch.setattr(energy, "nvml_counter", lambda index: (None, "NVML is not there"))
    meter = EnergyMeter.for_device(torch.device("cuda", 0))
    meter.begin()
    assert (meter.counters, meter.end(), meter.unavailable_reason) == (
        (),
        None,
        "NVML is not there",
    )
    monkeypatch.setattr(energy, "nvml_counter", lambda index: (Counter("board", lambda: 1.0), None))
    assert len(EnergyMeter.for_device(torch.device("cuda", 0)).counters) == 3
