"""The surface for authors: what is promised is there, and nothing in it is slow to import."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path

import methods
from specbench_cli import api
from specbench_cli.api import PeerSession, Session
from specbench_cli.former_names import FormerMember

FILES = sorted(Path(methods.__path__[0]).rglob("*.py"))


def test_all_that_is_imported_is_promised_in_order():
    tree = ast.parse(Path(api.__file__).read_text(encoding="utf-8"))
    held = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    held |= functions - {"__getattr__"}
    assert held == set(api.__all__)
    assert all(hasattr(api, name) for name in held)


def test_methods_and_heads_import_nothing_else_of_the_project():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("specbench_cli"):
                assert module in ("specbench_cli.api", "specbench_cli.errors"), file


def test_everything_promised_is_used_by_a_method_or_is_what_they_are_made_of():
    """So that the surface does not outgrow those who live on it."""
    used = {
        alias.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "specbench_cli.api"
        for alias in node.names
    }
    kinds = {
        "AcceptRule",
        "FeatureHead",
        "fill_from",
        "CandidateNodes",
        "SelectedNodes",
        "Guarantee",
        "Hidden",
        "Distribution",
        "Length",
        "Rule",
    }
    kinds |= {"Part", "State", "TreeTemplate", "Worker"}
    errors = {"MethodFault", "UsageError"}
    for_plugins = {"Claim"}
    assert set(api.__all__) - used <= kinds | errors | for_plugins


def test_no_transformers_where_a_shipped_model_is_loaded_nor_scipy_before():
    """What a plug-in's or a drafter's process starts with; their import takes seconds."""
    heavy = "{'transformers', 'scipy'} & {*sys.modules}"
    starts = "specbench_cli.api, specbench_cli.measure.isolation.plugin_methods"
    modules = "{'transformers', 'torch._dynamo'} & {*sys.modules}"
    check = (
        f"import sys, {starts}; found = {heavy};"
        " from specbench_cli.engine.models.load import load_decoder;"
        " from specbench_cli.models.resolve import resolve;"
        " load_decoder(resolve('embedded-1m').path, name='draft');"
        f" sys.exit(str(found | {modules} or '') or 0)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_session_shows_authors_what_they_need_and_the_harness_in_one_place():
    members = {
        name
        for name in dir(Session)
        if not name.startswith("_")
        and not isinstance(inspect.getattr_static(Session, name), FormerMember)
    }
    members |= {"requests", "target", "device", "sampling", "memory", "harness"}
    taken = {
        name
        for kind in (Session, PeerSession)
        for member in map(partial(inspect.getattr_static, kind), dir(kind))
        if inspect.isfunction(member)
        for name in inspect.signature(member).parameters
    }
    assert "seq" not in taken
    assert not members & {"meter", "workers", "begin", "adopt", "module", "tokenizer", "origin"}
    assert len(members) <= 44, sorted(members)
