"""Runs that take turns: one at work at a time, whatever becomes of the other."""

import json
import subprocess
import sys
from contextlib import closing
from threading import Thread

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
    log, alive = [], {1, 2}
    threads = [at_work(file, name, windows, log, alive) for name, windows in ((1, 8), (2, 5))]
    for thread in threads:
        thread.join(20)
    first = log[0][0]
    together = log[: 2 * 5 - (first == 2)]
    assert [name for name, _ in together[:9]] == [first, 3 - first] * 4 + [first]
    assert [entry for entry in log if entry[0] == 1][-2:] == [(1, False)] * 2
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
    file.write_text(json.dumps({"last": 7, "there": [7, 8]}))
    with closing(Turns(file, 1, alive=lambda name: name == 8)) as own:
        own._alive = lambda name: False
        assert not own.pass_on()
    assert json.loads(file.read_text()) == {"last": 1, "there": [1]}


def test_first_run_waits_for_a_second_but_not_forever(file, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    with closing(Turns(file, 1)) as own:
        assert not own.pass_on()


@pytest.mark.parametrize("spoil", [lambda p: p.mkdir(parents=True), lambda p: p.write_text("[")])
def test_file_that_cannot_be_is_said_with_what_to_do(tmp_path, spoil):
    path = tmp_path / "turns"
    spoil(path)
    with pytest.raises(UsageError, match="--in-turn") as caught:
        Turns(path)
    assert "name" in caught.value.hint
