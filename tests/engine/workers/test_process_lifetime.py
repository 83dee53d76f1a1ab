"""Interrupts of worker processes, which must not print tracebacks."""

import signal
import subprocess
import sys

from specbench_cli.engine.workers.process_lifetime import block_interrupts


def start_process(code, *, deaf):
    command = [sys.executable, "-c", f"import sys, time; print(flush=True); {code}"]
    if not deaf:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with block_interrupts():
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def interrupt(process):
    """Interrupt a running process, and return its exit code and stderr."""
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr.decode()


def test_a_process_that_ignores_interrupts_goes_on_silently():
    assert interrupt(start_process("time.sleep(0.2)", deaf=True)) == (0, "")
    code, stderr = interrupt(start_process("time.sleep(60)", deaf=False))
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr


def test_the_starting_process_handles_interrupts_again_afterwards():
    with block_interrupts():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_during_the_import_ends_a_process_that_may_be_interrupted():
    leave = (
        "from specbench_cli.engine.workers.process_lifetime import exit_on_interrupt;"
        " exit_on_interrupt()"
    )
    assert interrupt(start_process(f"time.sleep(0.2); {leave}; time.sleep(60)", deaf=True)) == (
        130,
        "",
    )
