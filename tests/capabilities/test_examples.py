"""The plug-ins of docs/how-to/methods.md pass every check and are short."""

from pathlib import Path

import pytest

from specbench_cli import registry
from specbench_cli.testing import CHECKS, check

PLUGINS = Path(__file__).parent / "plugins"
EXAMPLES = ("lookup", "drafted", "tree")


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_passes(example, name):
    found = check(PLUGINS / f"{example}.py", name)
    assert all(each.passed and each.figure for each in found)
