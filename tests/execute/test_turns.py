"""Runs that take turns: one at work at a time, whatever becomes of the other."""

import json
import subprocess
import sys
from contextlib import closing
from threading import Thread

import psutil
import pytest

from specbench_cli.errors import UsageError
from specbench_cli.execute import turns
from specbench_cli.execute.turns import Turns

WORKER = """
import sys
from pathlib import Path
from specbench_cli.execute.turns import Turns
own, log = Turns(Path(sys.argv[1])), Path(sys.argv[2])
for window in range(int(sys.argv[4])):
    met = own.pass_on()
    with log.open("a") as file:
        file.write(f"{sys.argv[3]}{window} {met}\\n")
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "new" / "turns"


def at_work(file, name, windows, log, alive):
    """A run of so many windows, which tells the log when it measures."""

    def work():
        own = Turns(file, name, alive=lambda other: other in alive)
        for _ in range(windows):
            met = own.pass_on()
            log.append((name, met))
        alive.discard(name)
        own.close()

    thread = Thread(target=work)
    thread.start()
    return thread


def test_two_runs_measure_in_turn_and_the_longer_one_ends_alone(file):
    log, alive = [], {"a", "b"}
    threads = [at_work(file, name, windows, log, alive) for name, windows in (("a", 8), ("b", 5))]
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


def test_run_that_dies_at_work_holds_up_nobody(file):
    file.parent.mkdir()
    file.write_text(json.dumps({"last": "c", "there": ["c", "d"]}))
    with closing(Turns(file, "a", alive=lambda name: name == "d")) as own:
        own._alive = lambda name: False
        assert not own.pass_on()
    assert json.loads(file.read_text()) == {"last": "a", "there": ["a"]}


def test_process_of_a_number_that_was_given_again_takes_no_part(file, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    file.parent.mkdir()
    now = psutil.Process()
    before = f"{now.pid} {now.create_time() - 100:.2f}"
    file.write_text(json.dumps({"last": before, "there": [before]}))
    with closing(Turns(file)) as own:
        assert not own.pass_on()
    assert len(json.loads(file.read_text())["there"]) == 1


def test_first_run_waits_for_a_second_but_not_forever(file, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    with closing(Turns(file, "a")) as own:
        assert not own.pass_on()


def test_file_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(UsageError, match="--in-turn") as caught:
        Turns(tmp_path)
    assert "can be written" in caught.value.hint


@pytest.mark.parametrize("text", ["[", "[]", "7", '{"mine": 1}', "words"])
def test_file_of_something_else_is_left_alone(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UsageError, match="of something else") as caught:
        Turns(file)
    assert "does not exist" in caught.value.hint
    assert file.read_text() == text
