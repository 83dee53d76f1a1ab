"""`specbench compare`: what a change did to outputs, counters and speed; baselines and trends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbench_cli import files, output
from specbench_cli.commands import OUTPUT, OVERWRITE
from specbench_cli.commands._formats import formats
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.comparison.outcome import Comparison

FILES = {"markdown": "compare.md", "junit": "compare.xml", "json": "compare.json"}
"""What a comparison can be written as, and the file of each in a folder."""
TOLERANCE = "5%"
GATE = "broken,changed-output,mat,slower"
"""`FAIL_ON` of the outcomes, which are not imported for a page of help."""
EXAMPLES = (
    "specbench compare results/runs/20261121T102403Z-mini-1f2e3d4c last",
    "specbench compare main last --tolerance 3%",
    "specbench compare main last --fail-on broken,changed-output",
    "specbench compare main last --to markdown >> $GITHUB_STEP_SUMMARY",
    "specbench compare main last --format tsv",
    "specbench compare main last --to markdown,junit,json -o compared",
    "specbench compare base new",
    "specbench compare --save main last",
    "specbench compare --over-time results/runs/* -o trend",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "Exit code 1: the gate is closed. To accept what changed, save it as the new baseline.",
    )
)
GATED = "Gate"
BASELINES = "Baselines and trends"
SIDES = "specbench compare BASE NEW"


def compare(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BASE NEW",
            help="Runs, `last`, folders of several runs of one program, baseline files, or names of"
            " baselines. With --save or --over-time: RUN...",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        str,
        typer.Option(metavar="5%|0.05", help="Slowdown that is let pass.", rich_help_panel=GATED),
    ] = TOLERANCE,
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="OUTCOMES",
            help="What closes the gate: some of broken, changed-output, mat, slower, missing,"
            " faster, new; or none.",
            rich_help_panel=GATED,
        ),
    ] = GATE,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Keep RUN... as this machine's baseline NAME in results/baselines.",
            rich_help_panel=BASELINES,
        ),
    ] = None,
    over_time: Annotated[
        bool,
        typer.Option(
            "--over-time",
            help="How figures went over RUN..., default all runs, and where they changed.",
            rich_help_panel=BASELINES,
        ),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMATS",
            help=f"Instead of a table: {', '.join(FILES)}; separate by commas.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="A file for one format, a folder for several.",
            show_default="stdout",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help=OVERWRITE, rich_help_panel=OUTPUT)
    ] = False,
    form: Annotated[
        Literal["table", "tsv", "json"],
        typer.Option(
            "--format",
            help="How it is printed; json: one document.",
            rich_help_panel=OUTPUT,
        ),
    ] = "table",
    json: Annotated[
        bool, typer.Option("--json", help="Short for --format json.", rich_help_panel=OUTPUT)
    ] = False,
) -> ExitCode:
    """Compare two runs, method by method: same, faster, slower, other output, broken.

    Ids and counters are compared exactly where machine and versions are the same, else by verdicts;
    times on one machine only, where a difference counts if it is significant and above --tolerance.
    Small ones are seen where runs of both sides took turns (run --in-turn). What cannot be compared
    is named. Exit code 1 closes the gate.
    """
    given = sides or []
    if save is not None and over_time:
        raise UsageError(
            "--save and --over-time do not go together", f"specbench compare --save {save} RUN"
        )
    form = "json" if json else form
    printed = {"--format": form != "table"}
    gated = {"--tolerance": tolerance != TOLERANCE, "--fail-on": fail_on != GATE}
    if save is not None:
        _alone("--save", {**gated, **printed, "--to": to, "--out": out, "--overwrite": overwrite})
        return _save(save, given)
    if over_time:
        _alone("--over-time", {**gated, "--to": to})
        return _over_time(given, out, form, overwrite)
    return _compare(given, tolerance, fail_on, to, out, form, overwrite)


def _compare(
    given: list[str],
    tolerance: str,
    fail_on: str,
    to: str | None,
    out: Path | None,
    form: output.Format,
    overwrite: bool,
) -> ExitCode:
    """Both gates over BASE and NEW."""
    if len(given) != 2:
        raise UsageError(
            f"two sides are compared, BASE and NEW; {len(given)} given: {' '.join(given) or '-'}",
            "specbench compare --over-time " + " ".join(given) if len(given) > 2 else SIDES,
        )
    if form != "table" and to is not None:
        raise UsageError(
            "--to makes documents, and --format says how the table is printed: give one of the two",
            f"{SIDES} --to {to}",
        )
    formats = _formats(to)
    if out is not None and not formats:
        raise UsageError("--out needs --to", f"{SIDES} --to markdown --out {out}")
    if len(formats) > 1 and out is None:
        raise UsageError(
            "--to with several formats needs --out, a folder", f"{SIDES} --to {to} -o DIR"
        )
    from specbench_cli.comparison.outcome import gate

    let_pass, closing = as_share(tolerance), gate(fail_on)
    from specbench_cli.comparison.compare import compare as put_together
    from specbench_cli.comparison.reading import side

    failed = False
    for name, pair in _pairs(*given).items():
        base, new = map(side, pair)
        gc.freeze()  # as in report: what was read has no cycles
        found = put_together(base, new, tolerance=let_pass, fail_on=closing)
        failed = failed or bool(found.failed)
        place = out / name if name and out is not None else out
        _told(found, form, formats, place, overwrite)
    return ExitCode.BAD_ANSWER if failed else ExitCode.OK


def _told(
    found: Comparison, form: output.Format, formats: list[str], out: Path | None, overwrite: bool
) -> None:
    """Print a comparison, or write it."""
    from specbench_cli.comparison.pages.words import headline

    if form == "json":
        from specbench_cli.comparison.pages.as_dict import as_dict

        output.json_line(as_dict(found))
    elif not formats:
        from specbench_cli.comparison.pages.text import show

        show(found, form)
    elif out is None:
        output.data(_rendered(found, formats[0]).rstrip("\n"))
    else:
        _write(found, formats, out, overwrite)
    if form == "json" or formats:
        output.note(headline(found))


def _pairs(base: str, new: str) -> dict[str, tuple[str, str]]:
    """What is compared with what: the two, or of two runs of several targets each target's, by
    name. Raises UsageError where only one is such."""
    from specbench_cli.store.matrix import is_matrix, members
    from specbench_cli.store.run_dir import folder

    sides = [folder(each) for each in (base, new)]
    held = [{run.name: str(run) for run in members(path)} for path in sides if is_matrix(path)]
    if not held:
        return {"": (base, new)}
    shared = [name for name in held[0] if name in held[-1]]
    if len(held) == 1 or not shared:
        raise UsageError(
            f"{base} and {new} have no target in common"
            if len(held) > 1
            else f"only one of {base} and {new} is runs of several targets",
            f"compare two of one target: specbench compare RUN {next(iter(held[0].values()))}",
        )
    for name in held[0].keys() ^ held[1].keys():
        output.note(f"{name} is in one of the two alone: not compared")
    return {name: (held[0][name], held[1][name]) for name in shared}


def _write(found: Comparison, formats: list[str], out: Path, overwrite: bool) -> None:
    """One format into the file `out`, or into that folder where there is one; several into it."""
    several = len(formats) > 1 or out.is_dir()
    places = {name: out / FILES[name] if several else out for name in formats}
    texts = {name: _rendered(found, name) for name in formats}
    try:
        for file in places.values():
            files.check_listed(file, overwrite=overwrite)
        for name, file in places.items():
            files.write_listed(file, texts[name], overwrite=overwrite)
    except OSError as error:
        raise UsageError(
            f"cannot write to {out}: {error.strerror}", f"{SIDES} --to {formats[0]} -o FILE"
        ) from error
    for file in places.values():
        output.data(str(file))


def _rendered(found: Comparison, name: str) -> str:
    from specbench_cli.comparison.pages import as_dict, junit, markdown

    renderings: dict[str, Callable[[Comparison], str]] = {
        "markdown": markdown.render,
        "junit": junit.render,
        "json": lambda comparison: _document(as_dict.as_dict(comparison)),
    }
    return renderings[name](found)


def _document(content: dict[str, Any]) -> str:
    return output.escaped_json(dumps(content, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def _save(name: str, runs: list[str]) -> ExitCode:
    """Make runs this machine's baseline."""
    from specbench_cli.comparison.baselines.baseline import save
    from specbench_cli.comparison.reading import folders
    from specbench_cli.store.run_dir import folder

    if not runs:
        raise UsageError("--save needs a run", f"specbench compare --save {name} last")
    every = [one for run in runs for one in folders(run) or [folder(run)]]
    file = save(name, every, tell=output.note)
    output.data(str(file))
    output.note(f"next: specbench compare {name} RUN")
    return ExitCode.OK


