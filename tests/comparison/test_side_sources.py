"""Tests of how `specbench compare` finds the run or baseline that an argument names."""

import os
from pathlib import Path

import pytest

from specbench_cli.comparison import side_sources
from specbench_cli.comparison.baselines import baseline
from specbench_cli.errors import UsageError
from specbench_cli.measure import machine
from specbench_cli.store import run_dir


@pytest.fixture
def at_root(tmp_path, monkeypatch):
    """An empty working folder."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def two_machines(make_run, at_root):
    """A baseline with the name ci for two machines."""
    for name in ("zzz", "yyy"):
        run = make_run(name, change=lambda m, name=name: m["machine"].update(id=name))
        baseline.save("ci", [run])


def test_folder_is_a_run_and_a_file_a_baseline(make_run, at_root):
    run = make_run("mine")
    file = baseline.save("ci", [run])
    assert side_sources.load_side(str(run)).name == "mine"
    assert side_sources.load_side(str(file)) == side_sources.load_side("ci") == baseline.load(file)
    assert side_sources.load_side("results/baselines/ci") == baseline.load(file)


def test_folder_of_runs_is_one_side_of_several_processes(make_run, at_root):
    (at_root / "base").mkdir()
    for hour, name in enumerate(("1", "2", "3")):
        run = make_run(
            name,
            change=lambda m, hour=hour, name=name: m.update(
                created_utc=f"2026-11-21T1{hour}:00:00+00:00", noisy=name == "2"
            ),
        )
        run.rename(at_root / "base" / name)
    side = side_sources.load_side("base")
    assert (side.name, side.noisy, len(side.processes)) == ("base", False, 2)
    assert [began[11:13] for began in side.start_times] == ["10", "12"]
    assert side.left_out == ("times of 2 are left out: it is labelled noisy",)
    assert side.outputs == side_sources.load_side("base/1").outputs
    assert side_sources.find_run_folders("base") == [Path("base/1"), Path("base/2"), Path("base/3")]
    assert side_sources.find_run_folders("base/2") == [Path("base/2")]


def test_folder_of_runs_of_two_programs_is_rejected_with_the_difference(make_run, at_root):
    (at_root / "both").mkdir()
    for name in ("a", "b"):
        run = make_run(name, change=lambda m, name=name: m["machine"]["git"].update(commit=name))
        run.rename(at_root / "both" / name)
    with pytest.raises(UsageError, match=r"commit: a \(a\) against b \(b\)"):
        side_sources.load_side("both")


def test_last_is_the_newest_run(make_run, at_root):
    (at_root / "results/runs").mkdir(parents=True)
    for place, name in enumerate(("older", "newer")):
        folder = at_root / "results/runs" / name
        make_run(name).rename(folder)
        os.utime(folder / "manifest.json", ns=(place, place))
    assert side_sources.load_side("last").name == "newer"
    assert run_dir.find_run("last") == Path("results/runs/newer")


def test_baseline_of_this_machine_is_preferred(two_machines, monkeypatch):
    monkeypatch.setattr(machine, "fingerprint", lambda: {"id": "zzz"})
    assert side_sources.load_side("ci").machine == "zzz"


def test_baseline_of_another_machine_is_the_fallback(two_machines, monkeypatch):
    monkeypatch.setattr(machine, "fingerprint", lambda: {"id": "xxx"})
    assert side_sources.load_side("ci").machine == "yyy"


def test_run_is_preferred_to_a_baseline_with_its_name(make_run, at_root):
    baseline.save("ci", [make_run("base")])
    make_run("ci").rename(at_root / "ci")
    assert side_sources.load_side("ci").name == "ci" and side_sources.load_side("ci").prompts
    assert (
        side_sources.load_side("ci").created_utc
        and not (at_root / "ci" / "aaaabbbbcccc.json").exists()
    )


def test_unknown_name_is_rejected_with_the_known_baselines(make_run, at_root):
    with pytest.raises(UsageError, match="none yet"):
        side_sources.load_side("nightly")
    baseline.save("ci", [make_run()])
    (at_root / "empty").mkdir()
    for name in ("nightly", "empty", "../cwd", ""):
        with pytest.raises(
            UsageError, match=r"not a run, a folder of runs, or a baseline .*: ci"
        ) as caught:
            side_sources.load_side(name)
        assert "specbench list runs" in caught.value.hint
    with pytest.raises(UsageError, match="there is no run"):
        side_sources.load_side("last")
