"""Mutants of source files: found, sampled by a seed, and written as text."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from operators import Function, changes, runs


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        key: file, and its number among all mutants of that file; the same as long as the file is.
        lines: first and last line of what runs with it: the statement, a compound statement's head,
            the body of a function for its defaults; (0, 0) outside of functions.
        text: the whole file, changed.
    """

    key: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    lines: tuple[int, int]
    text: str


def mutants_of(source: str, file: str) -> list[Mutant]:
    """All mutants of a file, in the order of its syntax tree."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found: list[Mutant] = []
    seen = {source}
    program = ast.dump(tree)
    for node, inside in runs(tree, False):
        for operator, changed in changes(node, inside):
            after = ast.unparse(ast.fix_missing_locations(changed))
            text = _spliced(source, node, f"({after})" if isinstance(node, ast.expr) else after)
            if text in seen or not _differs(text, program):
                continue
            seen.add(text)
            before = ast.get_source_segment(source, node) or ""
            found.append(
                Mutant(
                    key=f"{file}#{len(found)}",
                    file=file,
                    line=node.lineno,
                    operator=operator,
                    before=" ".join(before.split()),
                    after=after,
                    lines=_lines(node, parents) if inside else (0, 0),
                    text=text,
                )
            )
    return found


def unchanged(root: Path, file: str) -> Mutant:
    """A file as it is: what no test may fail for."""
    text = (root / file).read_text(encoding="utf-8")
    return Mutant("unchanged", file, 0, "none", "", "", (0, 0), text)


def all_mutants(root: Path, files: Iterable[str]) -> list[Mutant]:
    """All mutants of files given relative to `root`."""
    return [
        mutant
        for file in sorted(files)
        for mutant in mutants_of((root / file).read_text(encoding="utf-8"), file)
    ]


def sample(found: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """`size` of the mutants, or all if there are fewer, each as likely as any other."""
    return random.Random(seed).sample(found, min(size, len(found)))


def _spliced(source: str, node: ast.AST, text: str) -> str:
    """The source with a node's own text replaced; columns are counted in bytes."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1
    head = lines[first][: node.col_offset]
    tail = lines[last][node.end_col_offset :]
    # The lines that follow keep their numbers.
    gap = b"\n" * (last - first - text.count("\n")) if tail.strip() == b"" else b""
    return b"".join([*lines[:first], head, text.encode(), tail, gap, *lines[last + 1 :]]).decode()


def _differs(text: str, program: str) -> bool:
    """Whether the text is Python, and another program than the one dumped."""
    try:
        return ast.dump(ast.parse(text)) != program
    except SyntaxError:
        return False


def _lines(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> tuple[int, int]:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    if isinstance(node, Function):
        return node.body[0].lineno, node.end_lineno
    body = getattr(node, "body", None)
    return node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno
