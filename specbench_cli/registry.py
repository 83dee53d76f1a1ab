"""Registry of methods. They are built in, provided by other installed packages, or in plug-in
files.

A method is imported when it is first used. Facts about built-in methods are parsed from their
source text, so that `specbench list methods` does not import torch.
"""

from __future__ import annotations

import ast
import importlib
import importlib.resources
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli.config.problems import did_you_mean, join_names, shorten, usage_error
from specbench_cli.errors import UsageError, message_of

if TYPE_CHECKING:
    from specbench_cli.api import Claim, Method

GROUP = "specbench.methods"
"""Entry-point group in which other distributions register methods."""

SIBLING_PACKAGES = ("methods", "datasets_cfg")
"""Top-level packages of specbench besides specbench_cli. Other projects may use these names."""

LOSSLESS = "lossless"
"""Guarantee: the tokens of vanilla decoding, or under rejection sampling their distribution."""

LOSSY = "lossy"
"""Guarantee of methods that are not lossless. Reports compare their accuracy with vanilla's."""

FAMILIES = (
    "nothing",
    "a draft model",
    "a draft model with any tokenizer",
    "a draft model, a segment of text at a time",
    "a draft model, in parallel with the target",
    "a head on the target's hidden states",
    "the target itself, or a part of it",
    "earlier text",
    "transformers",
    "OpenVINO GenAI",
    "llama.cpp",
    "a server",
)
"""Families of built-in methods in the order of tables. The names say what drafts tokens."""


@dataclass(frozen=True, slots=True)
class MethodEntry:
    """Facts about a method that are known without importing it.

    Attributes:
        target: "package.module:Class".
        summary: first line of the class's docstring.
        aliases: other names that `--method` accepts.
        family: what drafts tokens; one of `FAMILIES` for built-in methods.
        needs: required models: "draft", "head".
        peer: True if another project implements it (a peer). Peers are measured but not audited.
        baseline: the method that its speedups are relative to.
        guarantee: LOSSLESS or LOSSY, with default parameters; empty if unknown before the import.
        proposed_in: keys in `methods/papers.yaml` of the papers that propose it.
        builds_on: keys of further papers to cite.
        project: the project that implements it, if no paper proposes it.
        origin: source of the method: "specbench", a distribution, or a file.
    """

    target: str
    summary: str
    aliases: tuple[str, ...] = ()
    family: str = ""
    needs: tuple[str, ...] = ()
    peer: bool = False
    baseline: str = "vanilla"
    guarantee: str = LOSSLESS
    proposed_in: tuple[str, ...] = ()
    builds_on: tuple[str, ...] = ()
    project: str = ""
    origin: str = "specbench"

    @property
    def source(self) -> str:
        """Sources of the method: its papers, else the project that implements it."""
        papers = _bibliography()
        return ", ".join(papers[key]["source"] for key in self.proposed_in) or self.project


@dataclass(frozen=True, slots=True)
class Papers:
    """Citations of a method, and the speedups that its papers claim.

    Attributes:
        citation: BibTeX entries of the papers. Empty if there are none.
        claims: Speedups that the papers report.
    """

    citation: str = ""
    claims: tuple[Claim, ...] = ()


_plugin_methods: dict[str, MethodEntry] = {}


@cache
def built_in_methods() -> dict[str, MethodEntry]:
    """Return the built-in methods, in the order of `FAMILIES` and of their names.

    A class in `methods/NAME.py` or `methods/NAME/method.py` has these facts as class attributes.
    They are parsed from the source text, because importing the classes would import torch.
    """
    found: dict[str, MethodEntry] = {}
    for module, file in _sources():
        found |= parse_entries(file.read_text(encoding="utf-8"), module)
    return dict(sorted(found.items(), key=lambda item: _sort_key(*item)))


def _sort_key(name: str, entry: MethodEntry) -> tuple[int, str]:
    """Return the sort key of a method: its family, then its name. Methods of other projects come
    last.
    """
    return FAMILIES.index(entry.family), "" if entry.peer else name.replace("-", "")


def _sources() -> Iterator[tuple[str, Traversable]]:
    """Yield the name and file of each module that defines methods, ordered by method."""
    root = importlib.resources.files("methods")
    for each in sorted(root.iterdir(), key=lambda each: each.name.removesuffix(".py")):
        name = each.name.removesuffix(".py")
        if name.startswith("_"):
            continue
        if (whole := each / "method.py").is_file():
            yield f"methods.{name}.method", whole
        elif each.name.endswith(".py"):
            yield f"methods.{name}", each


