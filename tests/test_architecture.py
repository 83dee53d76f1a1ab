"""Every station that docs/explanations/architecture.md names is in its file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanations/architecture.md").read_text(encoding="utf-8")
STATIONS = re.findall(r"^\|[^|]*\| `([\w/.]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)
RECORD_WALK = PAGE.partition("## A record, ")[2].partition("\n## ")[0]


def names(nodes, before=""):
    """Yield functions, classes and attributes, each with the names of the classes around it."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{before}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from names(node.body, f"{before}{node.name}.")
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"{before}{node.target.id}"


@pytest.mark.parametrize(("file", "name"), STATIONS)
def test_a_station_is_in_its_file(file, name):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in set(names(tree.body))


def test_a_record_reaches_a_cell_in_twelve_stations():
    assert 0 < len(re.findall(r"\.py` \| `", RECORD_WALK)) <= 12
