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

MAX_LENGTH = 2 * MAX_TEXT_LENGTH
"""Maximum length of a truncated text with its prefix and suffix."""


def test_a_long_text_is_cut_and_names_the_number_of_cut_characters():
    assert truncate("x" * 50_000) == "x" * MAX_TEXT_LENGTH + "... (48000 more characters cut)"


@pytest.mark.parametrize("text", ["", "short", "x" * MAX_TEXT_LENGTH])
def test_a_text_of_usual_length_is_not_changed(text):
    assert truncate(text) == text


def test_a_quoted_text_keeps_its_number_of_cut_characters():
    quoted = truncate(f"sps, mini/3: {truncate('x' * 50_000)} (method.py, line 3)")
    assert "(48000 more characters cut) (method.py, line 3)" in quoted


def test_a_lone_surrogate_is_escaped():
    assert truncate("a\ud800b") == "a\\ud800b"
    truncate("\udfff" * 50_000).encode()


def test_all_kinds_of_line_breaks_become_spaces():
    assert to_one_line("a\nb\r\nc\x85d\u2028e\x0bf") == "a b c d e f"


class ExitingMessage(Exception):
    """An exception whose `__str__` raises SystemExit."""

    def __str__(self):
        raise SystemExit(7)


def test_an_unreadable_exception_message_has_a_replacement():
    assert message_of(ExitingMessage()) == "its message cannot be read"


def test_an_interrupt_in_an_exception_message_is_raised():
    class InterruptedMessage(Exception):
        def __str__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        message_of(InterruptedMessage())


@pytest.mark.parametrize("kind", [UsageError, MethodFault])
def test_every_error_message_is_truncated(kind):
    fault = kind("m" * 1_000_000, "h" * 1_000_000)
    assert len(fault.message) < MAX_LENGTH
    assert len(fault.hint) < MAX_LENGTH
    assert len(str(fault)) < MAX_LENGTH


def test_python_prints_a_message_with_its_hidden_characters_escaped():
    error = UsageError("a\x1b[2J\u202eb")
    assert str(error) == "a\\x1b[2J\\u202eb"
    assert error.message == "a\x1b[2J\u202eb"