def parse_entries(text: str, module: str) -> dict[str, MethodEntry]:
    """Return the method classes in a module's source text as entries, without importing the module.

    A class inherits the attributes of its base classes in the same module.

    Args:
        text: source text of the module.
        module: name of the module.

    Raises:
        ValueError: the value of an attribute is not a literal.
    """
    attributes: dict[str, dict[str, Any]] = {}
    found = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        own = dict(_read_declarations(node, module))
        bases = [attributes.get(base.id, {}) for base in node.bases if isinstance(base, ast.Name)]
        known = attributes[node.name] = {k: v for base in bases for k, v in base.items()} | own
        if "name" in own and known.get("family") and not node.name.startswith("_"):
            found[own["name"]] = MethodEntry(
                f"{module}:{node.name}",
                (ast.get_docstring(node) or "").partition("\n")[0],
                aliases=own.get("aliases", ()),
                family=known["family"],
                needs=tuple(sorted(known.get("needs", ()))),
                peer=known.get("peer", False),
                baseline=known.get("baseline", "vanilla"),
                guarantee=LOSSY if known.get("lossy") else LOSSLESS,
                proposed_in=known.get("proposed_in", ()),
                builds_on=known.get("builds_on", ()),
                project=known.get("project", ""),
            )
    return found


_DECLARED = frozenset(
    {"name", "aliases", "family", "needs", "peer", "baseline", "lossy", "proposed_in"}
    | {"builds_on", "project"}
)
"""Class attributes from which an entry is made."""


