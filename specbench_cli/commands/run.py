"""`specbench run`: the main job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbench_cli import output, registry
from specbench_cli.commands.running.matrix import begin, carry_out
from specbench_cli.commands.running.one import NOISE, measured, told_how_to_go_on, written
from specbench_cli.config.profile import PROFILES
from specbench_cli.config.sources import option
from specbench_cli.errors import ExitCode, UsageError
from specbench_cli.execute import apart
from specbench_cli.store.recorded import chance

if TYPE_CHECKING:
    from specbench_cli.execute.run import Result
    from specbench_cli.report.reading import Reading

EXAMPLES = (
    "specbench run",
    "specbench run -m sps,pld --limit 24",
    "specbench run -m sps --set sps.length=7 --temperature 0.8 --verify coupled",
    "specbench run -m vanilla,sps --batch 8 --limit 48",
    "specbench run -m sps -t mini --category translation --max-new-tokens 32 --repeats 3",
    "specbench run --sweep sps.length=1:6:1 --limit 24",
    "specbench run -m sps,pld --targets embedded-7m,embedded-exit --limit 24",
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

USUAL = "vanilla,sps,pld,hf:vanilla,hf:assisted"
"""What is measured where no method is named; see `config.load.DEFAULT_METHODS`."""

CANDIDATES = "8"
"""What `--tune` without a number means."""


def _option(
    panel: str,
    metavar: str | None,
    help_: str,
    default: str | None = None,
    *names: str,
    known: Callable[[], Iterable[str]] | None = None,
) -> Any:
    """An option in a panel of the help.

    Args:
        default: what it is if nothing says anything; values are texts as they were typed, and
            `RunConfig`, which is too heavy for `--help`, knows the real ones. None for none.
        names: the option's own, where they are not the parameter's.
        known: the values that a shell may complete, the last of a list separated by commas.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in (known() if known is not None else ())]

    shown = default if default is not None else False
    return typer.Option(
        *names,
        metavar=metavar,
        help=help_,
        show_default=shown,
        rich_help_panel=panel,
        autocompletion=None if known is None else complete,
    )


def _tasks() -> list[str]:
    from specbench_cli.tasks import task_names

    return task_names()


def _models() -> list[str]:
    from specbench_cli.models import model_names

    return model_names()


PANELS = ("What to run", "Decoding", "Measuring", "Output")
_What, _Decoding, _Measuring, _Output = (partial(_option, panel) for panel in PANELS)


