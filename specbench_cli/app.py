"""Command line: commands, exit codes and error messages.

This module does not import torch, so that `specbench --help` is fast.
"""

from __future__ import annotations

import copy
import errno
import gc
import logging
import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib import metadata
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO, cast

import typer
from typer.main import get_command
from typer.models import CommandInfo, TyperInfo
from typing_extensions import override

from specbench_cli import __version__, output, registry
from specbench_cli.commands import (
    audit,
    compare,
    doctor,
    export,
    init,
    new_method,
    predict,
    publish,
    recommend,
    report,
    run,
)
from specbench_cli.commands.list import EPILOG as LIST_EPILOG
from specbench_cli.commands.list import list_
from specbench_cli.commands.training.app import app as train
from specbench_cli.config import options
from specbench_cli.config.problems import check_one_line, shorten_words
from specbench_cli.errors import (
    EnvironmentFault,
    ExitCode,
    SpecbenchError,
    UsageError,
    find_disk_error,
    message_of,
    to_write_error,
    truncate,
)
from specbench_cli.measure import environment

OWN_PACKAGES = (*registry.SIBLING_PACKAGES, "specbench_cli")

TRACEBACK = "--traceback"

COMPLETION = "_SPECBENCH_COMPLETE"
"""Environment variable that a shell sets to request completions."""

HELP = ["--help", "-h"]

TRAIN = "train"

MOVED_COMMANDS = {
    ("train", "pair"): "embedded pair",
    ("train", "exit"): "embedded exit",
    ("train", "foreign"): "embedded foreign",
    ("train", "quality"): "embedded quality",
    ("train", "grid"): "studies grid",
    ("train", "compare"): "studies compare",
    ("report", "--scaling"): "studies scaling",
}
"""Former commands and options, each with the recipe in the repository that replaces it."""

MAX_TRACE_LENGTH = 20_000
"""Maximum number of characters of a traceback that are printed or logged."""