def _over_time(runs: list[str], out: Path | None, form: output.Format, overwrite: bool) -> ExitCode:
    """Print trends; draw them into a folder."""
    from specbench_cli.comparison.trend import over_time

    trends = over_time(runs)
    if form == "json":
        from specbench_cli.comparison.pages.as_dict import trends_as_dict

        output.json_line(trends_as_dict(trends))
    else:
        from specbench_cli.comparison.pages.text import print_trends

        print_trends(trends, form)
    if out is not None:
        from specbench_cli.comparison.pages.figure import write

        try:
            with files.staging_folder(out, overwrite=overwrite) as staging:
                written = write(trends, staging)
        except OSError as error:
            raise UsageError(
                f"cannot write to {out}: {error.strerror}", "specbench compare --over-time -o DIR"
            ) from error
        for file in written:
            output.note(str(out / file.relative_to(staging)))
    return ExitCode.OK


def _alone(option: str, others: dict[str, object]) -> None:
    """Raise UsageError for an option that says nothing beside another."""
    for other, given in others.items():
        if given:
            raise UsageError(
                f"{other} belongs to a comparison, not to {option}", f"{SIDES} {other} ..."
            )


def _formats(to: str | None) -> list[str]:
    """The words of --to."""
    return formats(to, FILES, f"{SIDES} --to markdown") if to is not None else []


def as_share(tolerance: str) -> float:
    """`5%` or `0.05` as 0.05."""
    number, percent = tolerance.strip().removesuffix("%"), tolerance.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(
            f"--tolerance {tolerance!r} is no share from 0 to 1: 5% or 0.05",
            f"{SIDES} --tolerance 5%",
        )
    return share
