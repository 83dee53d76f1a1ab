"""The command line: exit codes, the format of errors, and a start without torch."""

import errno
import logging
import os
import platform
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from specbench_cli import __version__, app, registry
from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError
from specbench_cli.measure import environment

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "pandas", "matplotlib", "datasets", "scipy", "numpy")
LIGHT_COMMANDS = (
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["report", "--help"],
    ["train", "--help"],
    ["train", "draft", "--help"],
    ["predict", "--help"],
    ["list", "--help"],
    ["list", "methods"],
    ["list", "tasks"],
    ["list", "runs"],
)


def specbench(*args, cwd=None, **options):
    """Start the command line in a new process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = [sys.executable, "-m", "specbench_cli", *args]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture(autouse=True)
def _no_debug(monkeypatch):
    monkeypatch.setenv("SPECBENCH_DEBUG", "")


@pytest.fixture
def run(capsys):
    """Return a function that runs a command and returns exit code, stdout and stderr."""

    def call(*args):
        code = app._run(list(args))
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def run_failing(monkeypatch, run):
    """Return a function that runs a command which raises an exception."""

    def call(fault, *args):
        broken = typer.Typer()

        @broken.callback()
        def top():
            pass

        @broken.command("break")
        def raising():
            raise fault

        monkeypatch.setattr(app, "app", broken)
        return run("break", *args)

    return call


# Start


@pytest.mark.parametrize("args", LIGHT_COMMANDS, ids=" ".join)
def test_a_light_command_imports_no_heavy_package(args):
    code = (
        "import sys\nfrom specbench_cli.app import main\n"
        f"try: main({args!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("args", [["--help"], ["list", "methods"]], ids=" ".join)
def test_light_command_takes_under_400_ms(args):
    def cpu_seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        specbench(*args, cwd=ROOT).communicate()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # With one thread and no network, CPU time equals wall time on a quiet machine.
    assert any(cpu_seconds() < 0.4 for _ in range(5))


# Contents of stdout and stderr


VERSIONS = f"Python {platform.python_version()}\ntorch {metadata.version('torch')}\n"


@pytest.mark.parametrize(
    ("commit", "line"),
    [
        (None, ""),
        ({"commit": "0123456789abcdef", "dirty": False}, "commit 01234567\n"),
        ({"commit": "0123456789abcdef", "dirty": True}, "commit 01234567 with changes\n"),
    ],
)
def test_versions_and_the_commit_of_a_checkout_are_printed(commit, line, run, monkeypatch):
    monkeypatch.setattr(environment, "git", lambda: commit)
    assert run("--version") == (0, f"specbench {__version__}\n{line}{VERSIONS}", "")


def test_no_arguments_print_the_help(run):
    code, out, _ = run()
    assert code == 0
    for command in ("run", "report", "train", "list"):
        assert re.search(rf"\b{command}\b", out)


@pytest.mark.parametrize("args", [["run"], ["report"], ["train"], ["list"], []])
def test_every_command_has_help(run, args):
    assert run(*args, "-h")[0] == run(*args, "--help")[0] == 0


def commands(command, *words):
    """Yield every command that is not a group, with the words that call it."""
    below = getattr(command, "commands", {})
    if not below:
        yield words, command
    for name, each in below.items():
        yield from commands(each, *words, name)


COMMANDS = dict(commands(get_command(app.with_all_options())))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_each_command_has_panels_examples_and_defaults_on_80_columns(
    words, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    command = COMMANDS[words]
    own = [param for param in command.params if not getattr(param, "hidden", False)]
    options = [param for param in own if param.param_type_name == "option"]
    assert [param.name for param in options if param.rich_help_panel is None] == []
    app.normalize_help(command)
    command.get_help(typer.Context(command, info_name=" ".join(words)))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert re.findall(r"<(bool|str|path|int|float|list)\b", printed) == []
    required = sum(param.required for param in own)
    assert printed.count("[required]") == required
    assert "(off)" not in printed and "[default: none]" not in printed
    assert "Examples:" in printed.partition("╭")[0]


def test_only_the_named_command_is_built():
    selected = app._select_commands(["train", "draft", "--help"])
    (group,) = selected.registered_groups
    assert [each.name for each in group.typer_instance.registered_commands] == ["draft"]
    assert not selected.registered_commands


# Errors


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        ("rnu", "no such command 'rnu'; did you mean 'run'?", "specbench --help"),
        ("run --limt 3", "no such option: --limt; did you mean --limit?", "specbench run --help"),
        ("run extra", "extra", "specbench run --help"),
        ("run --limit x", "--limit must be a whole number, got 'x'", "specbench run --help"),
        ("run --temperature nan", "--temperature must be a finite number, got nan", "specbench"),
        ("run --verify coupled", "verify 'coupled' needs a temperature above 0", "specbench"),
        ("run --verify greedy", "'greedy' is not one of 'rejection', 'coupled'", "specbench"),
        ("run -m spss", "no method 'spss'; did you mean 'sps'?", "specbench list methods"),
        ("run -m '\x1b[31msps'", r"no method '\x1b[31msps'", "specbench list methods"),
        ("run --plugin gone.py", "the plug-in file gone.py", "--plugin FILE.py"),
        ("run --config gone.yaml", "cannot read gone.yaml", ""),
        ("run --resume gone", "gone contains no run", "specbench list runs"),
        ("run --resume gone --limit 3 --dry-run", "omit --limit, --dry-run", "specbench run"),
        ("list", "missing argument 'KIND'. Choose from: methods, tasks", "specbench list --help"),
        ("list methdos", "'methdos' is not one of 'methods', 'tasks'", "specbench list --help"),
        ("list methods spss", "did you mean 'sps'?", "specbench list methods"),
        ("list runs gone", "unknown run 'gone'", "specbench list runs"),
    ],
)
def test_a_usage_error_is_two_lines_and_exit_code_2(
    run, tmp_path, monkeypatch, args, message, hint
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*shlex.split(args))
    assert code == 2
    assert out == ""
    first, *rest = err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert [line.startswith(f"hint: {hint}") for line in rest] == [True] * bool(hint)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (UsageError("wrong [x]", "do [y]"), 2, "error: wrong [x]\nhint: do [y]\n"),
        (EnvironmentFault("missing"), 3, "error: missing\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (app._Terminated(), 143, "error: terminated\n"),
        (app._HangupSignal(), 129, "error: hung up\n"),
        (OSError(errno.EIO, "of a closed terminal"), 129, ""),
        (
            OSError(errno.EFBIG, "File too large", "here.jsonl"),
            3,
            "error: here.jsonl: File too large\nhint: free some space, or permit the access\n",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            3,
            "error: No usable temporary directory found in ['/tmp']: none is writable\n"
            "hint: free some space, or set another folder: TMPDIR=DIR\n",
        ),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", "here"),
            2,
            "error: here: Is a directory\nhint: name another file or folder\n",
        ),
        (typer.Exit(1), 1, ""),
    ],
)
def test_each_exception_has_its_exit_code(run_failing, fault, code, message):
    assert run_failing(fault) == (code, "", message)


def test_a_bug_is_exit_code_4_and_its_traceback_is_stored(run_failing):
    code, out, err = run_failing(ZeroDivisionError("no [bold] way"))
    assert (code, out) == (ExitCode.BUG, "")
    first, second = err.splitlines()
    assert first == "error: a bug in specbench: ZeroDivisionError: no [bold] way"
    log = Path(second.removeprefix("hint: the traceback is in "))
    assert "raise fault" in log.read_text()
    log.unlink()


@pytest.mark.parametrize("source", ["after", "variable"])
def test_the_traceback_is_printed_on_request(run_failing, monkeypatch, source):
    monkeypatch.setenv("SPECBENCH_DEBUG", "1" if source == "variable" else "")
    _, _, err = run_failing(UsageError("wrong"), *([app.TRACEBACK] if source == "after" else []))
    assert "Traceback (most recent call last)" in err
    assert err.endswith("error: wrong\n")


# Signals and pipes


def test_a_closed_pipe_is_not_an_error():
    with specbench("list", "methods", "--json", cwd=ROOT) as process:
        process.stdout.close()
        assert process.wait() == 0
        assert process.stderr.read() == ""


def run_in_shell(command):
    """Run a command in a shell; return exit code, stdout, stderr."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPECBENCH_DEBUG": ""}
    words = command.replace("specbench", f"{shlex.quote(sys.executable)} -m specbench_cli", 1)
    done = subprocess.run(
        ["/bin/sh", "-c", words], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("command", "code"), [("--version", 0), ("audit nosuch", 2)])
