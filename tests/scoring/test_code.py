"""The limits that generated code runs under."""

import os
import time

import psutil
import pytest

from specbench_cli.scoring import code


def ran(program: str) -> bool:
    return code.tested(program, "", "")


def is_gone(pid: int) -> bool:
    """Whether a process ended within five seconds; nobody may have taken note of it yet."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SPECBENCH_SECRET", "x")
    assert ran(
        "import os\nassert 'SPECBENCH_SECRET' not in os.environ and 'HOME' not in os.environ"
    )


def test_folder_is_empty_and_gone_afterwards(tmp_path):
    told = tmp_path / "told"
    assert ran(
        "import os\nassert os.listdir() == []\nopen('left', 'w').write('x')\n"
        f"open({str(told)!r}, 'w').write(os.getcwd())"
    )
    assert not os.path.exists(told.read_text())  # noqa: PTH110 (a path as another process wrote it)


def test_endless_loop_ends_at_the_limit(monkeypatch):
    monkeypatch.setattr(code, "TIMEOUT_S", 0.5)
    began = time.monotonic()
    assert not ran("while True: pass")
    assert time.monotonic() - began < 10


def test_children_die_with_the_program(monkeypatch, tmp_path):
    monkeypatch.setattr(code, "TIMEOUT_S", 1.5)
    assert not ran(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "child.wait()"
    )
    written = tmp_path / "child"
    if written.exists():  # on a very slow machine the program dies before it starts a child
        assert is_gone(int(written.read_text()))


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(4 * 1024**3)",
        "open('big', 'wb').write(bytes(2 * 1024**2))",
        "files = [open('f' + str(i), 'w') for i in range(200)]",
        "input()",
        "raise SystemExit",
        "import os\nos._exit(0)",
        "assert False",
        "x = (",
        "x = '\\0'\0",
    ],
)
def test_program_that_exceeds_a_limit_or_ends_otherwise_fails(program):
    assert not ran(program)


def test_odd_escapes_warn_nobody():
    assert ran("x = '\\d'")
