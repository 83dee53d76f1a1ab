"""`specbench compare`: compare the outputs, counters and speed of runs, or show their trend."""

from __future__ import annotations

import gc
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli import files, output
from specbench_cli.commands._formats import parse_formats
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.comparison.outcome import Comparison
    from specbench_cli.config.commands import CompareOptions

FILES = {"markdown": "compare.md", "junit": "compare.xml", "json": "compare.json"}
"""File name of each output format in a folder."""
EXAMPLES = (
    "specbench compare results/runs/20261121T102403Z-mini-1f2e3d4c last",
    "specbench compare main last --tolerance 3%",
    "specbench compare main last --fail-on broken,changed-output",
    "specbench compare main last --to markdown >> $GITHUB_STEP_SUMMARY",
    "specbench compare main last --format tsv",
    "specbench compare main last --to markdown,junit,json -o compared",
    "specbench compare base/ new/",
    "specbench compare --save main last",
    "specbench compare --over-time results/runs/* -o trend",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "Exit code 1: the comparison has an outcome of --fail-on. To accept the change, save a new"
        " baseline.",
    )
)
SIDES = "specbench compare BASE NEW"


@parsed_command("specbench_cli.config.commands:CompareOptions")
def compare(options: CompareOptions) -> ExitCode:
    """Compare two runs method by method, and fail on regressions.

    If machine, versions and settings are the same, output tokens and counters (steps, drafted and
    accepted tokens) must be equal. Otherwise, lossless methods must still pass the check against
    vanilla, and their counters may differ for at most 1% of the prompts, but always for one. Times
    are compared only between runs of one machine. To detect small slowdowns, run both sides with
    `specbench run --in-turn`.
    """
    if options.save is not None and options.over_time:
        raise UsageError(
            "--save and --over-time cannot be combined",
            f"specbench compare --save {options.save} RUN",
        )
    if options.save is not None:
        printed = ("form", "as_json", "to", "out", "overwrite")
        _check_exclusive(options, "--save", "tolerance", "fail_on", *printed)
        return _save(options.save, options.sides)
    if options.over_time:
        _check_exclusive(options, "--over-time", "tolerance", "fail_on", "to")
        return _over_time(options)
    return _compare(options)


def _compare(options: CompareOptions) -> ExitCode:
    """Compare BASE and NEW. Return exit code 1 if the comparison has an outcome of --fail-on."""
    formats = _check_formats(options)
    from specbench_cli.comparison.outcome import parse_fail_on, parse_tolerance

    tolerance, fail_on = parse_tolerance(options.tolerance), parse_fail_on(options.fail_on)
    from specbench_cli.comparison.compare import compare as put_together
    from specbench_cli.comparison.side_sources import load_side

    failed, (first, second) = False, options.sides
    for name, pair in _pair_runs(first, second).items():
        base, new = map(load_side, pair)
        gc.freeze()  # loaded records have no cycles, so skip them in garbage collection
        found = put_together(base, new, tolerance=tolerance, fail_on=fail_on)
        failed = failed or bool(found.failed_rows)
        place = options.out / name if name and options.out is not None else options.out
        _print_or_write(found, options.output_format, formats, place, options.overwrite)
    return ExitCode.BAD_ANSWER if failed else ExitCode.OK


def _check_formats(options: CompareOptions) -> list[str]:
    """Return the formats of `--to`. Raise UsageError for options that cannot be combined."""
    sides, to = options.sides, options.to
    if len(sides) != 2:
        raise UsageError(
            f"give two runs, BASE and NEW; got {len(sides)}: {' '.join(sides) or '-'}",
            "specbench compare --over-time " + " ".join(sides) if len(sides) > 2 else SIDES,
        )
    if options.output_format != "table" and to is not None:
        raise UsageError(
            "--to writes documents and --format prints a table: give only one of them",
            f"{SIDES} --to {to}",
        )
    found = parse_formats(to, FILES, f"{SIDES} --to markdown") if to is not None else []
    if options.out is not None and not found:
        raise UsageError("--out needs --to", f"{SIDES} --to markdown --out {options.out}")
    if len(found) > 1 and options.out is None:
        raise UsageError(
            "--to with several formats needs an output folder, --out", f"{SIDES} --to {to} -o DIR"
        )
    return found