def test_closed_stream_behaves_like_devnull(command, code, closed):
    exit_code, out, err = run_in_shell(f"specbench {command} {closed}")
    assert exit_code == code
    assert out.startswith("" if code or ">&-" in closed.split() else f"specbench {__version__}\n")
    assert bool(out) == (not code and ">&-" not in closed.split())
    assert err.startswith("error: there is no method" if code and "2>&-" not in closed else "")
    assert "Traceback" not in err


def test_descriptor_of_a_closed_stream_is_not_reused():
    program = "import os, sys; from specbench_cli import output; output.open_closed_streams();"
    program += " os.dup2(os.open(sys.argv[1], os.O_RDONLY), 9); assert os.fstat(1).st_rdev"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -c '{program}' {__file__} <&- >&- 2>&-"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0


@pytest.mark.parametrize("command", ["--version", "list methods --json", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_stdout_on_a_full_disk_is_an_error(command, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    code, _, err = run_in_shell(f"specbench {command} > /dev/full")
    assert code == 3
    assert err == (
        "error: stdout: No space left on device\nhint: free some space, or permit the access\n"
    )


class Refusal(Exception):
    """Exception of a library for a full disk, like that of safetensors."""


def write_text():
    Path("/dev/full").write_text("x")


def write_json():
    with Path("/dev/full").open("w") as file:
        for _ in range(10_000):
            file.write("x" * 10)


def save(path=Path("/dev/full")):
    raise Refusal("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("write_fully", [write_text, write_json, save])
def test_full_disk_names_the_file_that_could_not_be_written(run, monkeypatch, write_fully):
    monkeypatch.setattr(registry, "check_shadowing", write_fully)
    assert run("doctor") == (
        3,
        "",
        "error: /dev/full: No space left on device\nhint: free some space, or permit the access\n",
    )


@pytest.fixture
def _heeds_hangups():
    """Restore the default of SIGHUP, which processes of `nohup` and their children ignore."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_heeds_hangups")
@pytest.mark.parametrize(
    ("sent_signal", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signal_ends_the_command_with_its_exit_code(tmp_path, sent_signal, code):
    (tmp_path / "sleeper.py").write_text(
        "import sys\nimport time\nprint('ready', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    with specbench("run", "--plugin", "sleeper.py", cwd=tmp_path) as process:
        assert process.stderr.readline() == "ready\n"
        process.send_signal(sent_signal)
        assert process.wait(timeout=30) == code
        assert "Traceback" not in process.stderr.read()


@pytest.mark.usefixtures("_heeds_hangups")
@pytest.mark.parametrize(
    ("sent_signal", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_during_a_finaliser_is_not_lost(sent_signal, code):
    program = f"""
import os, sys, time
from specbench_cli import app, registry

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), {int(sent_signal)})
        time.sleep(0.001)

def load():
    Finalised()
    time.sleep(60)

registry.check_shadowing = load
sys.argv = ["specbench", "doctor"]
app.main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith("error: ")


# Files and packages in the working folder


@pytest.mark.parametrize("name", ["methods", "datasets_cfg"])
@pytest.mark.parametrize("kind", ["package", "module", "namespace"])
def test_a_package_that_shadows_specbench_s_is_named(tmp_path, name, kind):
    if kind == "module":
        (tmp_path / f"{name}.py").touch()
    else:
        (tmp_path / name).mkdir()
        if kind == "package":
            (tmp_path / name / "__init__.py").touch()
    # `python -m specbench_cli` leaves the working folder out of the path: the package is elsewhere.
    path = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    process = specbench("list", "methods", cwd=tmp_path, env=path)
    _, err = process.communicate()
    if kind == "namespace":  # a folder without __init__.py never hides a package
        assert process.returncode == 0
    else:
        assert process.returncode == 2
        assert f"another package named '{name}' shadows specbench's: {tmp_path}" in err


def test_an_interrupt_that_an_import_replaced_is_an_interrupt(monkeypatch, capsys):
    def load(*_):
        with suppress(KeyboardInterrupt):
            app._interrupt(signal.SIGINT, None)
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(app, "_interrupted", [])
    monkeypatch.setattr(registry, "check_shadowing", load)
    assert app._run(["doctor"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_the_entry_point_handles_an_interrupt_before_slow_imports():
    code = "import sys, specbench_cli.__main__ as m; print({'typer', 'rich'} & {*sys.modules},"
    code += " flush=True); m._leave(2, None)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    assert done.stdout == "set()\n"


# Messages that Python prints


@pytest.fixture
def messages_of_python(monkeypatch):
    """Install the command line's handlers for Python's messages during a test."""
    factory = logging.getLogRecordFactory()
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        app._escape_python_messages()
        yield
    logging.setLogRecordFactory(factory)


HIDDEN = "\x1b]0;owned\x07\u202e"


def _warn():
    warnings.warn(HIDDEN, stacklevel=1)


def _log():
    log = logging.getLogger("somebody's")
    log.addHandler(handler := logging.StreamHandler(sys.stderr))
    log.error("read %s", HIDDEN)
    log.removeHandler(handler)


@pytest.mark.usefixtures("messages_of_python")
@pytest.mark.parametrize("with_traceback", [False, True])
def test_logged_text_cannot_be_a_github_workflow_command(with_traceback, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    words = "x\n::error::pwned ##[set-output name=x]y"
    log = logging.getLogger("somebody's")
    log.addHandler(handler := logging.StreamHandler(sys.stderr))
    try:
        raise ValueError(words)
    except ValueError:
        log.error("got %s", words, exc_info=with_traceback)
    log.removeHandler(handler)
    lines = capsys.readouterr().err.splitlines()
    assert not any(line.startswith("::") or "##[" in line for line in lines)


def _fail_in_a_thread():
    def fail():
        raise RuntimeError(HIDDEN)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


def _fail_in_a_finaliser():
    class Object:
        def __del__(self):
            raise RuntimeError(HIDDEN)

    before, sys.unraisablehook = sys.unraisablehook, app._resend_signal
    Object()
    sys.unraisablehook = before


@pytest.mark.parametrize("message", [_warn, _log, _fail_in_a_thread, _fail_in_a_finaliser])
def test_hidden_characters_in_messages_of_python_are_escaped(messages_of_python, capsys, message):
    message()
    printed = capsys.readouterr().err
    assert "\\x1b]0;owned\\x07\\u202e" in printed
    assert not set(HIDDEN) & set(printed) & set("\x1b\x07\u202e")


@pytest.mark.parametrize("kind", [RuntimeError, UsageError])
def test_a_very_long_error_is_cut_on_the_terminal_and_in_its_log(run_failing, kind):
    code, _, printed = run_failing(kind(HIDDEN + "x" * 1_000_000), "--traceback")
    assert code in (ExitCode.BUG, ExitCode.USAGE)
    assert len(printed) < 100_000
    assert "\x1b]" not in printed
    for file in re.findall(r"\S+\.log", printed):
        text = Path(file).read_text(encoding="utf-8")
        Path(file).unlink()
        assert len(text) < 100_000
        assert "\x1b" not in text