def run(
    method: Annotated[
        list[str] | None,
        _What(
            "NAME",
            "Methods; repeat, or use commas.",
            USUAL,
            "--method",
            "-m",
            known=registry.entries,
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        _What("NAME", "Tasks, .jsonl or .yaml files.", "mini", "--task", "-t", known=_tasks),
    ] = None,
    target: Annotated[
        str | None, _What("MODEL", "Short name, hub id, folder or GGUF.", "embedded", known=_models)
    ] = None,
    draft: Annotated[str | None, _What("MODEL", "The same of the draft.", "the target's")] = None,
    targets: Annotated[
        list[str] | None,
        _What("MODEL", "Several targets: a run of each, one table.", "--target", known=_models),
    ] = None,
    drafts: Annotated[
        list[str] | None,
        _What("MODEL", "Several drafts of each target.", "--draft", known=_models),
    ] = None,
    limit: Annotated[
        str | None, _What("N", "Questions of each task, over its families.", "all, 12 of mini")
    ] = None,
    category: Annotated[list[str] | None, _What("NAME", "Families or categories.", "all")] = None,
    prompt: Annotated[
        list[str] | None, _What("ID", "These questions alone: mini/qa-003.", "all", "--prompt")
    ] = None,
    settings: Annotated[
        list[str] | None, _What("M.P=V", "A method's parameter: sps.length=7.", None, "--set")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        _What(
            "M.P=VS",
            "A row a value: sps.length=1:6:1, or 3,5,7. Several: all combinations.",
        ),
    ] = None,
    tune: Annotated[
        str | None,
        _What(
            "[N]",
            "Choose each method's parameters among N, 8 if not said, on development prompts; the"
            " result is of the others.",
            "off",
        ),
    ] = None,
    tune_by: Annotated[
        Literal["time", "forwards"] | None,
        _What(
            "WHAT",
            "What --tune makes least: time, of decoding a token, or forwards, their cost by the"
            " models' sizes, which no noise reaches.",
            "time",
        ),
    ] = None,
    profile: Annotated[
        str | None, _What("NAME", "Settings by name, see below.", "none", known=lambda: PROFILES)
    ] = None,
    config: Annotated[
        Path | None, _What("FILE", "YAML with settings: specbench init.", "./specbench.yaml")
    ] = None,
    plugin: Annotated[list[str] | None, _What("FILE", "Python file with methods.", "none")] = None,
    temperature: Annotated[str | None, _Decoding("X", "0 is greedy.", "0")] = None,
    top_p: Annotated[str | None, _Decoding("X", "Nucleus; 1 is off.", "1")] = None,
    top_k: Annotated[str | None, _Decoding("N", "Top-k cut; 0 is off.", "0")] = None,
    verify: Annotated[
        Literal["rejection", "coupled", "block", "replay"] | None,
        _Decoding(
            "RULE",
            "Above temperature 0: rejection and block keep the target's law; coupled makes every"
            " lossless method emit vanilla's text. At any temperature: replay gives every method"
            " vanilla's tokens, so that counters and times pair exactly.",
            "rejection",
        ),
    ] = None,
    grammar: Annotated[
        str | None,
        _Decoding(
            "GRAMMAR",
            "Hold every output to a grammar: json, any object, or a file: .json (a schema), .lark,"
            " .gbnf, .regex.",
            "none",
        ),
    ] = None,
    contrast: Annotated[
        str | None,
        _Decoding(
            "SETTINGS",
            "Where the target is unsure, contrast it with itself behind less of the prompt (USCD):"
            " beta=0.5,keep=0.5,below=0.45,floor=0.1, or some of these; for all methods.",
            "none",
        ),
    ] = None,
    acceptance: Annotated[
        str | None,
        _Decoding(
            "CHANCE|RUN",
            "Of shapes (--target shape:llama-2-7b), whose weights are drawn: have a draft's first"
            " choice accepted with this chance, or as often as a run's drafts were. Synthetic.",
            "what drawn weights say",
        ),
    ] = None,
    max_new_tokens: Annotated[
        str | None, _Decoding("N", "Longest output.", "the task's, 64 in the short run")
    ] = None,
    batch: Annotated[
        str | None,
        _Decoding("N", "Prompts in one forward of the target: throughput.", "1"),
    ] = None,
    prefill_chunk: Annotated[
        str | None,
        _Decoding(
            "N",
            "With --batch: most tokens of prompts that a forward reads beside the others' drafts.",
            "256",
        ),
    ] = None,
    load_: Annotated[
        str | None,
        _Decoding(
            "ARRIVALS",
            "Requests arrive by the clock, of which --batch N take part in a step: poisson:RATE (a"
            " second; several: 1,2,4), burst:SIZE:SECONDS, trace:FILE. Latencies and throughput.",
            "all at once",
            "--load",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        _Decoding(
            "SIZE",
            "Lower batch, draft lengths and tree nodes until the run is predicted to hold no more:"
            " 2GB, 500MB.",
            "no bound",
        ),
    ] = None,
    raw: Annotated[bool, _Decoding(None, "Prompts without a template.", "off", "--raw")] = False,
    seed: Annotated[str | None, _Decoding("N", "Of everything drawn.", "0")] = None,
    dtype: Annotated[
        str | None, _Decoding("NAME", "float32, bfloat16 or float16.", "float32")
    ] = None,
    device: Annotated[str | None, _Decoding("NAME", "auto, cpu, cuda or cuda:N.", "auto")] = None,
    graphs: Annotated[
        Literal["auto", "on", "off"] | None,
        _Decoding(
            "WHEN",
            "Replay forwards of up to 64 rows as CUDA graphs: auto (on every GPU), on or off.",
            "auto",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        _Decoding(
            "PLACES",
            "Of methods that draft while the target computes: target=cpu:0-3,draft=cpu:4-7, or"
            " target=cuda:0,draft=cuda:1.",
            "the cores in halves; on a GPU two streams",
        ),
    ] = None,
    repeats: Annotated[str | None, _Measuring("N", "Passes, each a process.", "1")] = None,
    threads: Annotated[str | None, _Measuring("N", "Torch's threads.", "torch's own")] = None,
    allow_noise: Annotated[
        bool,
        _Measuring(None, "Keep times taken while other programs ran.", "off", "--allow-noise"),
    ] = False,
    in_turn: Annotated[
        Path | None,
        _Measuring(
            "FILE",
            "Take turns with the other runs that are given this file, a second each: for two sides"
            " of a comparison that meet the same machine.",
            "alone",
        ),
    ] = None,
    judge: Annotated[
        Literal["sample", "all"] | None,
        _Measuring(
            "WHICH",
            "Of vanilla's own outputs, held against transformers' module: sample, the first of each"
            " family, or all.",
            "sample",
        ),
    ] = None,
    controls: Annotated[
        Literal["auto", "none"] | None,
        _Measuring(
            "WHICH",
            "Rows that a lossy one brings: auto, the draft alone, the lossless method that drafts"
            " alike and random acceptance at its rate, or none.",
            "auto",
        ),
    ] = None,
    run_code: Annotated[
        bool,
        _Measuring(
            None,
            "Score code by running it: tests of humaneval and mbpp, in processes without files,"
            " network and children.",
            "off",
            "--run-code",
        ),
    ] = False,
    uncontained: Annotated[
        bool,
        _Measuring(
            None,
            "With --run-code, where that is refused: under limits alone, as who you are.",
            "off",
            "--uncontained",
        ),
    ] = False,
    isolation: Annotated[
        Literal["process", "none"] | None,
        _Measuring(
            "WHERE",
            "Where plug-ins decode: process, one of their own, which keeps what they do from other"
            " methods, or none, the run's, for a debugger or to load models once.",
            "process",
        ),
    ] = None,
    executor: Annotated[
        Literal["local", "ray"] | None,
        _Measuring(
            "WHO",
            "Who measures: local, this machine, or ray, the devices of a Ray cluster, which are"
            " dealt prompts, each with all methods (docs/workers.md).",
            "local",
        ),
    ] = None,
    timeout_per_prompt: Annotated[
        str | None,
        _Measuring("S", "Seconds after which a method has failed on a prompt.", "600"),
    ] = None,
    stop_after: Annotated[
        str | None,
        _Measuring("S", "Seconds of a pass after which no further prompt is begun.", "none"),
    ] = None,
    probe: Annotated[
        str | None,
        _Measuring(
            "N",
            "Rounds of the cost probe between the prompts: specbench predict goes by them.",
            "none",
        ),
    ] = None,
    out: Annotated[
        Path | None, _Output("DIR", "The run's folder.", "results/runs/NAME", "--out", "-o")
    ] = None,
    form: Annotated[
        Literal["table", "tsv", "json"],
        _Output("FORM", "table, tsv or json: what happens, an object a line.", "table", "--format"),
    ] = "table",
    json: Annotated[bool, _Output(None, "Short for --format json.", "off", "--json")] = False,
    dry_run: Annotated[bool, _Output(None, "Print the plan and stop.", "off", "--dry-run")] = False,
    resume: Annotated[
        Path | None,
        _Output("RUN", "Do what an interrupted run lacks: its folder, or `last`."),
    ] = None,
    force: Annotated[
        bool,
        _Output(
            None,
            "With --resume: go on though the program, the machine or the data changed since, and"
            " label the run.",
            "off",
            "--force",
        ),
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
        "targets": targets,
        "drafts": drafts,
        "limit": limit,
        "category": category,
        "prompts": prompt,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "verify": verify,
        "grammar": grammar,
        "contrast": contrast,
        "acceptance": acceptance and chance(acceptance),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "batch": batch,
        "prefill_chunk": prefill_chunk,
        "load": load_,
        "memory_budget": memory_budget,
        "tune": tune,
        "tune_by": tune_by,
        "threads": threads,
        "device": device,
        "devices": devices,
        "dtype": dtype,
        "graphs": graphs,
        "raw": raw,
        "allow_noise": allow_noise,
        "run_code": run_code,
        "uncontained": uncontained,
        "judge": judge,
        "controls": controls,
        "plugins": plugin,
        "isolation": isolation,
        "executor": executor,
        "timeout_per_prompt": timeout_per_prompt,
        "stop_after": stop_after,
        "probe": probe,
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
    from specbench_cli.execute.planning.matrix import is_matrix, pairs
    from specbench_cli.execute.planning.outlook import outlook
    from specbench_cli.store import matrix
    from specbench_cli.store.run_dir import folder

    form = "json" if json else form
    part = only_pass is not None
    with make_progress(
        json=form == "json", dry_run=dry_run, part=part, start_s=time.process_time()
    ) as view:
        if dry_run:
            for each in pairs(asked).values() if is_matrix(asked) else [asked]:
                first, facts = execute.dry(each)
                view.planned({**facts, "detects": outlook(first)})
            return ExitCode.OK
        begun = None if resume is None else folder(str(resume))
        if is_matrix(asked) if begun is None else matrix.is_matrix(begun):
            place = begun or begin(asked, sources, out)
            with told_how_to_go_on(place, view, part=False):
                results, reading = carry_out(place, view, force, in_turn)
        else:
            if begun is not None:
                plan, run_dir = execute.reopen(begun, view, part=part, force=force)
            else:
                plan, run_dir = execute.start(asked, sources, out, view)
            place, fresh = run_dir.path, begun is None
            with told_how_to_go_on(place, view, part):
                made = measured(
                    plan, run_dir, view, place, force, in_turn, only_pass=only_pass, fresh=fresh
                )
            if part:
                raise typer.Exit(apart.DONE + made.exit_code)
            results = [made]
            with told_how_to_go_on(place, view, part=False):
                reading = written(place, view)
    with (
        told_how_to_go_on(place, view, part=False),
        suppress(BrokenPipeError),  # a reader who has seen enough of what is finished
    ):
        _show(reading, place, form)
    return _told(results, reading)


def _told(results: Sequence[Result], reading: Reading) -> ExitCode:
    """Say what of the runs is missing; the worst of their exit codes."""
    if any(each.exit_code is ExitCode.ENVIRONMENT and each.void for each in results):
        output.error(*NOISE)
    if left_out := reading.run.manifest.get("left_out"):
        output.error(
            f"not all that was asked for could run here: {', '.join(left_out)} left out",
            "why is said above, and in report.md",
        )
    order = (ExitCode.OK, ExitCode.ENVIRONMENT, ExitCode.BAD_ANSWER)
    return max((each.exit_code for each in results), key=order.index)


def _vet(plugin: str) -> None:
    """Have a plug-in imported in a process of its own first. Raises UsageError."""
    from specbench_cli.execute.isolation.rooms import vet

    vet(plugin)


def _show(reading: Reading, folder: Path, form: output.Format) -> None:
    """Show a run's result."""
    from specbench_cli.report.export import row_dicts
    from specbench_cli.report.load import as_dict, load_rows, saturation
    from specbench_cli.report.terminal import table

    if form == "json":
        manifest = reading.run.manifest
        one = {key: manifest.get(key) for key in ("memory", "tuning")}
        several = {"runs": [source.path for source in reading.sources]}
        loads = load_rows(reading.records)
        output.json_line(
            {
                "event": "done",
                "run": folder,
                **(several if reading.facts.targets else one),
                "summary": row_dicts(reading.summary),
                "load": [as_dict(row) for row in loads],
                "saturation": saturation(loads),
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
