"""Tests that making a plan does not import torch."""

import pkgutil
import subprocess
import sys

from specbench_cli import plan

PROGRAM = """
import sys
from pathlib import Path
from specbench_cli import registry
from specbench_cli.config.load import load
from specbench_cli.config.sources import SettingsLayer
from specbench_cli.plan.plan import make_plan

config, _ = load(SettingsLayer(), None, methods=registry, env={}, folder=Path(sys.argv[1]))
plan = make_plan(config)
print(*(method_run.label for method_run in plan.method_runs), plan.draft.label)
print(*sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_planning_the_default_run_does_not_import_torch(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    made, imported = subprocess.check_output(command, text=True).split("\n")[:2]
    assert made == "vanilla sps pld hf:vanilla hf:assisted embedded-1m"
    assert imported == ""


def test_no_module_of_the_package_imports_torch():
    names = [f"specbench_cli.plan.{module.name}" for module in pkgutil.iter_modules(plan.__path__)]
    program = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
