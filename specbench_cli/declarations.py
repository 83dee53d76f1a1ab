"""Declarations of built-in methods, loaded without importing torch.

A plan needs a method's parameters and declaration hooks, such as `requirements`, but not its
decoding code. Importing a method imports torch, which takes a second. So `load_declaration` parses
the source text of a method, removes its decoding code, and executes the rest. The resulting class
has the method's attributes, parameters and hooks, but cannot decode.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Container, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from specbench_cli.engine.method import Method
from specbench_cli.engine.models.artifact import Artifact
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.verify.accept import AcceptRule

API = "specbench_cli.api"

WITHOUT_TORCH = frozenset(
    {
        "pydantic",
        "specbench_cli.engine.drafting.draft_model_method",
        "specbench_cli.engine.drafting.growth_params",
        "specbench_cli.engine.drafting.length_params",
        "specbench_cli.engine.method",
        "specbench_cli.engine.models.artifact",
        "specbench_cli.engine.params",
        "specbench_cli.engine.segments.rules",
        "specbench_cli.engine.types",
        "specbench_cli.engine.verify.accept",
        "specbench_cli.errors",
        "specbench_cli.former_names",
        *sys.stdlib_module_names,
    }
)
"""Modules that declarations may import, because they do not import torch."""

HOOKS = frozenset(
    {"accept", "artifacts", "batches", "by_load", "guarantee", "models", "requirements", "scope"}
    | {"timing_free", "upper_bound", "uses_costs"}
)
"""Members of a method that a plan evaluates."""

OVERRIDES = frozenset({"check", "generate", "learn"})
"""Members of a method whose code is removed. A plan checks only if a method overrides them."""

HEAD_FACTS = frozenset({"kind", "inside", "hint"})
"""Attributes of a trained module that are needed to find its files."""


class Placeholder:
    """Replacement for an imported object that is not needed here, such as a function of torch."""


@cache
def load_declaration(module: str, name: str) -> Any:
    """Return the object with a top-level name in a module of `methods`, or in `specbench_cli.api`.

    Classes are returned without their decoding code.
    """
    node, names = _statements(module)[name], _statements(module).keys()
    if isinstance(node, ast.ImportFrom | ast.Import):
        return _import_name(node, name)
    if isinstance(node, ast.ClassDef):
        bases = [load_declaration(module, base.id) for base in _select_names(node.bases, names)]
        node = _reduce_class(node, _select_names(node.bases, names), bases)
    else:
        node = _without_annotations(node)
    used = {each.id for each in _select_names(ast.walk(node), names)} - _bound_names(node)
    namespace = {each: load_declaration(module, each) for each in sorted(used)}
    namespace |= {"__name__": module, "Artifact": Artifact}
    tree = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(tree, module, "exec", dont_inherit=True), namespace)  # noqa: S102
    return namespace[name]


@cache
def _statements(module: str) -> dict[str, ast.stmt]:
    """Return the top-level statements of a module. Each name is mapped to the statement that
    defines it.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    return {name: node for node in tree.body for name in _bound_names(node)}


def _bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        case ast.ClassDef() | ast.FunctionDef():
            return {node.name}
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return {
                each.id for to in targets for each in ast.walk(to) if isinstance(each, ast.Name)
            }
    return set()


def _select_names(nodes: Iterable[ast.AST], names: Container[str]) -> list[ast.Name]:
    """Return those syntax nodes that refer to one of the names."""
    return [node for node in nodes if isinstance(node, ast.Name) and node.id in names]


def _import_name(node: ast.ImportFrom | ast.Import, name: str) -> Any:
    """Import a name. Return `Placeholder` instead if importing its module may import torch."""
    if isinstance(node, ast.Import):
        return importlib.import_module(name) if name in WITHOUT_TORCH else Placeholder
    module = str(node.module)
    (own,) = (alias.name for alias in node.names if name == (alias.asname or alias.name))
    if module == API or module.startswith("methods."):
        return load_declaration(module, own)
    if {module, module.partition(".")[0]} & WITHOUT_TORCH:
        return getattr(importlib.import_module(module), own)
    return Placeholder


def _reduce_class(node: ast.ClassDef, names: list[ast.Name], bases: list[type]) -> ast.ClassDef:
    """Return a class statement without decoding code.

    Classes of parameters and accept rules do not change. A method keeps its attributes, and those
    functions that a plan needs. Any other class is treated as a trained module.

    Args:
        names: Syntax nodes of the base classes that the module defines or imports.
        bases: The base classes that these nodes refer to.
    """
    if any(issubclass(base, MethodParams | AcceptRule) for base in bases):
        body = [_without_annotations(each) for each in node.body]
        return ast.ClassDef(node.name, node.bases, node.keywords, body, node.decorator_list)
    is_method = any(issubclass(base, Method) for base in bases)
    body = [kept for each in node.body if (kept := _reduce_statement(each, is_method)) is not None]
    if not is_method:
        found = zip(names, bases, strict=True)
        names = [name for name, base in found if issubclass(base, Artifact)]
        names = names or [ast.Name("Artifact", ast.Load())]
    return ast.ClassDef(node.name, [*names], [], body or [ast.Pass()], [])


def _reduce_statement(node: ast.stmt, is_method: bool) -> ast.stmt | None:
    """Return a statement of a class body without decoding code. Return None to remove the
    statement.
    """
    if isinstance(node, ast.FunctionDef) and is_method and node.name in HOOKS:
        return _without_annotations(node)
    if isinstance(node, ast.FunctionDef) and is_method and node.name in OVERRIDES:
        return ast.FunctionDef(node.name, node.args, [ast.Pass()], [])
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign([node.target], node.value)
    wanted = isinstance(node, ast.Assign) and (is_method or _bound_names(node) <= HEAD_FACTS)
    return node if wanted else None


def _without_annotations(node: ast.stmt) -> ast.stmt:
    """Remove the annotations of a function, since they may name classes that are not loaded."""
    if isinstance(node, ast.FunctionDef):
        node.returns = None
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
    return node