app = typer.Typer(
    help="Benchmark speculative decoding: speed, acceptance, and whether outputs equal vanilla's.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": HELP},
)
app.command("run", epilog=run.EPILOG)(run.run)
app.command("recommend", epilog=recommend.EPILOG)(recommend.recommend)
app.command("report", epilog=report.EPILOG)(report.report)
app.command("publish", epilog=publish.EPILOG)(publish.publish)
app.command("export", epilog=export.EPILOG)(export.export)
app.command("compare", epilog=compare.EPILOG)(compare.compare)
app.command("predict", epilog=predict.EPILOG)(predict.predict)
app.command("audit", epilog=audit.EPILOG)(audit.audit)
app.command("init", epilog=init.EPILOG)(init.init)
app.command("new-method", epilog=new_method.EPILOG)(new_method.new_method)
app.command("list", epilog=LIST_EPILOG)(list_)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(train, name=TRAIN)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.data(f"specbench {__version__}")
        commit = environment.git()
        if commit is not None:
            output.data(f"commit {commit['commit'][:8]}" + " with changes" * commit["dirty"])
        output.data(f"Python {platform.python_version()}")
        output.data(f"torch {metadata.version('torch')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show versions and exit.",
        ),
    ] = False,
    tracebacks: Annotated[
        bool,
        typer.Option(TRACEBACK, help="Show tracebacks of errors. \\[env: SPECBENCH_DEBUG=1]"),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(
    args: Sequence[str] | None = None,
    commands: typer.Typer | None = None,
    program: str = "specbench",
) -> NoReturn:
    """Run the command line, and exit with one of the codes of `ExitCode`.

    Args:
        args: Arguments after the program's name. Default: the arguments of this process.
        commands: Available commands. None means all commands of `app`.
        program: Name of the program in its help.
    """
    output.open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = cast(TextIO, output.NamedStream(sys.stdout, "stdout"))
    own = args is None  # otherwise the calling program handles Ctrl-C itself
    if own and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # not under nohup
            signal.signal(number, _stop)
    if own:
        sys.unraisablehook = _resend_signal
        _escape_python_messages()
    code = _run(list(sys.argv[1:] if args is None else args), commands, program)
    if signal.getsignal(signal.SIGINT) is _interrupt:  # all output is written
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    code = _flush_stdout(code)
    if own:
        gc.freeze()  # otherwise garbage collection at exit takes seconds
    if (
        own and registry.has_loaded_plugin()
    ):  # an exit handler of a plug-in could change the exit code
        os._exit(code)
    sys.exit(code)


def _run(args: list[str], commands: typer.Typer | None = None, program: str = "specbench") -> int:
    """Run a command and print its errors. Return its exit code."""
    if TRACEBACK in args:  # may precede or follow the command
        os.environ["SPECBENCH_DEBUG"] = "1"
        args = [arg for arg in args if arg != TRACEBACK]
    try:
        args = run.expand_tune(args)
        _check_folders(args)
        if commands is None:
            _check_moved(args)
        registry.check_shadowing()
        command = get_command(_select_commands(args, commands))
        normalize_help(command)
        if COMPLETION in os.environ:  # a shell requests completions
            return int(command.main(args, prog_name="specbench", standalone_mode=False) or 0)
        with command.make_context(program, args) as context:
            return int(command.invoke(context) or ExitCode.OK)
    except typer.Exit as wanted:
        return wanted.exit_code
    except _StopSignal as stopped:
        output.error(stopped.word)
        return stopped.exit_code
    except (KeyboardInterrupt, typer.Abort):
        output.error("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # e.g. `specbench list methods | head -1` closes the pipe
        output.drop_stdout()
        return ExitCode.OK
    except SpecbenchError as fault:
        _show_traceback()
        output.error(shorten_words(fault.message), fault.hint)
        return fault.exit_code
    except Exception as fault:
        return _print_unexpected_error(fault)


def _print_unexpected_error(fault: Exception) -> int:
    """Print an exception that is not a SpecbenchError, and return its exit code."""
    if _interrupted:  # an import converted KeyboardInterrupt into this exception
        output.error("interrupted")
        return ExitCode.INTERRUPTED
    if hasattr(fault, "format_message"):
        return _print_parser_error(fault)
    if isinstance(fault, OSError) and (fault.errno, fault.filename) == (errno.EIO, None):
        output.drop_stdout()  # the terminal was closed
        return ExitCode.HUNG_UP
    _show_traceback()
    if (lacking := _as_environment_fault(fault)) is not None:
        output.error(lacking.message, lacking.hint)
        return lacking.exit_code
    says = ": ".join(filter(None, (type(fault).__name__, message_of(fault))))
    output.error(f"a bug in specbench: {says}", _write_traceback())
    return ExitCode.BUG


def _check_folders(args: Sequence[str]) -> None:
    """Raise UsageError if the value of `--out` contains a line break.

    Commands such as `specbench list runs` print one folder per line.
    """
    for option, value in zip(args, [*args[1:], ""], strict=False):
        name, given, joined = option.partition("=")
        if name in ("--out", "-o"):
            check_one_line("--out", joined if given else value)


def _check_moved(args: Sequence[str]) -> None:
    """Raise UsageError if the arguments name a former command (see `MOVED_COMMANDS`)."""
    for (command, word), recipe in MOVED_COMMANDS.items():
        if args[:1] == [command] and word in (args[1:2] if command == TRAIN else args):
            raise UsageError(
                f"`specbench {command} {word}` is no longer part of the package: it is now a recipe"
                " in the repository",
                f"in a checkout of the repository: python -m recipes.{recipe} --help",
            )


def _flush_stdout(code: int) -> int:
    """Flush stdout. Return `code`, or the exit code of a write error if the flush fails."""
    try:
        sys.stdout.flush()
    except OSError as fault:
        output.drop_stdout()
        if code == ExitCode.OK and (lacking := to_write_error(fault)) is not None:
            output.error(lacking.message, lacking.hint)
            return lacking.exit_code
    return code


def _select_commands(args: list[str], whole: typer.Typer | None = None) -> typer.Typer:
    """Return an app that has only the command named by the first arguments.

    This is faster, because only one command's options are built. The app has all commands for the
    general help, which lacks options, for suggestions after a misspelt name, and for shell
    completion.

    Args:
        whole: Commands to choose from. None means all commands of `app`.
    """
    whole = app if whole is None else whole
    one, name = copy.copy(whole), args[:1]
    one.registered_commands = [
        _with_options(c) for c in whole.registered_commands if c.name in name
    ]
    one.registered_groups = [
        _with_commands(each, _select_commands(args[1:], each.typer_instance))
        for each in whole.registered_groups
        if each.name in name
    ]
    if one.registered_commands or one.registered_groups:
        return one
    if COMPLETION in os.environ or (args and args[0] not in HELP):
        return with_all_options(whole)
    one.registered_commands = [_without_options(each) for each in whole.registered_commands]
    one.registered_groups = []
    for group in whole.registered_groups:
        alone = copy.copy(group.typer_instance or app)
        alone.registered_commands = []
        one.registered_groups.append(_with_commands(group, alone))
    return one


def with_all_options(whole: typer.Typer | None = None) -> typer.Typer:
    """Return the app, or a group of its commands, with the options of every command."""
    whole = app if whole is None else whole
    every = copy.copy(whole)
    every.registered_commands = [_with_options(each) for each in whole.registered_commands]
    every.registered_groups = [
        _with_commands(each, with_all_options(each.typer_instance))
        for each in whole.registered_groups
    ]
    return every


def _with_options(command: CommandInfo) -> CommandInfo:
    """Return a command with its options, which are created from config models."""
    whole = copy.copy(command)
    whole.callback = options.build(command.callback) if command.callback else None
    return whole


def _with_commands(group: TyperInfo, commands: typer.Typer) -> TyperInfo:
    """Return a command group like `group`, with `commands` as its commands."""
    other = copy.copy(group)
    other.typer_instance = commands
    return other


def _without_options(command: CommandInfo) -> CommandInfo:
    """Return a command that has a help text but no options, because building options is slow."""

    def words() -> None: ...

    words.__doc__ = command.callback.__doc__
    bare = copy.copy(command)
    bare.callback = words
    return bare


_interrupted: list[int] = []
"""Numbers of the interrupt signals received so far."""


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _interrupted.append(number)
    raise KeyboardInterrupt


def normalize_help(command: Any) -> None:
    """Change the help text of a command and of its subcommands.

    The help then shows placeholders instead of types, defaults as `[default: X]`, and examples
    before
    the options.
    """
    context = typer.Context(command, help_option_names=HELP)
    for param in command.get_params(context):
        type_of = getattr(param, "display_type_rich", None)  # old versions of typer lack it
        if param.param_type_name == "argument":
            _simplify_usage(param)
            if type_of and "|" not in type_of(context):
                param.display_type_rich = lambda ctx: None
        if getattr(param, "is_flag", False):
            param.metavar = ""
            param.show_default = bool(param.secondary_opts)
        if isinstance(param.show_default, str):
            if param.show_default not in ("none", "off"):
                param.help += f" [dim]\\[default: {param.show_default}][/dim]"
            param.show_default = False
    about = [_one_line(paragraph) for paragraph in (command.help or "").split("\n\n")]
    epilog = (command.epilog or "").split("\n\n")
    if examples := [f"  {line}" for line in epilog if line.startswith("specbench ")]:
        about.append("\n".join(("\bExamples:", *examples)))
        command.epilog = "\n\n".join(
            line for line in epilog if line != "Examples:" and not line.startswith("specbench ")
        )
    command.help = "\n\n".join(about)
    for each in getattr(command, "commands", {}).values():
        normalize_help(each)


def _simplify_usage(argument: Any) -> None:
    """Show an argument as `RUN`, `[RUN]`, `RUN...` or `[RUN]...` in the usage line."""
    word = str(argument.metavar)
    word = word if argument.required or " " in word else f"[{word}]"
    word += "..." if argument.nargs == -1 and " " not in word else ""
    argument.get_usage_pieces = lambda ctx: [word]


def _one_line(paragraph: str) -> str:
    return " ".join(paragraph.split())


class _StopSignal(KeyboardInterrupt):
    """Base class for signals that end the program. Other code handles them like Ctrl-C."""

    exit_code: ExitCode
    word: str


class _Terminated(_StopSignal):
    exit_code, word = ExitCode.TERMINATED, "terminated"


class _HangupSignal(_StopSignal):
    """Error for the signal SIGHUP: the terminal was closed."""

    exit_code, word = ExitCode.HUNG_UP, "hung up"


_STOP_SIGNALS: dict[int, type[_StopSignal]] = {signal.SIGTERM: _Terminated}
if hasattr(signal, "SIGHUP"):
    _STOP_SIGNALS[signal.SIGHUP] = _HangupSignal


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    for other in _STOP_SIGNALS:  # ignore further signals, which a shutdown sends
        signal.signal(other, signal.SIG_IGN)
    raise _STOP_SIGNALS[number]


_AGAIN_S = 0.01


def _resend_signal(args: sys.UnraisableHookArgs) -> None:
    """Send the process a signal again if its exception was raised in a finalizer.

    Python discards exceptions in finalizers, so the signal would be lost.
    """
    if not isinstance(args.exc_value, KeyboardInterrupt):
        lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        _note_trace(f"{args.err_msg or 'Exception ignored in'}: {args.object!r}\n{''.join(lines)}")
        return
    number = next((n for n, kind in _STOP_SIGNALS.items() if kind is args.exc_type), signal.SIGINT)
    if number in _STOP_SIGNALS:
        signal.signal(number, _stop)
    threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()


def _escape_python_messages() -> None:
    """Escape control characters in Python's own warnings, log records and exceptions of threads.

    These may contain untrusted text, e.g. the model_type of a checkpoint.
    """

    class EscapedLogRecord(logging.LogRecord):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if (
                self.exc_info and self.exc_info[0] is not None
            ):  # handlers print `exc_text` if it is set
                lines = traceback.format_exception(*self.exc_info)
                self.exc_text = output.escape_for_log(truncate("".join(lines), MAX_TRACE_LENGTH))

        @override
        def getMessage(self) -> str:
            return output.escape_for_log(truncate(super().getMessage()))

    def print_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: str | None = None,
    ) -> None:
        _note_trace(warnings.formatwarning(message, category, filename, lineno, line))

    def print_thread_error(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
            name = args.thread.name if args.thread else "?"
            _note_trace(f"Exception in thread {name}:\n{''.join(lines)}")

    logging.setLogRecordFactory(EscapedLogRecord)
    warnings.showwarning = print_warning
    threading.excepthook = print_thread_error


def _print_parser_error(fault: Exception) -> ExitCode:
    """Print an error of the command-line parser in specbench's style.

    Only attributes of the error are used, because typer does not export its class.
    """
    message: str = getattr(fault, "format_message", str)()
    near = " or ".join(sorted(getattr(fault, "possibilities", None) or ()))
    if near:
        message = f"{getattr(fault, 'message', message).partition('.')[0]}. Did you mean {near}?"
    message = " ".join(message.replace("Value error, ", "").split())
    message = message.replace(". Did you mean", "; did you mean")
    context = getattr(fault, "ctx", None)
    hint = f"{context.command_path} --help" if context is not None else "specbench --help"
    message = shorten_words(f"{message[:1].lower()}{message[1:].rstrip('.')}")
    output.error(message, hint)
    return ExitCode.USAGE


_OTHER_KIND = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})
"""Errors if a path is not the expected kind, e.g. a folder instead of a file."""


