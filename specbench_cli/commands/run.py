"""`specbench run`: the main job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbench_cli import output, registry
from specbench_cli.config.profile import PROFILES
from specbench_cli.config.sources import option
from specbench_cli.errors import EnvironmentFault, ExitCode, UsageError, not_written
from specbench_cli.execute import apart

if TYPE_CHECKING:
    from specbench_cli.execute.view import RunView
    from specbench_cli.report.reading import Reading

EXAMPLES = (
    "specbench run",
    "specbench run -m sps,pld --limit 24",
    "specbench run -m sps --set sps.length=7 --temperature 0.8 --verify coupled",
    "specbench run -m vanilla,sps --batch 8 --limit 48",
    "specbench run -m sps -t mini --category translation --max-new-tokens 32 --repeats 3",
    "specbench run --sweep sps.length=1:6:1 --limit 24",
    "specbench run -m sps,pld --tune --limit 24",
    "specbench run -m pearl --devices target=cpu:0,draft=cpu:1",
    "specbench run --profile ci",
    "specbench run -m sps --limit 12 --in-turn turns --out base/1",
    "specbench run --target embedded-1m -m pld --threads 1 --allow-noise --out runs/lookup",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "Profiles:",
        *(f"{name}: {about}." for name, about in PROFILES.items()),
        "Every option can be set as SPECBENCH_OPTION in the environment, and by its name in a YAML"
        " file. Precedence: option, --set, environment, --config file, ./specbench.yaml, profile,"
        " default.",
    )
)

MORE = "More"

CANDIDATES = "8"
"""What `--tune` without a number means."""

NOISE = (
    "the machine was not quiet: other processes took more than 5% of it while too many outputs were"
    " timed, so those times are void and speedups are missing; outputs and verdicts stand",
    "close other programs (specbench doctor measures them) and run again; or keep such times,"
    " labelled noisy: --allow-noise",
)
"""What is said, and what to do, where a run ends with exit code 3."""


def run(
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", metavar="NAME", help="Methods; repeat, or use commas."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", metavar="NAME", help="Tasks, or .jsonl or .yaml files."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Target: short name, hub id, folder or GGUF."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Draft; auto, the default, is the target's own."),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="N", help="Questions of each task, over its families."),
    ] = None,
    temperature: Annotated[
        str | None, typer.Option(metavar="X", help="0, the default, is greedy.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="The run's folder; default results/runs/."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file with settings.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Settings by name, listed below.")
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Families or categories.", rich_help_panel=MORE),
    ] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="N", help="Of everything drawn.", rich_help_panel=MORE)
    ] = None,
    top_p: Annotated[
        str | None, typer.Option(metavar="X", help="Nucleus; 1 is off.", rich_help_panel=MORE)
    ] = None,
    top_k: Annotated[
        str | None, typer.Option(metavar="N", help="Top-k cut; 0 is off.", rich_help_panel=MORE)
    ] = None,
    verify: Annotated[
        Literal["rejection", "coupled", "block", "replay"] | None,
        typer.Option(
            metavar="RULE",
            help="Above temperature 0: rejection (default) keeps the target's law, as does block;"
            " coupled makes every lossless method emit vanilla's text. At any temperature: replay"
            " gives every method vanilla's tokens, so that counters and times pair exactly.",
            rich_help_panel=MORE,
        ),
    ] = None,
    max_new_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Longest output.", rich_help_panel=MORE)
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Decode N prompts together, in one forward of the target a step: throughput.",
            rich_help_panel=MORE,
        ),
    ] = None,
    load_: Annotated[
        str | None,
        typer.Option(
            "--load",
            metavar="ARRIVALS",
            help="Requests arrive by the clock, of which --batch N take part in a step:"
            " poisson:RATE (a second), burst:SIZE:SECONDS, trace:FILE. Latencies and throughput.",
            rich_help_panel=MORE,
        ),
    ] = None,
    repeats: Annotated[
        str | None,
        typer.Option(metavar="N", help="Passes, each a process.", rich_help_panel=MORE),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="M.PARAM=VALUE",
            help="A method's parameter: sps.length=7.",
            rich_help_panel=MORE,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M.PARAM=VALUES",
            help="A row for each value: sps.length=1:6:1, or 3,5,7. Several: all combinations.",
            rich_help_panel=MORE,
        ),
    ] = None,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="[N]",
            help="Choose each method's parameters among N (default 8) on development prompts;"
            " the result is of the others.",
            rich_help_panel=MORE,
        ),
    ] = None,
    tune_by: Annotated[
        Literal["time", "forwards"] | None,
        typer.Option(
            help="What --tune makes least: decode time a token, or the forwards' cost by the"
            " models' sizes, which no noise reaches.",
            rich_help_panel=MORE,
        ),
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N", help="Torch's threads.", rich_help_panel=MORE)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.", rich_help_panel=MORE),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE=PLACE,...",
            help="Of methods that draft while the target computes: target=cpu:0-3,draft=cpu:4-7, or"
            " target=cuda:0,draft=cuda:1. Default: the cores in halves; on a GPU two streams.",
            rich_help_panel=MORE,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="float32, bfloat16 or float16.", rich_help_panel=MORE),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts without a template.", rich_help_panel=MORE)
    ] = False,
    allow_noise: Annotated[
        bool,
        typer.Option(
            "--allow-noise",
            help="Keep times taken while other programs ran.",
            rich_help_panel=MORE,
        ),
    ] = False,
    in_turn: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take turns with the other runs that are given this file, a second each: for two"
            " sides of a comparison that meet the same machine.",
            rich_help_panel=MORE,
        ),
    ] = None,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Score code by running it: tests of humaneval and mbpp, in processes without"
            " files, network and children.",
            rich_help_panel=MORE,
        ),
    ] = False,
    uncontained: Annotated[
        bool,
        typer.Option(
            "--uncontained",
            help="With --run-code, where that is refused: under limits alone, as who you are.",
            rich_help_panel=MORE,
        ),
    ] = False,
    judge: Annotated[
        Literal["sample", "all"] | None,
        typer.Option(
            help="Which of vanilla's own outputs are held against transformers' module: the first"
            " of each family, or all.",
            rich_help_panel=MORE,
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Python file with methods.", rich_help_panel=MORE),
    ] = None,
    isolation: Annotated[
        Literal["process", "none"] | None,
        typer.Option(
            help="Where plug-ins decode: in a process of their own (default), which keeps what they"
            " do from other methods, or in the run's, for a debugger or to load models once.",
            rich_help_panel=MORE,
        ),
    ] = None,
    timeout_per_prompt: Annotated[
        str | None,
        typer.Option(
            metavar="S",
            help="Seconds after which a method has failed on a prompt; default 600.",
            rich_help_panel=MORE,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Do what an interrupted run lacks: its folder, or `last`.",
            rich_help_panel=MORE,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="With --resume: go on though the program, the machine or the data changed since,"
            " and label the run.",
            rich_help_panel=MORE,
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop.", rich_help_panel=MORE)
    ] = False,
    form: Annotated[
        Literal["table", "tsv", "json"],
        typer.Option(
            "--format",
            help="How the result is printed; json: what happens, too, an object a line.",
            rich_help_panel=MORE,
        ),
    ] = "table",
    json: Annotated[
        bool, typer.Option("--json", help="Short for --format json.", rich_help_panel=MORE)
    ] = False,
    only_pass: Annotated[int | None, typer.Option(hidden=True)] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> ExitCode:
    """Measure methods on prompts: speedups with intervals, verdicts, and where time goes.

    Vanilla decoding is always run. Without arguments: the embedded models on 12 prompts.
    """
    fields: dict[str, Any] = {
        "profile": profile,
        "methods": method,
        "tasks": task,
        "target": target,
        "draft": draft,
        "limit": limit,
        "category": category,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "verify": verify,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "batch": batch,
        "load": load_,
        "tune": tune,
        "tune_by": tune_by,
        "threads": threads,
        "device": device,
        "devices": devices,
        "dtype": dtype,
        "raw": raw,
        "allow_noise": allow_noise,
        "run_code": run_code,
        "uncontained": uncontained,
        "judge": judge,
        "plugins": plugin,
        "isolation": isolation,
        "timeout_per_prompt": timeout_per_prompt,
    }
    # Texts as they were typed: RunConfig knows what is allowed, whichever source a value is from.
    given = {name: value for name, value in fields.items() if value not in (None, [], False)}
    if resume is not None:
        others = {
            "--set": settings,
            "--sweep": sweep,
            "--out": out,
            "--config": config,
            "--dry-run": dry_run,
        }
        _refuse([*map(option, given), *(name for name, value in others.items() if value)])
    elif force:
        raise UsageError(
            "--force is for a run that is resumed", "specbench run --resume RUN --force"
        )
    else:
        from specbench_cli.config.load import load

        asked, sources = load(
            given,
            settings or [],
            config,
            methods=registry,
            env=os.environ,
            folder=Path(),
            sweeps=sweep or [],
            vet=_vet,
        )
    if parent is not None:
        apart.begin_apart(parent)
    # From here on torch is needed, which takes a second: what could be refused before was.
    from specbench_cli.commands._progress import make_progress
    from specbench_cli.execute import run as execute
    from specbench_cli.execute.planning.outlook import outlook
    from specbench_cli.store.run_dir import RunDir, remember

    form = "json" if json else form
    with make_progress(json=form == "json", dry_run=dry_run, part=only_pass is not None) as view:
        if dry_run:
            first, facts = execute.dry(asked)
            view.planned({**facts, "detects": outlook(first)})
            return ExitCode.OK
        part = only_pass is not None
        if resume is not None:
            plan, run_dir = execute.reopen(_folder(resume), view, part=part, force=force)
        else:
            plan, run_dir = execute.start(asked, sources, out, view)
        try:
            with told_how_to_go_on(run_dir.path, view, part):
                result = execute.run(
                    plan,
                    run_dir,
                    view,
                    only_pass=only_pass,
                    fresh=resume is None,
                    force=force,
                    in_turn=in_turn,
                )
        except apart.Unfinished as fault:
            if fault.told and plan is not None and plan.config.repeats == 1:
                raise typer.Exit(fault.exit_code) from fault  # who ordered one pass knows of none
            raise
        finally:
            if RunDir.holds_run(run_dir.path):  # else it failed before anything was measured
                remember(run_dir.path)
        if part:
            raise typer.Exit(apart.DONE + result.exit_code)
        with told_how_to_go_on(run_dir.path, view, part=False):
            reading = _written(result.run_dir, view)
    with (
        told_how_to_go_on(run_dir.path, view, part=False),
        suppress(BrokenPipeError),  # a reader who has seen enough of what is finished
    ):
        _show(reading, result.run_dir, form)
    if result.exit_code is ExitCode.ENVIRONMENT and result.void:
        output.error(*NOISE)
    if left_out := reading.facts.left_out:
        output.error(f"not all that was asked for could run here: {'; '.join(left_out)}")
    return result.exit_code


def _vet(plugin: str) -> None:
    """Have a plug-in imported in a process of its own first. Raises UsageError."""
    from specbench_cli.execute.isolation.rooms import vet

    vet(plugin)


@contextmanager
def told_how_to_go_on(path: Path, view: RunView, part: bool) -> Iterator[None]:
    """Say with which command a run goes on that is stopped by a person, a disk or a reader; of a
    part of one, whoever ordered it says so."""
    command = apart.resumption(path)
    try:
        yield
    except KeyboardInterrupt as stopped:
        if part:
            raise typer.Exit(ExitCode.INTERRUPTED) from stopped
        view.note(f"to go on: {command}")
        raise
    except BrokenPipeError as fault:
        output.drop_stdout()
        raise EnvironmentFault("nobody reads stdout any more", command) from fault
    except OSError as fault:
        raise not_written(fault, command) or fault from fault


def _written(folder: Path, view: RunView) -> Reading:
    """Write the files that belong to a finished run."""
    from specbench_cli.report import outputs
    from specbench_cli.store.run_dir import RunDir

    view.stage("writing the report")
    return outputs.write_outputs(RunDir.open(folder))


def _show(reading: Reading, folder: Path, form: output.Format) -> None:
    """Show a run's result."""
    from specbench_cli.report.export import row_dicts
    from specbench_cli.report.load import as_dict, load_rows
    from specbench_cli.report.terminal import table
    from specbench_cli.store.run_dir import RunDir

    if form == "json":
        manifest = RunDir.open(folder).manifest
        output.json_line(
            {
                "event": "done",
                "run": folder,
                "memory": manifest.get("memory"),
                "tuning": manifest.get("tuning"),
                "summary": row_dicts(reading.summary),
                "load": [as_dict(row) for row in load_rows(reading.records)],
            }
        )
    else:
        table.print_runs([reading], families=False, form=form)
        output.note(f"in {folder}")


def spelled_out(args: Sequence[str]) -> list[str]:
    """Arguments with the number that `--tune` stands for where it has none: the parser knows no
    option whose value may be left out."""
    words: list[str] = []
    for at, word in enumerate(args):
        words.append(word)
        if word == "--tune" and all(next_.startswith("-") for next_ in args[at + 1 : at + 2]):
            words.append(CANDIDATES)
    return words


def _refuse(options: list[str]) -> None:
    """A resumed run is the run that was begun: nothing about it can be changed."""
    if options:
        raise UsageError(
            f"--resume takes all settings from the run; drop {', '.join(options)}",
            "specbench run --resume RUN",
        )


def _folder(run: Path) -> Path:
    """A run's folder; `last` is the newest one."""
    from specbench_cli.store.run_dir import latest

    return latest() if str(run) == "last" else run
