"""A Markdown table, whatever its cells hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specbench_cli.report import text


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Heading and rows; a missing value is `-`."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_field, line))} |" for line in lines)


def _field(value: object) -> str:
    if value is None:
        return text.NONE
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    return " ".join(str(value).split()).replace("|", "\\|")
