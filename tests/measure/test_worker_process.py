"""Tests of a worker process: its replies, timeouts, and how it ends."""

import pickle
import signal
import sys
import time

import psutil
import pytest

from specbench_cli.interpreter import python_command
from specbench_cli.measure.worker_process import ProcessEnded, WorkerProcess

PROGRAM = """
import os, pickle, signal, subprocess, sys, time
from specbench_cli.measure import worker_process

class Orders:
    def double(self, number):
        return 2 * number

    def start_child(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

    def sleep(self):
        time.sleep(60)

    def exit(self, code):
        os._exit(code)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

def serve():
    worker_process.serve(Orders(), lambda work: pickle.dumps(work()))
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / "orders_of_a_test.py").write_text(PROGRAM)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    process = WorkerProcess(python_command("orders_of_a_test:serve"), takes_orders=True)
    yield process
    process.end()


def answer(worker, order, *arguments, within=30.0):
    worker.send(order, *arguments)
    return pickle.loads(worker.receive(within))  # noqa: S301


def test_a_process_carries_out_requests_in_order(worker):
    assert [answer(worker, "double", number) for number in (2, 21)] == [4, 42]


def test_a_process_is_suspended_with_its_children_until_the_next_request(worker):
    child = psutil.Process(answer(worker, "start_child"))
    worker.suspend()
    deadline = time.monotonic() + 5
    while child.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    assert answer(worker, "double", 4) == 8
    assert child.status() != psutil.STATUS_STOPPED


def test_a_process_ends_with_its_children(worker):
    child = psutil.Process(answer(worker, "start_child"))
    assert worker.end() is None  # it was alive
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline


def test_a_missing_reply_is_a_timeout(worker):
    assert answer(worker, "double", 1) == 2
    with pytest.raises(TimeoutError, match=r"no answer after 0\.1 s"):
        answer(worker, "sleep", within=0.1)


@pytest.mark.parametrize(
    ("order", "arguments", "code"), [("exit", (7,), 7), ("kill", (), -signal.SIGKILL)]
)
def test_a_process_that_ends_before_it_replies_is_an_error_with_its_exit_code(
    worker, order, arguments, code
):
    with pytest.raises(ProcessEnded) as caught:
        answer(worker, order, *arguments)
    assert caught.value.code == code
    assert worker.end() == code
