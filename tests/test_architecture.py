"""A test that docs/explanations/architecture.md names existing functions.

The page follows an option and a record through the code. Each table row is one station: a file
and a function or class in it.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanations/architecture.md").read_text(encoding="utf-8")
STATIONS = re.findall(r"^\|[^|]*\| `([\w/.]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)
RECORD_WALK = PAGE.partition("## A record, ")[2].partition("\n## ")[0]


def qualified_names(nodes, prefix=""):
    """Yield the names of functions, classes and attributes, qualified by their classes."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{prefix}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from qualified_names(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"{prefix}{node.target.id}"


@pytest.mark.parametrize(("file", "name"), STATIONS)
def test_a_station_is_in_its_file(file, name):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in set(qualified_names(tree.body))


def test_a_record_passes_at_most_twelve_stations():
    assert 0 < len(re.findall(r"\.py` \| `", RECORD_WALK)) <= 12
