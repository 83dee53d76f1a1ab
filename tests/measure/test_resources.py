"""Tests of the memory and energy figures of a run, with fake energy counters."""

import json
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.measure import bench
from specbench_cli.measure.energy import Counter, EnergyMeter
from specbench_cli.store.run_dir import RunDir

ASKED = ("run", "--target", "shape:tiny-1m", "-m", "pld", "--limit", "1", "--max-new-tokens", "8",
         "--allow-noise", "--threads", "1", "--out", "here")  # fmt: skip


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))

    def call(*args):
        return (app._run(list(args)), *capsys.readouterr())

    return call


class FakeEnergyMeter:
    """A fake energy counter that grows by 10 J between two readings."""

    @classmethod
    def for_device(cls, device):
        at = iter(range(0, 10_000, 10))
        return EnergyMeter([Counter("made", lambda: float(next(at)))])


def test_energy_of_each_output_is_stored_and_reported_as_tokens_per_joule(run, monkeypatch):
    monkeypatch.setattr(bench, "EnergyMeter", FakeEnergyMeter)
    code, out, err = run(*ASKED, "--json")
    assert code == 0, err
    done = json.loads(out.splitlines()[-1])
    records = list(RunDir.open(Path("here")).records())
    assert {record.energy_j for record in records} == {10.0}
    assert RunDir.open(Path("here")).manifest["energy"] == {"counters": ["made"], "why_not": None}
    for row in done["summary"]:
        tokens = [record.n_tokens for record in records if record.label == row["method"]]
        assert row["tokens_per_joule"] == pytest.approx(sum(tokens) / (10 * len(tokens)))


def test_without_counters_energy_is_null_with_a_reason_in_the_manifest(run, monkeypatch):
    none = EnergyMeter((), "this system has none")
    monkeypatch.setattr(bench.EnergyMeter, "for_device", classmethod(lambda cls, device: none))
    code, out, err = run(*ASKED, "--json")
    assert code == 0, err
    run_dir = RunDir.open(Path("here"))
    assert {record.energy_j for record in run_dir.records()} == {None}
    assert run_dir.manifest["energy"] == {"counters": [], "why_not": "this system has none"}
    assert json.loads(out.splitlines()[-1])["summary"][0]["tokens_per_joule"] is None


def test_manifest_has_memory_peaks_of_loading_and_warm_up(run):
    assert run(*ASKED)[0] == 0
    memory = RunDir.open(Path("here")).manifest["memory"]
    assert memory["peaks"].keys() == {"loading", "warming up"}
    assert min(memory["peaks"].values()) > memory["weight_bytes"] > 0
