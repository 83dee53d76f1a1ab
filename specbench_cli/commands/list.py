"""`specbench list`: list methods, tasks, models, runs, model shapes and hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specbench_cli import output, registry
from specbench_cli.commands._card import catalogue_row, describe_entry, describe_method, family_rows
from specbench_cli.config.options import parsed_command
from specbench_cli.config.problems import did_you_mean, join_names, shorten
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
    """Functions that list entries of one kind, such as tasks.

    Attributes:
        names: Returns the names of all entries.
        brief: Returns the short facts of an entry, for one row of the table.
        full: Returns all facts of an entry.
        columns: Columns of the table.
    """

    names: Callable[[], list[str]]
    brief: Callable[[str], dict[str, Any]]
    full: Callable[[str], dict[str, Any]]
    columns: tuple[str, ...]


@parsed_command("specbench_cli.config.commands:ListOptions")
def list_(options: ListOptions) -> None:
    """List methods, tasks, models, runs, model shapes or hardware, or show one of them.

    Model shapes and hardware are names for `specbench predict` (--shape, --hardware).
    """
    kind, name = options.kind, options.name
    if (options.markdown or options.families) and (
        kind != "methods" or name is not None or options.as_json
    ):
        wanted = "--markdown" if options.markdown else "--families"
        raise UsageError(
            f"{wanted} lists all methods and cannot be combined with other options",
            f"specbench list methods {wanted}",
        )
    if options.families:
        output.data(_to_markdown(family_rows()))
        return
    listing = LISTINGS[kind]
    if name is not None:
        facts = listing.full(name)
        output.json_line(facts) if options.as_json else _show(facts)
        return
    found = [listing.brief(each) for each in listing.names()]
    if options.as_json:
        for facts in found:
            output.json_line(facts)
    elif options.markdown:
        output.data(_to_markdown([catalogue_row(facts) for facts in found]))
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


def _to_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a Markdown table. All rows have the same keys, which are the columns.

    The cells are not escaped, because they may contain Markdown.
    """
    from specbench_cli.report.markdown_table import table

    return table(list(rows[0]), ([*row.values()] for row in rows), escaped=True)


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _task_names() -> list[str]:
    from specbench_cli.tasks import task_names

    return task_names()


def _describe_task(name: str) -> dict[str, Any]:
    from specbench_cli.tasks import describe

    return describe(name)


def _model_names() -> list[str]:
    from specbench_cli.models import model_names

    return model_names()


def _describe_model(name: str) -> dict[str, Any]:
    from specbench_cli.models import describe

    return describe(name)


def _describe_model_fully(name: str) -> dict[str, Any]:
    """Return all facts of a model. For a model shipped with specbench, add its measured quality."""
    from specbench_cli.models import describe
    from specbench_cli.models.quality import quality_tables

    facts = describe(name)
    return {**facts, **quality_tables(facts.get("same_as", name))}


def _shape_names() -> list[str]:
    from specbench_cli.models.shapes import load_shapes

    return list(load_shapes())


def _describe_shape(name: str) -> dict[str, Any]:
    from specbench_cli.models.shapes import get_shape

    found = get_shape(name)
    return {"name": name, "parameters": found.parameters, **found.model_dump()}


def _hardware_names() -> list[str]:
    from specbench_cli.predict.accelerators import load_accelerators

    return list(load_accelerators())


def _describe_hardware(name: str) -> dict[str, Any]:
    from specbench_cli.predict.accelerators import load_accelerators

    known = load_accelerators()
    if name not in known:
        guess = did_you_mean(name, known)
        raise UsageError(
            f"unknown hardware {shorten(repr(name))}{guess}", f"known: {join_names(known)}"
        )
    facts = known[name].model_dump()
    peaks = {f"flops_{dtype}": peak for dtype, peak in facts.pop("flops").items()}
    return {"name": name, "device": facts.pop("name"), **peaks, **facts}


def _run_names() -> list[str]:
    """Return the names of runs, newest first. Runs without a date come last."""
    from specbench_cli.store.run_dir import RunDir

    created = {
        name: str(RunDir.open(path).manifest.get("created_utc") or "")
        for name, path in _runs().items()
    }
    return sorted(created, key=created.__getitem__, reverse=True)


def _runs() -> dict[str, Path]:
    """Return the folders of all runs by name. A run outside the default folder has its path as
    name.
    """
    from specbench_cli.store.run_dir import RUNS, list_runs

    return {path.name if path.parent == RUNS else str(path): path for path in list_runs()}


def _describe_run(name: str) -> dict[str, Any]:
    from specbench_cli.store.summary_file import describe_fastest

    manifest = _describe_run_fully(name)
    config = manifest.get("config", {}).get("effective", {})
    return {
        "name": name,
        "created_utc": manifest.get("created_utc"),
        "status": manifest.get("status"),
        "best": describe_fastest(_runs()[name]),
        "target": config.get("target"),
        "tasks": config.get("tasks"),
        "methods": [choice["label"] for choice in config.get("methods", [])],
    }


def _describe_run_fully(name: str) -> dict[str, Any]:
    from specbench_cli.store.run_dir import RUNS, RunDir

    found = _runs()
    if name not in found:
        raise UsageError(
            f"unknown run {shorten(repr(name))} in {RUNS}{did_you_mean(name, found)}",
            "specbench list runs",
        )
    return {"name": name, **RunDir.open(found[name]).manifest}


LISTINGS: dict[str, Listing] = {
    "methods": Listing(
        lambda: list(registry.entries()),
        describe_entry,
        describe_method,
        ("name", "aliases", "needs", "guarantee", "summary"),
    ),
    "tasks": Listing(
        _task_names,
        _describe_task,
        _describe_task,
        ("name", "rows", "embedded", "licence", "title"),
    ),
    "models": Listing(
        _model_names,
        _describe_model,
        _describe_model_fully,
        ("name", "parameters", "draft", "download_gb", "available", "licence"),
    ),
    "runs": Listing(
        _run_names,
        _describe_run,
        _describe_run_fully,
        ("name", "created_utc", "status", "best", "target", "tasks", "methods"),
    ),
    "shapes": Listing(
        _shape_names,
        _describe_shape,
        _describe_shape,
        ("name", "parameters", "family", "layers", "hidden", "experts", "source"),
    ),
    "hardware": Listing(
        _hardware_names,
        _describe_hardware,
        _describe_hardware,
        ("name", "device", "memory", "bandwidth", "flops_bfloat16", "link", "source"),
    ),
}
