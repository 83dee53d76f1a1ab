"""Tests of declarations, from which a plan knows a method without importing its module."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any, get_args

import pytest

from specbench_cli import declarations, registry
from specbench_cli.api import Method
from specbench_cli.declarations import HOOKS, OVERRIDES, WITHOUT_TORCH
from specbench_cli.engine.types import Rule

PASSED: dict[str, list[dict[str, Any]]] = {
    "sps": [
        {"length": 7},
        {"length": "acceptance-head"},
        {"length": "oracle", "accept": "typical", "delta": 0.2},
        {"length": "synergy", "accept": "random", "like": "typical"},
    ],
    "sam": [{"beside": "draft"}, {"beside": "eagle", "head": "folder", "scope": "prompt"}],
    "staged": [{"stages": "ngram,embedded-1m,draft"}],
    "suffix": [{"scope": "prompt", "eviction": "lru"}],
    "atts": [{"alpha": 1.0}, {"rate": 0.5}, {"like": "sps", "delimiter": "\\n\\n"}],
    "judge": [{"threshold": 1.0}],
    "typical": [{"epsilon": 1.0, "delta": 1e9}],
    "cdsl": [{"words": "one,two"}],
    "eagle2": [{"nodes": "auto"}],
    "eagle3": [{"nodes": 59, "depth": 8, "width": 10}],
    "mtp": [{"length": "heuristic"}],
    "pearl": [{"window": "auto"}],
    "hf:dflash": [{"head": "folder"}],
}
"""Parameters that change what a method declares."""

CASES = [
    pytest.param(name, passed, id=f"{name} {passed}")
    for name in registry.built_in_methods()
    for passed in ({}, *PASSED.get(name, []))
]
ATTRIBUTES = [
    name for name in inspect.get_annotations(Method) if name not in ("params", "Params", "Head")
]


@pytest.mark.parametrize(("name", "passed"), CASES)
def test_a_declaration_equals_the_class(name: str, passed: dict[str, Any]) -> None:
    declared, built = registry.declare(name, passed), registry.build(name, passed)
    assert repr(declared.params) == repr(built.params)
    assert declared.params.model_dump() == built.params.model_dump()
    assert declared_facts(declared) == declared_facts(built)


def declared_facts(method: Method) -> dict[str, Any]:
    """Return what a method declares, as values that are equal for equal declarations."""
    fields = type(method).Params.model_fields
    hooks = HOOKS - {"accept", "artifacts", "guarantee", "models"}
    return {
        **{name: getattr(method, name, None) for name in (*ATTRIBUTES, *hooks)},
        "fields": [(name, each.default, each.description) for name, each in fields.items()],
        "accept": str(method.accept),
        "off": method.accept is None or method.accept.is_exact,
        "guarantees": [method.guarantee(rule) for rule in get_args(Rule)],
        "models": method.models(),
        "heads": [
            (each.kind.kind, each.kind.inside, each.kind.hint, each.source)
            for each in method.artifacts()
        ],
        "checks": type(method).check is not Method.check,
        "learns": method.learns,
    }


def test_every_property_of_a_method_is_a_hook_or_follows_from_hooks():
    properties = {name for name, each in vars(Method).items() if isinstance(each, property)}
    assert properties - HOOKS == {"learns"}
    assert vars(Method).keys() >= HOOKS | OVERRIDES


def test_modules_of_declarations_do_not_import_torch():
    own_modules = sorted(name for name in WITHOUT_TORCH if name.startswith("specbench_cli"))
    code = f"import sys, {', '.join(own_modules)}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_a_name_of_torch_is_a_placeholder():
    assert declarations.load_declaration("methods.eagle3.head", "nn") is declarations.Placeholder


def specbench(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh process. The last line of stdout says if torch was imported."""
    code = (
        "import sys\nfrom specbench_cli.app import main\n"
        f"try: main({list(args)!r})\n"
        "finally: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "args",
    [
        "-m sps --set sps.length=5 -m eagle3",
        "-m typical,atts,judge --set typical.epsilon=0.2 --controls none",
        "-m sps,pld --sweep sps.length=1:3:1",
        "-m sps,eagle2 --tune 4 --limit 24",
        "-m sps,sps-tree --targets embedded-7m,embedded-1m --draft embedded-1m",
    ],
)
def test_a_dry_run_does_not_import_torch(args):
    process = specbench("run", *args.split(), "--dry-run")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sps.lenght=5", "sps.lenght is not known; did you mean 'length'?"),
        ("sps.length=0", "sps.length must be at least 1, got 0"),
        ("sps.rate=2", "sps.rate must be at most 1, got 2"),
        ("sps.max=x", "sps.max must be a whole number, got 'x'"),
    ],
)
def test_a_wrong_parameter_is_refused_before_torch_is_imported(setting, message):
    process = specbench("run", "-m", "sps", "--set", setting)
    assert process.returncode == 2
    assert message in process.stderr
    assert process.stdout == "False\n"
