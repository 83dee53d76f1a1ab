"""Tests of the machine lock, with which several runs measure in turn."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from threading import Thread

import psutil
import pytest

from specbench_cli.config.run import RunConfig
from specbench_cli.errors import UsageError
from specbench_cli.measure import local, machine_lock
from specbench_cli.measure import run as execute
from specbench_cli.measure.machine_lock import MachineLock
from specbench_cli.store.run_dir import RunDir

WORKER = """
import sys
from pathlib import Path
from specbench_cli.measure.machine_lock import MachineLock
own, log = MachineLock(Path(sys.argv[1])), Path(sys.argv[2])
for window in range(int(sys.argv[4])):
    met = own.pass_on()
    with log.open("a") as file:
        file.write(f"{sys.argv[3]}{window} {met}\\n")
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "new" / "turns"


def start_run(file, name, windows, log, alive):
    """Start a thread that measures `windows` windows in turn and logs each."""

    def work():
        lock = MachineLock(file, name, alive=lambda other: other in alive)
        for _ in range(windows):
            has_partner = lock.pass_on()
            log.append((name, has_partner))
        alive.discard(name)
        lock.close()

    thread = Thread(target=work)
    thread.start()
    return thread


def test_two_runs_measure_in_turn_until_one_ends(file):
    log, alive = [], {"a", "b"}
    threads = [start_run(file, name, windows, log, alive) for name, windows in (("a", 8), ("b", 5))]
    for thread in threads:
        thread.join(20)
    first = log[0][0]
    second = "b" if first == "a" else "a"
    assert [name for name, _ in log[:9]] == [first, second] * 4 + [first]
    assert [entry for entry in log if entry[0] == "a"][-2:] == [("a", False)] * 2
    assert len(log) == 13


def test_processes_take_turns(file, tmp_path):
    log = tmp_path / "log"
    both = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(file), str(log), name, "3"])
        for name in "ab"
    ]
    assert [process.wait(60) for process in both] == [0, 0]
    order = [line[0] for line in log.read_text().splitlines()]
    assert sorted(order) == list("aaabbb")
    assert order[:4] in (list("abab"), list("baba"))


def test_run_that_dies_does_not_block_the_other(file):
    file.parent.mkdir()
    file.write_text(json.dumps({"last": "c", "there": ["c", "d"]}))
    with closing(MachineLock(file, "a", alive=lambda name: name == "d")) as lock:
        lock._alive = lambda name: False
        assert not lock.pass_on()
    assert json.loads(file.read_text()) == {"last": "a", "there": ["a"]}


def test_process_with_a_reused_pid_is_ignored(file, monkeypatch):
    monkeypatch.setattr(machine_lock, "PARTNER_WAIT_S", 0.05)
    file.parent.mkdir()
    now = psutil.Process()
    before = f"{now.pid} {now.create_time() - 100:.2f}"
    file.write_text(json.dumps({"last": before, "there": [before]}))
    with closing(MachineLock(file)) as lock:
        assert not lock.pass_on()
    assert len(json.loads(file.read_text())["there"]) == 1


def test_first_run_waits_a_limited_time_for_a_second(file, monkeypatch):
    monkeypatch.setattr(machine_lock, "PARTNER_WAIT_S", 0.05)
    with closing(MachineLock(file, "a")) as lock:
        assert not lock.pass_on()


def test_a_run_that_continued_alone_does_not_wait_again(file, monkeypatch):
    sleeps, clock = [], iter(range(10**6))
    monkeypatch.setattr(machine_lock.time, "sleep", sleeps.append)
    monkeypatch.setattr(machine_lock.time, "monotonic", lambda: next(clock))
    with closing(MachineLock(file, "a")) as lock:
        assert not lock.pass_on()
        assert len(sleeps) == machine_lock.PARTNER_WAIT_S  # a check takes one second
        for _ in range(5):
            assert not lock.pass_on()
        assert len(sleeps) == machine_lock.PARTNER_WAIT_S + 5


def test_a_run_that_continued_alone_takes_turns_with_a_late_partner(file, monkeypatch):
    monkeypatch.setattr(machine_lock, "PARTNER_WAIT_S", 0.0)
    log, alive = [], {"a"}
    with closing(MachineLock(file, "a", alive=lambda name: name in alive)) as lock:
        assert not lock.pass_on()
        alive.add("b")
        partner = start_run(file, "b", 1, log, alive)
        end = time.monotonic() + 10
        while not lock.pass_on():
            assert time.monotonic() < end
    alive.discard("a")
    partner.join(10)
    assert [name for name, _ in log] == ["b"]


@pytest.mark.usefixtures("small_pair")
def test_no_later_pass_waits_if_one_continued_alone(specbench, file, monkeypatch):
    waited, opened = [], []
    monkeypatch.setattr(machine_lock, "PARTNER_WAIT_S", 0.0)

    def open_new_lock(path):  # each pass is a new process
        for each in opened:
            each.close()
        opened.append(MachineLock(path))
        return opened[-1]

    monkeypatch.setattr(local, "get_machine_lock", open_new_lock)

    def pass_on(lock):
        waited.append(lock.waits_for_partner)
        lock.waits_for_partner = False
        return False

    monkeypatch.setattr(machine_lock.MachineLock, "pass_on", pass_on)

    def run_here(run_dir, number, *_, **__):
        part = RunDir.open(run_dir.path)
        part.share_lock_of(run_dir)
        execute.measure_repeat(plan, part, log, number, file, False)

    monkeypatch.setattr(execute, "run_repeat", run_here)
    config = {"methods": [{"name": "vanilla"}], "limit": 3, "max_new_tokens": 8, "repeats": 3}
    log = specbench.log()
    checked = RunConfig.model_validate({**config, "allow_noise": True})
    plan, run_dir = execute.start_run(checked, {}, specbench.path(1), log)
    execute.measure_run(plan, run_dir, log, in_turn=file)
    opened[-1].close()
    assert len(opened) == 3
    assert waited[0] and len(waited) >= 3 and not any(waited[1:])


@pytest.mark.parametrize("there", ["[1e400]", '"abc"', "null", "[null]", '{"a": 1}', "7"])
def test_file_with_invalid_names_is_not_changed(file, there):
    file.parent.mkdir()
    file.write_text(f'{{"last": null, "there": {there}}}')
    with pytest.raises(UsageError, match="not a lock file"):
        MachineLock(file)


@pytest.mark.parametrize("name", ["", "a", f"{10**30} 5", "1e400 5", "-1 5", "nan"])
def test_a_name_without_a_process_is_ignored(file, monkeypatch, name):
    monkeypatch.setattr(machine_lock, "PARTNER_WAIT_S", 0.0)
    file.parent.mkdir()
    file.write_text(json.dumps({"last": None, "there": [name]}))
    with closing(MachineLock(file)) as lock:
        assert not lock.pass_on()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_is_rejected(tmp_path, kind):
    mine, place = tmp_path / "mine", tmp_path / "turns"
    mine.write_text("{}")
    place.symlink_to(mine) if kind == "link" else os.mkfifo(place)
    with pytest.raises(UsageError, match=r"--in-turn .*turns is a link"):
        MachineLock(place)
    assert mine.read_text() == "{}"


def test_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="--in-turn") as caught:
        MachineLock(tmp_path)
    assert "does not exist" in caught.value.hint


@pytest.mark.parametrize("text", ["[", "[]", "7", '{"mine": 1}', "words"])
def test_file_with_other_content_is_not_changed(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UsageError, match="not a lock file") as caught:
        MachineLock(file)
    assert "does not exist" in caught.value.hint
    assert file.read_text() == text
