"""Docstrings follow CONTRIBUTING.md, Code of style, as far as a program can check it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("specbench_cli", "methods", "recipes", "benchmarks")
SECTION = re.compile(r"^(Args|Attributes):$", re.M)
ENTRY = re.compile(r"^    (?! )((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*):", re.M)
RELATIVE = {
    "what", "who", "whoever", "whose", "whether", "that", "those", "such", "of", "as", "how",
    "where", "which",
}  # fmt: skip
"""Words that begin a relative clause."""


def find_docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Yield place, node and docstring of each documented module, class and function."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                    text := ast.get_docstring(node)
                ):
                    name = getattr(node, "name", "")
                    yield f"{path.relative_to(ROOT)}::{name}", node, text


def find_described(text: str) -> set[str]:
    """Return the names that the sections Args and Attributes describe."""
    names = set[str]()
    for section in SECTION.finditer(text):
        body = re.split(r"\n(?=\S)", text[section.end() :])[0]
        for entry in ENTRY.findall(body):
            names |= {name.lstrip("*") for name in entry.split(", ")}
    return names


def find_names(node: ast.AST) -> set[str]:
    """Return the names that a docstring may describe: parameters, or a class's attributes."""
    if isinstance(node, ast.FunctionDef):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [each for each in (node.args.vararg, node.args.kwarg) if each]
        return {each.arg for each in every}
    names = set[str]()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef):
            names |= {each.name, *find_names(each)}
        elif isinstance(each, ast.Name):
            names.add(each.id)
        elif isinstance(each, ast.Attribute):
            names.add(each.attr)
    return names


@pytest.fixture(scope="module")
def documented() -> list[tuple[str, ast.AST, str]]:
    return list(find_docstrings())


def test_described_parameters_and_attributes_exist(documented):
    stale = {
        place: sorted(unknown)
        for place, node, text in documented
        if not isinstance(node, ast.Module) and (unknown := find_described(text) - find_names(node))
    }
    assert stale == {}


def test_no_docstring_begins_with_a_relative_clause(documented):
    wrong = [place for place, _, text in documented if text.split(None, 1)[0].lower() in RELATIVE]
    assert wrong == []