def _as_environment_fault(fault: Exception) -> SpecbenchError | None:
    """Return an error message for an exception that the machine or a wrong path caused.

    Return None for any other exception.
    """
    if isinstance(fault, OSError) and fault.errno == errno.ENAMETOOLONG:
        return UsageError(f"invalid file name: {fault.strerror}: {str(fault.filename)[:60]}")
    if isinstance(fault, FileNotFoundError) and "temporary directory" in str(fault):
        return EnvironmentFault(
            f"{fault.strerror}: none is writable",
            "free some space, or set another folder: TMPDIR=DIR",
        )
    if isinstance(fault, OSError) and fault.errno in _OTHER_KIND and fault.filename is not None:
        return UsageError(f"{fault.filename}: {fault.strerror}", "name another file or folder")
    failed = fault if isinstance(fault, OSError) else find_disk_error(fault)
    if failed is not None:
        return to_write_error(failed)
    package = str(getattr(fault, "name", None) or "").partition(".")[0]
    if isinstance(fault, ModuleNotFoundError) and package not in OWN_PACKAGES:
        return EnvironmentFault(
            f"the Python package {package!r} is not installed", "pip install specbench-cli"
        )
    return None


def _show_traceback() -> None:
    if os.environ.get("SPECBENCH_DEBUG"):
        _note_trace(_trace())


def _note_trace(text: str) -> None:
    output.note(truncate(text.rstrip(), MAX_TRACE_LENGTH))


def _trace() -> str:
    """Return the traceback of the current exception as text.

    It is truncated, because a plug-in may cause a very long one.
    """
    return truncate(traceback.format_exc().rstrip(), MAX_TRACE_LENGTH)


def _write_traceback() -> str:
    """Write the current traceback to a file. Return a hint that names the file."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="specbench-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            file.write(output.escape_hidden(_trace()) + "\n")
    except OSError:
        return f"run the command again with {TRACEBACK} to see the traceback"
    return f"the traceback is in {file.name}"
