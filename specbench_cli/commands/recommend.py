"""`specbench recommend`: which method with which settings, for this model, machine and traffic."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbench_cli import output, registry
from specbench_cli.commands import OUTPUT
from specbench_cli.config.sources import option
from specbench_cli.errors import ExitCode, SpecbenchError, UsageError

if TYPE_CHECKING:
    from specbench_cli.config.run import RunConfig
    from specbench_cli.execute.recommending.journal import Journal
    from specbench_cli.execute.view import RunView

EXAMPLES = (
    "specbench recommend",
    "specbench recommend --minutes 30 --task traffic.jsonl --max-new-tokens 256",
    "specbench recommend --target smollm2-135m --task gsm8k --seed 1 --out picked",
    "specbench recommend -m sps,pld,suffix --draft embedded-1m --minutes 3",
    "specbench recommend --costs here.json --against h100.json --batches 4,16",
    "specbench recommend --resume picked",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "traffic.jsonl: a request of OpenAI's chat completions a line, or a batch file"
        " (docs/tasks.md).",
    )
)
WHAT, DECODING, MEASURING, MODELLED = "What to choose", "Decoding", "Measuring", "Elsewhere"
SIZES = "2,4,8"
_What, _Decoding, _Measuring, _Modelled, _Output = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in (WHAT, DECODING, MEASURING, MODELLED, OUTPUT)
)


def recommend(
    minutes: Annotated[
        str,
        _What(metavar="M", help="Time for all of it: the search, and what confirms it."),
    ] = "10",
    method: Annotated[
        list[str] | None,
        _What(
            "--method",
            "-m",
            metavar="NAME",
            help="Choose among these; a lossy one must be named.",
            show_default="all lossless ones that can run here",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        _What("--task", "-t", metavar="NAME", help="Tasks, or your traffic.", show_default="mini"),
    ] = None,
    target: Annotated[
        str | None, _What(metavar="MODEL", help="As in run.", show_default="embedded")
    ] = None,
    draft: Annotated[
        str | None, _What(metavar="MODEL", help="As in run.", show_default="the target's")
    ] = None,
    limit: Annotated[str | None, _What(metavar="N", help="As in run.", show_default="all")] = None,
    category: Annotated[
        list[str] | None, _What(metavar="NAME", help="As in run.", show_default="all")
    ] = None,
    set_: Annotated[
        list[str] | None,
        _What("--set", metavar="M.P=V", help="As in run; what is set is not searched."),
    ] = None,
    config: Annotated[
        Path | None, _What(metavar="FILE", help="As in run.", show_default="./specbench.yaml")
    ] = None,
    plugin: Annotated[
        list[str] | None,
        _What(metavar="FILE", help="Python file with methods, to be named with -m."),
    ] = None,
    temperature: Annotated[
        str | None, _Decoding(metavar="X", help="As in run.", show_default="0")
    ] = None,
    top_p: Annotated[
        str | None, _Decoding(metavar="X", help="As in run.", show_default="1")
    ] = None,
    top_k: Annotated[
        str | None, _Decoding(metavar="N", help="As in run.", show_default="0")
    ] = None,
    verify: Annotated[
        Literal["rejection", "coupled", "block"] | None,
        _Decoding(metavar="RULE", help="As in run.", show_default="rejection"),
    ] = None,
    max_new_tokens: Annotated[
        str | None,
        _Decoding(metavar="N", help="Longest output.", show_default="the request's or task's"),
    ] = None,
    batch: Annotated[
        str | None, _Decoding(metavar="N", help="As in run: measured.", show_default="1")
    ] = None,
    seed: Annotated[
        str | None,
        _Measuring(metavar="N", help="Of prompts and of the candidates' order.", show_default="0"),
    ] = None,
    threads: Annotated[
        str | None, _Measuring(metavar="N", help="As in run.", show_default="torch's own")
    ] = None,
    device: Annotated[
        str | None, _Measuring(metavar="NAME", help="As in run.", show_default="auto")
    ] = None,
    dtype: Annotated[
        str | None, _Measuring(metavar="NAME", help="As in run.", show_default="float32")
    ] = None,
    raw: Annotated[bool, _Measuring("--raw", help="As in run.")] = False,
    allow_noise: Annotated[
        bool, _Measuring("--allow-noise", help="Keep times taken while other programs ran.")
    ] = False,
    isolation: Annotated[
        Literal["process", "none"] | None,
        _Measuring(metavar="WHERE", help="As in run.", show_default="process"),
    ] = None,
    batches: Annotated[
        str,
        _Modelled(metavar="N,N", help="Batch sizes that it is modelled at; none: 0."),
    ] = SIZES,
    costs: Annotated[
        Path | None,
        _Modelled(
            metavar="FILE",
            help="This machine's costs: specbench predict --probe --batch 8.",
            show_default="those kept of it",
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        _Modelled(metavar="FILE", help="Another machine's: what it would be worth there."),
    ] = None,
    out: Annotated[
        Path | None,
        _Output("--out", "-o", metavar="DIR", help="Its folder.", show_default="results/runs/NAME"),
    ] = None,
    json: Annotated[bool, _Output("--json", help="What happens, an object a line.")] = False,
    resume: Annotated[
        Path | None,
        _Output(metavar="DIR", help="Do what an interrupted recommendation lacks."),
    ] = None,
    force: Annotated[bool, _Output("--force", help="With --resume: as in run.")] = False,
) -> ExitCode:
    """Find the method and settings to use, within a time.

    All that can run here is tried on few prompts, the better half on twice as many, and so on; the
    best is confirmed on prompts that the search never saw. Where none pays it says so. Then: what
    it would be in batches and elsewhere, modelled, and what to paste for other engines.
    """
    fields: dict[str, Any] = {
        "methods": method,
        "tasks": task,
        "target": target,
        "draft": draft,
        "limit": limit,
        "category": category,
        "plugins": plugin,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "verify": verify,
        "max_new_tokens": max_new_tokens,
        "batch": batch,
        "seed": seed,
        "threads": threads,
        "device": device,
        "dtype": dtype,
        "raw": raw,
        "allow_noise": allow_noise,
        "isolation": isolation,
    }
    given = {name: value for name, value in fields.items() if value not in (None, [], False)}
    sizes, time_ = _sizes(batches), _minutes(minutes)
    for file in filter(None, (costs, *(against or ()))):
        if not file.is_file():
            raise UsageError(
                f"no such file of costs: {file}", "specbench predict --probe --out FILE"
            )
    sources: dict[str, str] = {}
    asked: RunConfig | None
    if resume is not None:
        others = {"--set": set_, "--out": out, "--config": config}
        wrong = [*map(option, given), *(name for name, value in others.items() if value)]
        if wrong:
            raise UsageError(
                f"--resume takes all settings from the recommendation; drop {', '.join(wrong)}",
                "specbench recommend --resume DIR",
            )
        asked = None
    elif force:
        raise UsageError(
            "--force is for a recommendation that is resumed",
            "specbench recommend --resume DIR --force",
        )
    else:
        asked, sources = _asked(given, set_ or [], config)
    # From here on torch is needed, which takes a second: what could be refused before was.
    from specbench_cli.commands._progress import make_progress
    from specbench_cli.commands.running.one import NOISE, told_how_to_go_on
    from specbench_cli.execute.recommending import journal as kept
    from specbench_cli.execute.recommending.search import prepare
    from specbench_cli.store.run_dir import new_path

    with make_progress(json=json, start_s=0.0) as view:
        if asked is None:
            assert resume is not None
            place = resume
            if (told := kept.finished(place)) is not None:
                _show(told, place, json=json)
                return ExitCode.OK
            journal = kept.Journal.read(place)
        else:
            view.stage("looking what can run here")
            journal = prepare(asked, sources, time_)
            name = "-".join(["recommend", *(Path(task).stem for task in asked.tasks)])
            place = out or new_path(name, journal.model_dump(mode="json"))
            kept.create(place, journal)
        command = f"specbench recommend --resume {shlex.quote(str(place))}"
        with told_how_to_go_on(place, view, part=False, command=command):
            code, result = _measured(journal, place, view, force, sizes, costs, against or [])
    _show(result, place, json=json)
    if code is ExitCode.ENVIRONMENT:
        output.error(*NOISE)
    return code


def _measured(
    journal: Journal,
    place: Path,
    view: RunView,
    force: bool,
    sizes: list[int],
    costs: Path | None,
    others: list[Path],
) -> tuple[ExitCode, dict[str, Any]]:
    """Search, confirm, advise; the result is in the folder then."""
    from specbench_cli.execute import apart
    from specbench_cli.execute.recommending import journal as kept
    from specbench_cli.execute.recommending.advice import advise
    from specbench_cli.execute.recommending.search import recommend as search
    from specbench_cli.report import outputs
    from specbench_cli.store.run_dir import RunDir, remember

    begun = time.monotonic()
    try:
        outcome = search(journal, place, view, force)
    except apart.Unfinished as fault:
        if fault.told:
            raise typer.Exit(fault.exit_code) from fault
        raise
    except SpecbenchError:
        kept.discard(place)
        raise
    reading = None
    if outcome.run is not None:
        remember(outcome.run)
        view.stage("writing the confirmation's report")
        reading = outputs.write_outputs(RunDir.open(outcome.run))
    result = advise(journal, outcome, reading, sizes=sizes, costs=costs, others=others)
    result["header"] = _header(journal, reading)
    result["wall_s"] = round(time.monotonic() - begun, 1)
    kept.finish(place, result)
    return outcome.exit_code, result


def _header(journal: Journal, reading: Any) -> list[str]:
    """What was measured, in lines."""
    if reading is None:
        return [f"specbench  target {journal.config.target}  {', '.join(journal.config.tasks)}"]
    lines: list[str] = reading.facts.header(reading.summary.prompts, width=100)
    return lines


def _show(result: Mapping[str, Any], place: Path, *, json: bool) -> None:
    from specbench_cli.report.terminal.recommendation import print_recommendation

    if json:
        output.json_line({"event": "done", "recommendation": place, **result})
    else:
        print_recommendation(result)
        output.note(f"in {place}")


def _minutes(text: str) -> float:
    """The time that was typed. Raises UsageError."""
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(
            f"--minutes must be a number of minutes, got {text!r}", "--minutes 10"
        ) from error


def _sizes(text: str) -> list[int]:
    """The batch sizes that were typed. Raises UsageError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise UsageError(
            f"--batches must be whole numbers separated by commas, got {text!r}",
            "--batches 2,4,8, or --batches 0 for none",
        )
    return [int(word) for word in words if int(word) > 1]


def _asked(
    given: Mapping[str, Any], sets: list[str], file: Path | None
) -> tuple[RunConfig, dict[str, str]]:
    """The configuration of all rounds, by a run's own rules of precedence. Raises UsageError."""
    from specbench_cli.config.load import load
    from specbench_cli.execute.isolation.rooms import vet

    asked, sources = load(
        {"methods": registry.lossless(), **given},
        sets,
        file,
        methods=registry,
        env=os.environ,
        folder=Path(),
        vet=vet,
    )
    foreign = {
        "--targets or --drafts": asked.targets or asked.drafts,
        "--load": asked.load,
        "--tune": asked.tune,
        "--sweep": asked.sweep,
        "--verify replay": asked.verify == "replay",
        f"--executor {asked.executor}": asked.executor != "local",
    }
    if wrong := [name for name, value in foreign.items() if value]:
        raise UsageError(
            f"{', '.join(wrong)} cannot go with recommend, which searches by itself on this"
            " machine",
            "take it out of the config file or the environment",
        )
    return asked, sources