def _read_declarations(node: ast.ClassDef, module: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of those class attributes that belong into a registry entry."""
    for each in node.body:
        if not (isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)):
            continue
        if each.target.id not in _DECLARED or each.value is None:
            continue
        value = each.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.args:
            value = value.args[0]  # frozenset({...})
        try:
            yield each.target.id, ast.literal_eval(value)
        except ValueError as fault:
            place = f"{module}:{each.lineno}: {node.name}.{each.target.id}"
            raise ValueError(f"{place} must be a literal: the registry reads it") from fault


def entries() -> dict[str, MethodEntry]:
    """Return all methods by name. A plug-in cannot replace a built-in method."""
    return {**built_in_methods(), **_entry_point_methods(), **_plugin_methods}


def entries_without_plugins() -> Mapping[str, MethodEntry]:
    """Return the methods that are built in, or provided by other installed packages."""
    return {**built_in_methods(), **_entry_point_methods()}


@cache
def _entry_point_methods() -> dict[str, MethodEntry]:
    """Return the methods that other installed packages provide as entry points.

    The result is cached, because reading the metadata of packages is slow.
    """
    import importlib.metadata

    found = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name in built_in_methods():
            continue
        package = point.dist.name if point.dist else "an unknown distribution"
        found[point.name] = MethodEntry(
            point.value, f"from {package}", guarantee="", origin=package
        )
    return found


def check_shadowing() -> None:
    """Raise UsageError if another package hides a package of specbench from Python's import."""
    home = Path(__file__).resolve().parents[1]
    for name in SIBLING_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise UsageError(
                f"specbench's package {name!r} is not installed", "pip install specbench-cli"
            )
        found = Path(next(iter(spec.submodule_search_locations or [str(spec.origin)])))
        if found.resolve() != home / name:
            raise UsageError(
                f"another package named {name!r} shadows specbench's: {found}",
                "run from another folder, or install specbench-cli in a venv of its own",
            )


def has_loaded_plugin() -> bool:
    """Return True if this process has imported a plug-in."""
    return bool(_plugin_methods)


def resolve(name: str) -> str:
    """Return the canonical name of a method, given its name or an alias.

    Raises:
        UsageError: The method is unknown.
    """
    known = entries()
    word = name.strip().lower()
    if word in known:
        return word
    aliases = {alias: canonical for canonical, entry in known.items() for alias in entry.aliases}
    if word in aliases:
        return aliases[word]
    guess = did_you_mean(word, [*known, *aliases])
    raise UsageError(
        f"there is no method {shorten(repr(name))}{guess or f'; there are {join_names(known)}'}",
        f"--plugin {name}" if word.endswith(".py") else "specbench list methods",
    )


def lossless_methods() -> list[str]:
    """Return the names of the lossless methods that specbench itself implements.

    Methods that call another project, such as an inference server, are left out.
    """
    return [
        name
        for name, each in built_in_methods().items()
        if each.guarantee == LOSSLESS and not each.peer
    ]


def load(name: str) -> type[Method]:
    """Import a method's class.

    Raises:
        UsageError: The method is unknown, or another distribution's method fails to import.
    """
    canonical = resolve(name)
    entry = entries()[canonical]
    if entry.origin != "specbench":
        from specbench_cli.plugin import check_name

        check_name(canonical, entry.origin)
    module, _, attribute = entry.target.partition(":")
    try:
        found: type[Method] = getattr(importlib.import_module(module), attribute)
    except Exception as fault:
        if entry.origin == "specbench":
            raise
        raise UsageError(
            f"method {name!r} of {entry.origin} does not import: {type(fault).__name__}:"
            f" {message_of(fault)}",
            f"pip install --upgrade {entry.origin}",
        ) from fault
    return found


def papers(name: str) -> Papers:
    """Return the citations of a method, and the speedups that its papers claim.

    Raises:
        UsageError: The method is unknown, or its class fails to import.
    """
    entry = entries()[resolve(name)]
    if entry.proposed_in or entry.builds_on:  # known without importing the method
        return _cite_papers(entry.proposed_in, entry.builds_on)
    method = load(name)
    if method.citation or method.claims:
        return Papers(inspect.cleandoc(method.citation), tuple(method.claims))
    return _cite_papers(method.proposed_in, method.builds_on)


def _cite_papers(proposed_in: Sequence[str], builds_on: Sequence[str]) -> Papers:
    """Return the citations of papers, and the speedups claimed by those in `proposed_in`.

    Args:
        proposed_in: Keys of papers that propose the method.
        builds_on: Keys of other papers to cite.
    """
    from specbench_cli.engine.params import Claim

    known = _bibliography()
    citations = [known[key]["citation"].strip() for key in (*proposed_in, *builds_on)]
    claims = [claim for key in proposed_in for claim in known[key].get("claims", ())]
    return Papers("\n\n".join(citations), tuple(Claim(**claim) for claim in claims))


@cache
def _bibliography() -> dict[str, Any]:
    """Return the content of `methods/papers.yaml`.

    It maps a BibTeX key to the source, the citation and the claims of a paper.
    """
    import yaml

    text = importlib.resources.files("methods").joinpath("papers.yaml").read_text(encoding="utf-8")
    papers: dict[str, Any] = yaml.safe_load(text)["papers"]
    return papers


def build(name: str, params: Mapping[str, Any]) -> Method:
    """Import a method, and return an instance with these parameters. Others have their defaults.

    Raises:
        UsageError: The method or a parameter is unknown, or a value is not allowed.
    """
    return _with_parameters(load(name), name, params)


def declare(name: str, params: Mapping[str, Any]) -> Method:
    """Return an instance of a method that has its parameters and declarations, but cannot decode.

    Unlike `build`, this does not import torch. Exceptions are plug-ins, and methods of other
    projects
    that check whether their software is installed.

    Raises:
        UsageError: The method or a parameter is unknown, or a value is not allowed.
    """
    canonical = resolve(name)
    entry = entries()[canonical]
    if entry.origin != "specbench":
        return build(name, params)
    from specbench_cli.declarations import load_declaration
    from specbench_cli.engine.method import Method

    kind: type[Method] = load_declaration(*entry.target.split(":"))
    if kind.check is not Method.check:
        return build(name, params)
    return _with_parameters(kind, name, params)


def _with_parameters(kind: type[Method], name: str, params: Mapping[str, Any]) -> Method:
    """Return an instance of a method's class with these parameters.

    Raises:
        UsageError: A parameter is unknown or its value is not allowed.
    """
    from pydantic import ValidationError

    try:
        return kind(kind.Params.model_validate(dict(params)))
    except ValidationError as found:
        raise usage_error(
            found,
            subject=lambda place: f"{name}.{'.'.join(map(str, place))}" if place else name,
            keys=lambda place: list(kind.Params.model_fields),
            hint=f"specbench list methods {name}",
        ) from found


def load_plugin(path: str) -> list[str]:
    """Register all methods that a Python file defines.

    Returns:
        The names of the methods.

    Raises:
        UsageError: The file cannot be imported or defines no method, or a name is already in use.
    """
    from specbench_cli import plugin

    origin = Path(path).name
    found = plugin.read(path)
    for name, method in found.items():
        holder = entries().get(name)
        if holder and holder.origin != origin:
            raise UsageError(
                f"{path}: the name {name!r} is taken by {holder.origin}",
                f'give {method.__name__} another `name = "..."`',
            )
        _plugin_methods[name] = _describe(method, origin)
    return list(found)


def _describe(method: type[Method], origin: str) -> MethodEntry:
    """Return the registry entry of a method that was already imported."""
    return MethodEntry(
        f"{method.__module__}:{method.__qualname__}",
        (method.__doc__ or "").strip().partition("\n")[0],
        needs=tuple(sorted(method.needs)),
        peer=method.peer,
        baseline=method.baseline,
        guarantee="",
        origin=origin,
    )
