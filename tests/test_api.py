"""Tests of the plug-in API: its names, and the modules that its import loads."""

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


def test_all_names_of_the_api_are_in_dunder_all():
    tree = ast.parse(Path(api.__file__).read_text(encoding="utf-8"))
    imported_names = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported_names |= functions - {"__getattr__"}
    assert imported_names == set(api.__all__)
    assert all(hasattr(api, name) for name in imported_names)


def test_methods_and_heads_import_only_the_api():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("specbench_cli"):
                assert module in ("specbench_cli.api", "specbench_cli.errors"), file


def test_each_api_name_is_used_by_a_method_or_is_a_type():
    """A name that no method uses would only make the API larger."""
    used = {
        alias.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "specbench_cli.api"
        for alias in node.names
    }
    type_names = {
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
    type_names |= {"Part", "State", "TreeTemplate", "Worker"}
    errors = {"MethodFault", "UsageError"}
    for_plugins = {"Claim"}
    assert set(api.__all__) - used <= type_names | errors | for_plugins


def test_loading_a_shipped_model_does_not_import_transformers():
    """Plug-in and draft processes load these modules first, and transformers takes seconds."""
    heavy_modules = "{'transformers', 'scipy'} & {*sys.modules}"
    first_imports = "specbench_cli.api, specbench_cli.measure.isolation.plugin_methods"
    later_modules = "{'transformers', 'torch._dynamo'} & {*sys.modules}"
    check = (
        f"import sys, {first_imports}; found = {heavy_modules};"
        " from specbench_cli.engine.models.load import load_decoder;"
        " from specbench_cli.models.resolve import resolve;"
        " load_decoder(resolve('embedded-1m').path, name='draft');"
        f" sys.exit(str(found | {later_modules} or '') or 0)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_session_has_few_members_for_authors():
    members = {
        name
        for name in dir(Session)
        if not name.startswith("_")
        and not isinstance(inspect.getattr_static(Session, name), FormerMember)
    }
    members |= {"requests", "target", "device", "sampling", "memory", "harness"}
    parameters = {
        name
        for cls in (Session, PeerSession)
        for member in map(partial(inspect.getattr_static, cls), dir(cls))
        if inspect.isfunction(member)
        for name in inspect.signature(member).parameters
    }
    assert "seq" not in parameters
    assert not members & {"meter", "workers", "begin", "adopt", "module", "tokenizer", "origin"}
    assert len(members) <= 44, sorted(members)
