"""`specbench list`: what there is to run, and what was run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import typer

from specbench_cli import output, registry
from specbench_cli.config.problems import did_you_mean
from specbench_cli.errors import UsageError


class Kind(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    TASKS = "tasks"
    MODELS = "models"
    RUNS = "runs"


class Listing(NamedTuple):
    """How one kind is listed: its names, the facts of one, and which of them fit in a table."""

    names: Callable[[], list[str]]
    brief: Callable[[str], dict[str, Any]]
    full: Callable[[str], dict[str, Any]]
    columns: tuple[str, ...]


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_default=False)],
    name: Annotated[
        str | None, typer.Argument(help="One of them, in full.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines, with every fact.")] = False,
) -> None:
    """List methods, tasks, models or runs; with NAME, show one in full."""
    listing = LISTINGS[kind]
    if name is not None:
        facts = listing.full(name)
        output.json_line(facts) if json else _show(facts)
        return
    found = [listing.brief(each) for each in listing.names()]
    if json:
        for facts in found:
            output.json_line(facts)
    else:
        output.rows(found, listing.columns)


def _show(facts: dict[str, Any]) -> None:
    """One thing in full: short facts first, then tables, then texts."""
    tables = {key: value for key, value in facts.items() if _is_table(value)}
    texts = {key: value for key, value in facts.items() if isinstance(value, str) and "\n" in value}
    output.facts({k: v for k, v in facts.items() if k not in tables and k not in texts})
    for key, value in tables.items():
        output.data(f"\n{key}")
        output.rows(value)
    for value in texts.values():
        output.data(f"\n{value}")


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _method(name: str) -> dict[str, Any]:
    """What the registry's table says; nothing is imported."""
    entry = registry.entries()[name]
    return {
        "name": name,
        "aliases": entry.aliases,
        "guarantee": entry.guarantee,
        "needs": entry.needs,
        "peer": entry.peer,
        "source": entry.source,
        "origin": entry.origin,
        "summary": entry.summary,
    }


def _method_in_full(name: str) -> dict[str, Any]:
    """The table's facts, then what the class itself says."""
    canonical = registry.resolve(name)
    method = registry.load(canonical)
    build = method()
    parameters = [
        {
            "parameter": f"{canonical}.{key}",
            "default": field.default,
            "type": _type(field.annotation),
            "description": field.description,
        }
        for key, field in method.Params.model_fields.items()
    ]
    return {
        **_method(canonical),
        "guarantee": {
            rule: build.guarantee(rule) for rule in ("greedy", "rejection", "block", "coupled")
        },
        "state_scope": method.state_scope,
        "timing_free": build.timing_free,
        "parameters": parameters,
        "about": inspect.getdoc(method) or "",
    }


def _type(annotation: Any) -> str:
    """A parameter's type as a user would say it: "int | heuristic | oracle"."""
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_type, get_args(annotation)))
    return "none" if annotation is NoneType else str(getattr(annotation, "__name__", annotation))


def _task_names() -> list[str]:
    from specbench_cli.tasks import task_names

    return task_names()


def _task(name: str) -> dict[str, Any]:
    from specbench_cli.tasks import describe

    return describe(name)


def _model_names() -> list[str]:
    from specbench_cli.models import model_names

    return model_names()


def _model(name: str) -> dict[str, Any]:
    from specbench_cli.models import describe

    return describe(name)


def _model_in_full(name: str) -> dict[str, Any]:
    """The alias's facts, and what a shipped model was measured to do."""
    from specbench_cli.models import describe
    from specbench_cli.models.quality import quality_tables

    facts = describe(name)
    return {**facts, **quality_tables(facts.get("same_as", name))}


def _run_names() -> list[str]:
    from specbench_cli.store.run_dir import RUNS

    return sorted(manifest.parent.name for manifest in RUNS.glob("*/manifest.json"))


def _run(name: str) -> dict[str, Any]:
    manifest = _run_in_full(name)
    config = manifest.get("config", {}).get("effective", {})
    return {
        "name": name,
        "status": manifest.get("status"),
        "created_utc": manifest.get("created_utc"),
        "target": config.get("target"),
        "tasks": config.get("tasks"),
        "methods": [choice["label"] for choice in config.get("methods", [])],
    }


def _run_in_full(name: str) -> dict[str, Any]:
    from specbench_cli.store.run_dir import RUNS, RunDir

    names = _run_names()
    if name not in names:
        raise UsageError(
            f"there is no run {name!r} in {RUNS}{did_you_mean(name, names)}", "specbench list runs"
        )
    return {"name": name, **RunDir.open(RUNS / name).manifest}


LISTINGS = {
    Kind.METHODS: Listing(
        lambda: list(registry.entries()),
        _method,
        _method_in_full,
        ("name", "aliases", "needs", "guarantee", "summary"),
    ),
    Kind.TASKS: Listing(
        _task_names, _task, _task, ("name", "rows", "embedded", "licence", "title")
    ),
    Kind.MODELS: Listing(
        _model_names,
        _model,
        _model_in_full,
        ("name", "parameters", "draft", "download_gb", "available", "licence"),
    ),
    Kind.RUNS: Listing(
        _run_names, _run, _run_in_full, ("name", "status", "target", "tasks", "methods")
    ),
}
