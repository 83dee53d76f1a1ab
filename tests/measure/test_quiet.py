"""Tests of the noise meter. They compare differences, because the machine may be busy."""

import subprocess
import sys
import threading
import time

import psutil
import pytest

from specbench_cli.measure import quiet
from specbench_cli.measure.quiet import NoiseMeter, tree_seconds

SPIN = "import time\nwhile time.process_time() < {seconds}: pass"
ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", {spin!r}], start_new_session=True, stdout=subprocess.DEVNULL
)
print(child.pid, flush=True)
os._exit(0)
"""


@pytest.fixture
def readings(monkeypatch):
    """Simulated CPU counters of two CPUs, which a test may change."""
    values = {"total": 100.0, "busy": 10.0, "own": 1.0}
    monkeypatch.setattr(
        quiet,
        "_read",
        lambda _: quiet._Reading(time.monotonic(), values["total"], values["busy"], values["own"]),
    )
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(quiet, "WINDOW_S", 0.05)
    return values


def window(readings, **seconds):
    """Return the other CPU share of a 0.05 s window in which the counters grow by `seconds`."""
    meter = NoiseMeter()
    meter.open()
    for name, value in {"total": 0.1, **seconds}.items():
        readings[name] += value
    return meter.close()


def test_share_is_the_cpu_time_of_other_processes(readings):
    assert window(readings, busy=0.06, own=0.03) == pytest.approx(0.3, rel=0.2)


def test_own_cpu_time_is_not_in_the_share(readings):
    assert window(readings, busy=0.05, own=0.05) == pytest.approx(0.0, abs=1e-9)


def test_cpu_time_of_listed_processes_counts_as_own(monkeypatch):
    seconds = {None: 1.0, 7: 2.5}
    monkeypatch.setattr(quiet, "tree_seconds", lambda pid=None: seconds[pid])
    assert quiet._read([7]).own == 3.5


def test_share_is_never_negative_nor_above_one(readings):
    assert window(readings, busy=0.05, own=0.06) == 0.0
    assert window(readings, busy=5.0) == 1.0


def test_constant_counters_give_no_share(readings):
    assert window(readings, total=0.0) is None


def test_unreadable_counters_give_no_share(monkeypatch):
    monkeypatch.setattr(quiet, "WINDOW_S", 0.01)
    meter = NoiseMeter()
    with monkeypatch.context() as broken:
        broken.setattr(psutil, "cpu_times", lambda: (_ for _ in ()).throw(OSError))
        meter.open()
    assert meter.close() is None


def test_window_is_filled_by_idling(readings):
    meter = NoiseMeter()
    assert meter.elapsed() == 0.0
    meter.open()
    assert not meter.is_full()
    start = time.monotonic()
    meter.close()
    assert time.monotonic() - start >= 0.04
    assert meter.elapsed() == 0.0


def test_closing_a_window_that_is_not_open_is_an_error():
    with pytest.raises(RuntimeError, match="without open"):
        NoiseMeter().close()


def test_real_window_lasts_a_second_and_gives_a_share():
    meter = NoiseMeter()
    meter.open()
    share = meter.close()
    assert share is not None
    assert 0.0 <= share <= 1.0


def test_own_threads_and_children_count_as_own():
    before = tree_seconds()
    spin = compile(SPIN.format(seconds=time.process_time() + 0.2), "spin", "exec")
    thread = threading.Thread(target=exec, args=(spin,))
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-c", SPIN.format(seconds=0.2)], check=True)
    assert tree_seconds() - before >= 0.35


def test_running_child_counts_as_own():
    before = tree_seconds()
    with subprocess.Popen([sys.executable, "-c", SPIN.format(seconds=20)]) as child:
        while sum(psutil.Process(child.pid).cpu_times()[:2]) < 0.2:
            time.sleep(0.02)
        grown = tree_seconds() - before
        child.kill()
    assert grown >= 0.19


def test_process_outside_the_tree_counts_as_other():
    program = ORPHAN.format(spin=SPIN.format(seconds=20))
    out = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    orphan = psutil.Process(int(out))
    try:
        before, orphan_seconds = tree_seconds(), sum(orphan.cpu_times()[:2])
        while sum(orphan.cpu_times()[:2]) - orphan_seconds < 0.5:
            time.sleep(0.02)
        assert tree_seconds() - before < 0.25
    finally:
        orphan.kill()
