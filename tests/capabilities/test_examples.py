"""The skeletons, and the plug-in of docs/tutorials/add-a-method.md, pass every check."""

from pathlib import Path

import pytest

from specbench_cli import registry, skeletons
from specbench_cli.testing import CHECKS, check

SKELETONS = sorted(Path(skeletons.__file__).parent.glob("[!_]*.py"))
EXAMPLES = (*SKELETONS, Path(__file__).parent / "plugins/drafted.py")


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_passes(example, name):
    found = check(example, name)
    assert all(each.passed and each.figure for each in found)
