"""`specbench list`: list methods, tasks, models, runs, model shapes and hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specbench_cli import output, registry
from specbench_cli.commands._card import brief, card, catalogue_row, family_rows
from specbench_cli.config import options
from specbench_cli.config.problems import did_you_mean, listed, shown
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.config.commands import ListOptions

EXAMPLES = (
    "specbench list methods",
    "specbench list methods sps",
    "specbench list runs --json",
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))


class Listing(NamedTuple):
    """Functions for a kind of entries: names, facts of one entry, and the facts for a table."""

    names: Callable[[], list[str]]
    brief: Callable[[str], dict[str, Any]]
    full: Callable[[str], dict[str, Any]]
    columns: tuple[str, ...]


@options.parsed_command("specbench_cli.config.commands:ListOptions")
def list_(asked: ListOptions) -> None:
    """List methods, tasks, models, runs, model shapes or hardware, or show one of them."""
    kind, name = asked.kind, asked.name
    if (asked.markdown or asked.families) and (
        kind != "methods" or name is not None or asked.as_json
    ):
        wanted = "--markdown" if asked.markdown else "--families"
        raise UsageError(f"{wanted} is for all methods", f"specbench list methods {wanted}")
    if asked.families:
        output.data(_markdown(family_rows()))
        return
    listing = LISTINGS[kind]
    if name is not None:
        facts = listing.full(name)
        output.json_line(facts) if asked.as_json else _show(facts)
        return
    found = [listing.brief(each) for each in listing.names()]
    if asked.as_json:
        for facts in found:
            output.json_line(facts)
    elif asked.markdown:
        output.data(_markdown([catalogue_row(facts) for facts in found]))
    else:
        output.rows(found, listing.columns)


def _show(facts: dict[str, Any]) -> None:
    """Print all facts of an entry: short facts first, then tables, then long texts."""
    tables = {key: value for key, value in facts.items() if _is_table(value)}
    texts = {key: value for key, value in facts.items() if isinstance(value, str) and "\n" in value}
    output.facts({k: v for k, v in facts.items() if k not in tables and k not in texts})
    for key, value in tables.items():
        output.data(f"\n{key}")
        output.rows(value)
    for value in texts.values():
        output.data(f"\n{value}")


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table of rows that have the same keys and contain Markdown."""
    from specbench_cli.report.markdown_table import table

    return table(list(rows[0]), ([*row.values()] for row in rows), escaped=True)


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


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
    """Return a model's facts, and the measured quality of a shipped model."""
    from specbench_cli.models import describe
    from specbench_cli.models.quality import quality_tables

    facts = describe(name)
    return {**facts, **quality_tables(facts.get("same_as", name))}


def _shape_names() -> list[str]:
    from specbench_cli.models.shapes import load_shapes

    return list(load_shapes())


def _shape(name: str) -> dict[str, Any]:
    from specbench_cli.models.shapes import get_shape

    found = get_shape(name)
    return {"name": name, "parameters": found.parameters, **found.model_dump()}


def _hardware_names() -> list[str]:
    from specbench_cli.predict.accelerators import load_accelerators

    return list(load_accelerators())


def _hardware(name: str) -> dict[str, Any]:
    from specbench_cli.predict.accelerators import load_accelerators

    known = load_accelerators()
    if name not in known:
        guess = did_you_mean(name, known)
        raise UsageError(f"unknown hardware {shown(repr(name))}{guess}", f"known: {listed(known)}")
    facts = known[name].model_dump()
    peaks = {f"flops_{dtype}": peak for dtype, peak in facts.pop("flops").items()}
    return {"name": name, "device": facts.pop("name"), **peaks, **facts}


def _run_names() -> list[str]:
    return list(_runs())


def _runs() -> dict[str, Path]:
    """Return the folders of runs, by name in the default folder and by path elsewhere."""
    from specbench_cli.store.run_dir import RUNS, list_runs

    return {path.name if path.parent == RUNS else str(path): path for path in list_runs()}


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

    found = _runs()
    if name not in found:
        raise UsageError(
            f"there is no run {shown(repr(name))} in {RUNS}{did_you_mean(name, found)}",
            "specbench list runs",
        )
    return {"name": name, **RunDir.open(found[name]).manifest}


LISTINGS: dict[str, Listing] = {
    "methods": Listing(
        lambda: list(registry.entries()),
        brief,
        card,
        ("name", "aliases", "needs", "guarantee", "summary"),
    ),
    "tasks": Listing(_task_names, _task, _task, ("name", "rows", "embedded", "licence", "title")),
    "models": Listing(
        _model_names,
        _model,
        _model_in_full,
        ("name", "parameters", "draft", "download_gb", "available", "licence"),
    ),
    "runs": Listing(
        _run_names, _run, _run_in_full, ("name", "status", "target", "tasks", "methods")
    ),
    "shapes": Listing(
        _shape_names,
        _shape,
        _shape,
        ("name", "parameters", "family", "layers", "hidden", "experts", "source"),
    ),
    "hardware": Listing(
        _hardware_names,
        _hardware,
        _hardware,
        ("name", "device", "memory", "bandwidth", "flops_bfloat16", "link", "source"),
    ),
}