def _print_or_write(
    comparison: Comparison,
    form: output.Format,
    formats: list[str],
    out: Path | None,
    overwrite: bool,
) -> None:
    """Print a comparison, or write it to files."""
    from specbench_cli.comparison.pages.words import headline

    if form == "json":
        from specbench_cli.comparison.pages.as_dict import as_dict

        output.json_line(as_dict(comparison))
    elif not formats:
        from specbench_cli.comparison.pages.text import print_comparison

        print_comparison(comparison, form)
    elif out is None:
        output.data(_render(comparison, formats[0]).rstrip("\n"))
    else:
        _write(comparison, formats, out, overwrite)
    if form == "json" or formats:
        output.note(headline(comparison))


def _pair_runs(base: str, new: str) -> dict[str, tuple[str, str]]:
    """Return the pairs of runs to compare: a base run and a new run by name of the pair.

    Two runs make one pair. Two matrices make one pair for each target that both contain.

    Raises:
        UsageError: Only one of the two is a matrix, or the matrices share no target.
    """
    from specbench_cli.store.matrix import is_matrix, run_folders
    from specbench_cli.store.run_dir import find_run

    sides = [find_run(each) for each in (base, new)]
    runs = [{run.name: str(run) for run in run_folders(path)} for path in sides if is_matrix(path)]
    if not runs:
        return {"": (base, new)}
    shared = [name for name in runs[0] if name in runs[-1]]
    if len(runs) == 1 or not shared:
        raise UsageError(
            f"{base} and {new} have no target in common"
            if len(runs) > 1
            else f"only one of {base} and {new} contains runs of several targets",
            f"compare two runs of one target: specbench compare RUN {next(iter(runs[0].values()))}",
        )
    for name in runs[0].keys() ^ runs[1].keys():
        output.note(f"{name} is missing on one side, so it is not compared")
    return {name: (runs[0][name], runs[1][name]) for name in shared}


def _write(comparison: Comparison, formats: list[str], out: Path, overwrite: bool) -> None:
    """Write a comparison in each format.

    `out` is the output file. It is a folder if it exists as a folder, or if there are several
    formats.
    """
    several = len(formats) > 1 or out.is_dir()
    places = {name: out / FILES[name] if several else out for name in formats}
    texts = {name: _render(comparison, name) for name in formats}
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


def _render(comparison: Comparison, name: str) -> str:
    from specbench_cli.comparison.pages import as_dict, junit, markdown

    renderings: dict[str, Callable[[Comparison], str]] = {
        "markdown": markdown.render,
        "junit": junit.render,
        "json": lambda comparison: _format_json(as_dict.as_dict(comparison)),
    }
    return renderings[name](comparison)


def _format_json(content: dict[str, Any]) -> str:
    return output.escape_json(dumps(content, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def _save(name: str, runs: list[str]) -> ExitCode:
    """Store runs as a baseline of this machine, for later comparisons."""
    from specbench_cli.comparison.baselines.baseline import save
    from specbench_cli.comparison.side_sources import find_run_folders
    from specbench_cli.store.run_dir import find_run

    if not runs:
        raise UsageError("--save needs a run", f"specbench compare --save {name} last")
    every = [one for run in runs for one in find_run_folders(run) or [find_run(run)]]
    file = save(name, every, warn=output.note)
    output.data(str(file))
    output.note(f"next: specbench compare {name} RUN")
    return ExitCode.OK


def _over_time(options: CompareOptions) -> ExitCode:
    """Print how the results of runs changed over time. With --out, also draw figures in that
    folder.
    """
    from specbench_cli.comparison.trend import load_trends

    trends, out = load_trends(options.sides), options.out
    if options.output_format == "json":
        from specbench_cli.comparison.pages.as_dict import trends_as_dict

        output.json_line(trends_as_dict(trends))
    else:
        from specbench_cli.comparison.pages.text import print_trends

        print_trends(trends, options.output_format)
    if out is not None:
        from specbench_cli.comparison.pages.figure import write

        try:
            with files.staging_folder(out, overwrite=options.overwrite) as staging:
                written = write(trends, staging)
        except OSError as error:
            raise UsageError(
                f"cannot write to {out}: {error.strerror}", "specbench compare --over-time -o DIR"
            ) from error
        for file in written:
            output.note(str(out / file.relative_to(staging)))
    return ExitCode.OK


def _check_exclusive(options: CompareOptions, option: str, *others: str) -> None:
    """Raise UsageError if one of the other options was given together with `option`."""
    for given in options.changed_flags(*others):
        other = "--format" if given == "--json" else given
        raise UsageError(f"{other} cannot be combined with {option}", f"{SIDES} {other} ...")
