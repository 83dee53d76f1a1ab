"""The words of `--to`: names of file formats, and their other spellings."""

from __future__ import annotations

from collections.abc import Collection

from specbench_cli.config.problems import did_you_mean, listed, shown
from specbench_cli.errors import UsageError

_SPELLINGS = (("md", "markdown"), ("latex", "tex"))
"""Words for one format: each command takes all of them, whichever it lists."""


def formats(to: str, known: Collection[str], hint: str) -> list[str]:
    """Return the formats that `--to` names, each once, by the names that the command lists.

    Args:
        hint: a command that is right.
    Raises:
        UsageError: an unknown format, or none.
    """
    names = {name: name for name in known}
    for spellings in _SPELLINGS:
        own = next((word for word in spellings if word in known), None)
        names |= dict.fromkeys(spellings, own) if own is not None else {}
    words = list(dict.fromkeys(word.strip() for word in to.split(",") if word.strip()))
    for word in words:
        if word not in names:
            guess = did_you_mean(word, names)
            raise UsageError(f"--to {shown(repr(word))} is none of {listed(known)}{guess}", hint)
    if not words:
        raise UsageError(f"--to names no format; there are {listed(known)}", hint)
    return list(dict.fromkeys(names[word] for word in words))
