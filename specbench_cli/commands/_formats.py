"""File format names of `--to`, and their alternative spellings."""

from __future__ import annotations

from collections.abc import Collection

from specbench_cli.config.problems import did_you_mean, join_names, shorten
from specbench_cli.errors import UsageError

_SPELLINGS = (("md", "markdown"), ("latex", "tex"))
"""Spellings of the same format. Each command accepts all of them, and lists one."""


def parse_formats(to: str, known: Collection[str], hint: str) -> list[str]:
    """Return the formats that `--to` names, without duplicates, as the command spells them.

    Args:
        known: format names as the command spells them.
        hint: example of a correct command, for the error.

    Raises:
        UsageError: a format is unknown, or `to` names none.
    """
    names = {name: name for name in known}
    for spellings in _SPELLINGS:
        own = next((word for word in spellings if word in known), None)
        names |= dict.fromkeys(spellings, own) if own is not None else {}
    words = list(dict.fromkeys(word.strip() for word in to.split(",") if word.strip()))
    for word in words:
        if word not in names:
            guess = did_you_mean(word, names)
            raise UsageError(
                f"--to {shorten(repr(word))} is none of {join_names(known)}{guess}", hint
            )
    if not words:
        raise UsageError(f"--to names no format; there are {join_names(known)}", hint)
    return list(dict.fromkeys(names[word] for word in words))
