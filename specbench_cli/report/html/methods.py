"""Method cards of the HTML page: description, parameters and citation of each method."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specbench_cli import registry
from specbench_cli.config.sweep import format_value
from specbench_cli.errors import UsageError
from specbench_cli.summary import formats
from specbench_cli.summary.summary import Summary

if TYPE_CHECKING:
    from specbench_cli.api import Method

_SCOPES = {"prompt": "one prompt", "run": "the run", "corpus": "a corpus"}


@dataclass(frozen=True, slots=True)
class DocBlock:
    """Part of a docstring: a paragraph, or a numbered list with one line per item."""

    kind: Literal["paragraph", "list"]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CardParam:
    """A parameter of a method.

    Attributes:
        values: (label, value) for each variant of the method in the run. If all variants have the
            same value, one pair with an empty label.
    """

    name: str
    description: str
    default: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MethodCard:
    """Card of a method.

    If the method cannot be imported on this machine, descriptions and citation are empty.

    Attributes:
        summary: First line of the method's docstring.
        about: Rest of the docstring.
        facts: (name, value), such as the guarantee.
        citation: BibTeX entry, or "".
        missing: Reason why the description is missing, or "".
    """

    name: str
    labels: tuple[str, ...]
    summary: str
    about: tuple[DocBlock, ...]
    params: tuple[CardParam, ...]
    facts: tuple[tuple[str, str], ...]
    citation: str
    missing: str


def make_cards(summary: Summary) -> list[MethodCard]:
    """Return one card per method of a run, in the order of the table."""
    return [_make_card(name, summary) for name in dict.fromkeys(row.method for row in summary.rows)]


def _make_card(name: str, summary: Summary) -> MethodCard:
    rows = [row for row in summary.rows if row.method == name]
    labels = tuple(row.label for row in rows)
    guarantees = ", ".join(dict.fromkeys(row.guarantee.replace("_", " ") for row in rows))
    facts = [("guarantee in this run", guarantees)]
    values = {row.label: row.params for row in rows}
    try:
        entry, method = registry.entries()[registry.resolve(name)], registry.load(name)
    except UsageError:
        missing = "This method is not installed on the machine that wrote the report."
        params = tuple(_list_params({key: ("", "") for row in rows for key in row.params}, values))
        return MethodCard(name, labels, "", (), params, tuple(facts), "", missing)
    facts += [
        ("needs", ", ".join(sorted(method.needs)) or "nothing but the target"),
        ("state kept for", _SCOPES[method.state_scope]),
        ("source", entry.source),
    ]
    fields = {
        key: (_join_lines(field.description or ""), _format_value(field.default))
        for key, field in method.Params.model_fields.items()
    }
    summary_line, *about = split_doc(inspect.getdoc(method) or "")
    return MethodCard(
        name,
        labels,
        " ".join(summary_line.lines),
        tuple(about),
        tuple(_list_params(fields, values)),
        tuple((key, value) for key, value in facts if value),
        registry.papers(name).citation or _read_file_sources(method),
        "",
    )


def _list_params(
    fields: Mapping[str, tuple[str, str]], values: Mapping[str, Mapping[str, Any]]
) -> Iterator[CardParam]:
    for key, (description, default) in fields.items():
        own = tuple((label, _format_value(v[key])) for label, v in values.items() if key in v)
        if 1 < len(own) == len(values) and len({value for _, value in own}) == 1:
            own = (("", own[0][1]),)
        yield CardParam(key, description or formats.NONE, default or formats.NONE, own)


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    return formats.NONE if value is None else format_value(value)


def _read_file_sources(method: type[Method]) -> str:
    """Return the docstring of the method's file, which names the paper, without its first
    paragraph.
    """
    module = inspect.getmodule(method)
    parts = (inspect.getdoc(module) or "").split("\n\n") if module is not None else []
    return "\n\n".join(parts[1:])


def split_doc(doc: str) -> Iterator[DocBlock]:
    """Yield the paragraphs and numbered lists of a docstring, without line breaks.

    An empty docstring yields one empty paragraph.
    """
    for paragraph in re.split(r"\n\s*\n", doc.strip()):
        lead, *items = re.split(r"^\s*\d+\.\s+", paragraph, flags=re.MULTILINE)
        if not items or lead.strip():
            yield DocBlock("paragraph", (_join_lines(lead),))
        if items:
            yield DocBlock("list", tuple(map(_join_lines, items)))


def _join_lines(lines: str) -> str:
    return " ".join(lines.split()).replace("`", "")
