"""Untrusted text is truncated on input, with the number of characters that were cut."""

from __future__ import annotations

import pytest

from specbench_cli.errors import (
    MAX_TEXT_LENGTH,
    MethodFault,
    UsageError,
    message_of,
    to_one_line,
    truncate,
)

NEVER_LONGER = 2 * MAX_TEXT_LENGTH
"""Maximum length of a truncated text with its prefix and suffix."""


def test_a_long_text_is_cut_and_says_by_how_much():
    assert truncate("x" * 50_000) == "x" * MAX_TEXT_LENGTH + "... (48000 more characters cut)"


@pytest.mark.parametrize("text", ["", "short", "x" * MAX_TEXT_LENGTH])
def test_a_text_of_usual_length_is_left_alone(text):
    assert truncate(text) == text


def test_a_text_that_was_cut_once_still_says_how_much_when_it_is_quoted():
    quoted = truncate(f"sps, mini/3: {truncate('x' * 50_000)} (method.py, line 3)")
    assert "(48000 more characters cut) (method.py, line 3)" in quoted


def test_half_a_character_which_no_file_can_hold_is_spelled_out():
    assert truncate("a\ud800b") == "a\\ud800b"
    truncate("\udfff" * 50_000).encode()


def test_line_breaks_of_every_kind_become_blanks():
    assert to_one_line("a\nb\r\nc\x85d\u2028e\x0bf") == "a b c d e f"


class Unsayable(Exception):
    """An exception whose text ends the program."""

    def __str__(self):
        raise SystemExit(7)


def test_an_exception_whose_text_cannot_be_read_is_named():
    assert message_of(Unsayable()) == "its message cannot be read"


def test_an_interrupt_while_an_exception_is_read_is_an_interrupt():
    class Slow(Exception):
        def __str__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        message_of(Slow())


@pytest.mark.parametrize("kind", [UsageError, MethodFault])
def test_every_error_message_is_truncated(kind):
    fault = kind("m" * 1_000_000, "h" * 1_000_000)
    assert len(fault.message) < NEVER_LONGER
    assert len(fault.hint) < NEVER_LONGER
    assert len(str(fault)) < NEVER_LONGER


def test_python_prints_a_message_with_its_hidden_characters_escaped():
    error = UsageError("a\x1b[2J\u202eb")
    assert str(error) == "a\\x1b[2J\\u202eb"
    assert error.message == "a\x1b[2J\u202eb"
