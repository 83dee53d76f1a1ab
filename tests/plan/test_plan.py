"""A plan is data: what is known of built-in methods needs no method object, and no torch."""

import pkgutil
import subprocess
import sys

import pytest

from specbench_cli import plan, registry
from specbench_cli.engine.method import Method
from specbench_cli.plan.arm import Arm, like_of

PROGRAM = """
import sys
from pathlib import Path
from specbench_cli import registry
from specbench_cli.config.load import load
from specbench_cli.config.sources import Given
from specbench_cli.plan.plan import make_plan

config, _ = load(Given(), None, methods=registry, env={}, folder=Path(sys.argv[1]))
plan = make_plan(config)
print(*(arm.label for arm in plan.arms), plan.draft.label)
print(*sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_planning_the_default_run_does_not_import_torch(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    made, imported = subprocess.check_output(command, text=True).split("\n")[:2]
    assert made == "vanilla sps pld hf:vanilla hf:assisted embedded-1m"
    assert imported == ""


def test_no_module_of_the_room_imports_torch():
    names = [f"specbench_cli.plan.{module.name}" for module in pkgutil.iter_modules(plan.__path__)]
    program = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


@pytest.mark.parametrize("name", registry.ours())
def test_the_registry_knows_what_a_plan_needs_of_a_method_with_default_parameters(name):
    entry, method = registry.ours()[name], registry.build(name, {})
    assert entry.needs == tuple(sorted(method.needed))
    checked = type(method).check is not Method.check
    assert entry.more_needs == (checked or bool(method.artifacts()))
    assert not method.models()
    assert like_of(method) is None


def test_a_row_with_parameters_or_more_needs_asks_the_method():
    assert Arm("pld", "pld", {}).entry is registry.ours()["pld"]
    assert Arm("pld", "pld", {"length": 4}).entry is None
    for name in ("engine:http", "rest", "eagle3"):
        assert Arm(name, name, {}).entry is None
