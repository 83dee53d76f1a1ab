"""A Markdown table, whatever its cells hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from specbench_cli import output
from specbench_cli.report.terminal import text

_MEANT = re.compile(
    r"<(?=[A-Za-z/!?])|&(?=#?\w+;)|\*|~(?=~)|(?<=\])\(|(?<![^\W_])_|_(?![^\W_])|[`$]|\\(?=[!-/:-@\[-`{-~])"
)
"""Characters that Markdown would read as a tag, entity, link, style, code or formula."""
_ENTITIES = {"<": "&lt;", "&": "&amp;"}


def table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, escaped: bool = False
) -> str:
    """Heading and rows; a missing value is `-`.

    Args:
        escaped: whether the cells are Markdown already, which nothing in a report is.
    """
    head, *body = ([_field(each, escaped) for each in row] for row in (headings, *rows))
    lines = (head, ["---"] * len(head), *body)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _field(value: object, escaped: bool) -> str:
    if value is None:
        return text.NONE
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    said = output.plain(" ".join(str(value).split())) if escaped else inline(value)
    return said.replace("|", "\\|")


def inline(value: object) -> str:
    """Return a text escaped for Markdown, on one line."""
    said = output.plain(" ".join(str(value).split()))
    return _MEANT.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), said)


def fenced(text: str) -> str:
    """Return a Markdown code block whose fence is longer than any in the text."""
    text = output.plain(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
