"""Output of commands: data on stdout, messages on stderr, TSV for pipes, no markup in values."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.text import Text

from specbench_cli import output
from specbench_cli.errors import ExitCode


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that turns stdout into a terminal and returns its screen."""

    class Screen(io.StringIO):
        def isatty(self):
            return True

    def switch_on():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        screen = Screen()
        monkeypatch.setattr("sys.stdout", screen)
        return screen

    return switch_on


ROWS = [
    {"name": "sps", "aliases": ("sd", "speculative"), "speedup": 1.23456789, "note": None},
    {"name": "[red]x[/red]", "aliases": (), "speedup": 1.0, "note": "a\tb\nc"},
]


def test_data_goes_to_stdout_and_messages_to_stderr(capsys):
    output.data("a result")
    output.note("some talk")
    output.error("wrong", "do this")
    printed = capsys.readouterr()
    assert printed.out == "a result\n"
    assert printed.err == "some talk\nerror: wrong\nhint: do this\n"


def test_table_for_a_pipe_is_tab_separated(capsys):
    output.rows(ROWS)
    assert capsys.readouterr().out == (
        "name\taliases\tspeedup\tnote\nsps\tsd, speculative\t1.23457\t\n[red]x[/red]\t\t1\ta b c\n"
    )


def test_table_for_a_person_is_aligned(terminal):
    screen = terminal()
    output.rows(ROWS, ["name", "speedup"])
    lines = [line.rstrip() for line in Text.from_ansi(screen.getvalue()).plain.splitlines()]
    assert lines == ["name          speedup", "sps           1.235", "[red]x[/red]  1"]


def test_a_narrow_terminal_gets_the_columns_below_each_other_and_no_word_is_cut(
    terminal, monkeypatch
):
    screen = terminal()
    monkeypatch.setenv("COLUMNS", "40")
    rows = [
        {
            "name": "a-model-7b-instruct",
            "draft": "a-model-1b-instruct",
            "says": "two words, more",
        },
        {"name": "b", "draft": "", "says": "one"},
    ]
    output.rows(rows)
    screen_lines = Text.from_ansi(screen.getvalue()).plain.splitlines()
    assert [line.rstrip() for line in screen_lines] == [
        "name                 draft",
        "a-model-7b-instruct  a-model-1b-instruct",
        "b",
        "name                 says",
        "a-model-7b-instruct  two words, more",
        "b                    one",
    ]


def test_long_lines_are_not_wrapped(capsys):
    output.data("x" * 500)
    output.note("y" * 500)
    printed = capsys.readouterr()
    assert printed.out == "x" * 500 + "\n"
    assert printed.err == "y" * 500 + "\n"


@pytest.mark.parametrize("say", [output.data, output.note, output.error])
def test_control_characters_are_escaped(capsys, say):
    say("task \x1b[31m\x07.jsonl [bold]:smile:")
    printed = "".join(capsys.readouterr())
    assert r"task \x1b[31m\x07.jsonl [bold]:smile:" in printed
    assert "\x1b" not in printed


def test_force_color_draws_the_table_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.rows(ROWS, ["name"])
    assert "\x1b[" in capsys.readouterr().out


def test_no_color_removes_colours_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    screen = terminal()
    output.data(Text("red", "red"))
    assert screen.getvalue() == "red\n"


def test_facts_for_a_pipe_are_tab_separated(capsys):
    output.facts({"name": "sps", "guarantee": {"greedy": "exact_tokens"}, "empty": None})
    assert capsys.readouterr().out == "name\tsps\nguarantee\tgreedy exact_tokens\nempty\t\n"


def test_json_line_holds_plain_values_only(capsys):
    output.json_line(
        {
            "nan": float("nan"),
            "inf": np.float64("inf"),
            "int": np.int64(3),
            "real": np.float32(0.5),
            "flag": True,
            "code": ExitCode.USAGE,
            "path": Path("a/b"),
            "set": {2, 1},
            "text": "ü",
        }
    )
    line = capsys.readouterr().out
    assert line.endswith("\n")
    assert "ü" in line
    assert json.loads(line) == {
        "nan": None,
        "inf": None,
        "int": 3,
        "real": 0.5,
        "flag": True,
        "code": 2,
        "path": "a/b",
        "set": [1, 2],
        "text": "ü",
    }


def test_value_without_a_json_form_is_a_bug(capsys):
    with pytest.raises(TypeError, match="object has no JSON form"):
        output.json_line({"x": object()})
    assert capsys.readouterr().out == ""
