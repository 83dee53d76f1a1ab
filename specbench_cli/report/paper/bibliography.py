"""BibTeX references of the methods, settings, models and tasks in a report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from specbench_cli import output
from specbench_cli.errors import SpecbenchError
from specbench_cli.models.aliases import aliases
from specbench_cli.report.claims import find_papers
from specbench_cli.report.paper.tex import escape
from specbench_cli.summary.summary import Summary
from specbench_cli.tasks import describe

SHIPPED = Path(__file__).with_name("references.bib")
"""BibTeX file of settings, models and data. Methods are in `methods/papers.yaml`."""
_ENTRY = re.compile(r"^@(\w+)\{([\w:.+/-]+),", re.MULTILINE)
_ARXIV = re.compile(r"(?:arXiv:|eprint\s*=\s*[{\"])\s*(\d{4}\.\d{4,5})")


@dataclass(frozen=True, slots=True)
class BibEntry:
    """A BibTeX entry.

    Attributes:
        source: The entry in BibTeX format.
        arxiv: arXiv number. Two entries with the same number are duplicates.
    """

    key: str
    source: str
    arxiv: str | None


@dataclass(frozen=True, slots=True)
class Bibliography:
    """BibTeX entries without duplicates, in the order of first use.

    Attributes:
        cited: (kind, name) -> keys of its entries. A kind is "method", "setting", "model" or
            "task".
    """

    entries: tuple[BibEntry, ...]
    cited: Mapping[tuple[str, str], tuple[str, ...]]

    def text(self) -> str:
        """Return the content of the .bib file."""
        return output.escape_hidden("\n\n".join(entry.source for entry in self.entries)) + "\n"

    def keys(self, kind: str, name: str) -> tuple[str, ...]:
        """Return the keys to cite for a method, setting, model or task. () if none is known."""
        return self.cited.get((kind, name), ())


def bibliography(summary: Summary, manifest: Mapping[str, Any]) -> Bibliography:
    """Return the references of all methods, settings, models and tasks in a report."""
    kept: dict[str, BibEntry] = {}
    by_arxiv: dict[str, str] = {}
    cited: dict[tuple[str, str], tuple[str, ...]] = {}
    for kind, name, entries in _list_cited(summary, manifest):
        keys = []
        for entry in entries:
            key = by_arxiv.get(entry.arxiv or "", entry.key)
            kept.setdefault(key, entry)
            if entry.arxiv is not None:
                by_arxiv.setdefault(entry.arxiv, key)
            keys.append(key)
        cited[kind, name] = tuple(dict.fromkeys(keys))
    return Bibliography(tuple(kept.values()), cited)


def entries(source: str) -> list[BibEntry]:
    """Parse a BibTeX file. Text between entries is dropped."""
    starts = [match.start() for match in _ENTRY.finditer(source)]
    entries_read = []
    for start, end in pairwise([*starts, len(source)]):
        part = source[start:end]
        part = part[: _find_closing_brace(part) + 1]
        heading = _ENTRY.match(part)
        if heading is not None:
            number = _ARXIV.search(part)
            entries_read.append(BibEntry(heading[2], part, number[1] if number else None))
    return entries_read


def _find_closing_brace(part: str) -> int:
    """Return the position of an entry's closing brace, or the end if there is none."""
    depth = 0
    for index, letter in enumerate(part):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            return index
    return len(part) - 1


def _list_cited(
    summary: Summary, manifest: Mapping[str, Any]
) -> Iterator[tuple[str, str, Sequence[BibEntry]]]:
    """Yield the methods, settings, models and tasks of a report, with their entries."""
    for name in dict.fromkeys(row.method for row in summary.rows):
        for papers in find_papers(name):
            yield "method", name, entries(papers.citation)
    for name, key in _settings(manifest):
        yield "setting", name, [_shipped()[key]]
    for model in (manifest.get("models") or {}).values():
        label = str((model or {}).get("label"))
        alias = aliases().get(label)
        if alias is not None and alias.cite is not None:
            yield "model", label, [_shipped()[alias.cite]]
    for task in manifest.get("tasks", []):
        yield "task", task["name"], list(_task(task["name"]))


def _settings(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings of a run that come from a paper, with the key of the paper."""
    config = manifest.get("config", {}).get("effective", {})
    lengths = [(row.get("params") or {}).get("length") for row in manifest.get("rows") or ()]
    for rule in ("synergy", "smartspec"):
        if rule in lengths:
            yield f"length={rule}", rule
    if config.get("prefill_chunk") and ((config.get("batch") or 1) > 1 or config.get("load")):
        yield "prefill-chunk", "sarathi"
    if config.get("memory_budget"):
        yield "memory-budget", "specmemo"


def _task(name: str) -> Iterator[BibEntry]:
    """Yield the entries of a task's citation.

    If `references.bib` has a source with the same arXiv number, its entry is used. Otherwise, a new
    entry is generated.
    """
    try:
        cited = str(describe(name).get("citation", ""))
    except SpecbenchError:
        return
    known = {entry.arxiv: entry for entry in _shipped().values() if entry.arxiv}
    for index, source_text in enumerate(filter(None, cited.split("; "))):
        number = _ARXIV.search(source_text)
        if number and number[1] in known:
            yield known[number[1]]
        elif source_text.startswith("generated by specbench"):
            continue
        else:
            key = re.sub(r"\W+", "-", name) + ("" if index == 0 else f"-{index + 1}")
            source = f"@misc{{data-{key},\n  title = {{{escape(source_text)}}},\n}}"
            yield BibEntry(f"data-{key}", source, number[1] if number else None)


@cache
def _shipped() -> dict[str, BibEntry]:
    return {entry.key: entry for entry in entries(SHIPPED.read_text(encoding="utf-8"))}
