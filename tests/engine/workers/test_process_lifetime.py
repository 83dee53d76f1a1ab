"""Interrupts, and the processes that somebody started who answers them."""

import signal
import subprocess
import sys

from specbench_cli.engine.workers.process_lifetime import block_interrupts


def started(code, *, deaf):
    command = [sys.executable, "-c", f"import sys, time; print(flush=True); {code}"]
    if not deaf:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with block_interrupts():
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def interrupted(process):
    """Its exit code, and what it said on stderr, interrupted while it is at work."""
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    return process.returncode, said.decode()


def test_a_process_that_is_started_deaf_goes_on_without_a_word():
    assert interrupted(started("time.sleep(0.2)", deaf=True)) == (0, "")
    code, said = interrupted(started("time.sleep(60)", deaf=False))
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in said


def test_who_starts_one_hears_interrupts_again_afterwards():
    with block_interrupts():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_that_came_while_it_imported_ends_a_process_that_may_leave_at_one():
    leave = (
        "from specbench_cli.engine.workers.process_lifetime import exit_on_interrupt;"
        " exit_on_interrupt()"
    )
    assert interrupted(started(f"time.sleep(0.2); {leave}; time.sleep(60)", deaf=True)) == (130, "")
