"""Parser for the option `--to`, which names the output formats of a command.

Equivalent names such as `md` and `markdown` mean the same format.
"""

from __future__ import annotations

from collections.abc import Collection

from specbench_cli.config.problems import did_you_mean, join_names, shorten
from specbench_cli.errors import UsageError

_SPELLINGS = (("md", "markdown"), ("latex", "tex"))
"""Groups of equivalent format names. Commands accept each of them."""


def parse_formats(to: str, known: Collection[str], hint: str) -> list[str]:
    """Parse a value of `--to`: format names separated by commas. Return the formats once each.

    Args:
        known: names of the formats that the command can write. An equivalent name is replaced by
            the name in `known`.
        hint: example of a correct command, shown in the error message.

    Raises:
        UsageError: a format is unknown, or `to` contains no format.
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
                f"--to {shorten(repr(word))} is not one of {join_names(known)}{guess}", hint
            )
    if not words:
        raise UsageError(f"--to names no format; choose from {join_names(known)}", hint)
    return list(dict.fromkeys(names[word] for word in words))
