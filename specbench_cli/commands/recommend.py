"""`specbench recommend`: choose a method and its settings for a model, a machine and a load."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specbench_cli import output, registry
from specbench_cli.commands._trust import permission_check
from specbench_cli.config import options, permission
from specbench_cli.config.options import option_name
from specbench_cli.config.sources import PARAM_FIELDS
from specbench_cli.errors import ExitCode, SpecbenchError, UsageError

if TYPE_CHECKING:
    from specbench_cli.config.recommend import RecommendInvocation
    from specbench_cli.config.run import RunConfig
    from specbench_cli.measure.view import RunView
    from specbench_cli.predict.recommend.journal import Journal

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
        "traffic.jsonl has one OpenAI chat completion request per line, or is an input file of"
        " OpenAI's Batch API (docs/how-to/tasks.md).",
    )
)
_SETTINGS = options.OptionSubset(
    "specbench_cli.config.run:RunConfig",
    {
        "methods": {
            "help": "Methods to choose from. Lossy methods must be named.",
            "default": "all lossless methods that can run here",
        },
        "tasks": {"help": "Task names, or files with your own prompts."},
        "target": {},
        "draft": {},
        "limit": {"default": "all"},
        "category": {},
        "set": {
            "help": "Set a method parameter, e.g. sps.length=7. The search does not change it."
        },
        "plugins": {"help": "Load methods from a Python file. Name them with -m."},
        "temperature": {},
        "top_p": {},
        "top_k": {},
        "verify": {
            "help": "Verification rule above temperature 0, as in specbench run.",
            "choices": ("rejection", "coupled", "block"),
        },
        "max_new_tokens": {"default": "the prompt's or task's"},
        "batch": {},
        "raw": {},
        "seed": {"help": "Random seed, also for the order of candidates."},
        "dtype": {},
        "device": {},
        "threads": {},
        "allow_noise": {},
        "isolation": {},
    },
)


@options.command(_SETTINGS, "specbench_cli.config.recommend:RecommendInvocation")
def recommend(given: dict[str, Any], call: dict[str, Any]) -> ExitCode:
    """Recommend a method and its settings, within a time budget.

    Tries all methods that can run here on a few prompts, then the better half on twice as many,
    and so on (successive halving). Confirms the best one on prompts that the search did not use.
    If no method is faster than vanilla, the result says so. Also predicts times for larger batches
    and other machines, and prints settings for other engines.
    """
    from specbench_cli.config.recommend import RecommendInvocation

    invocation = options.validate(RecommendInvocation, call, "specbench recommend --help")
    for file in filter(None, (invocation.costs, *invocation.against)):
        if not file.is_file():
            raise UsageError(
                f"the file of costs {file} does not exist", "specbench predict --probe --out FILE"
            )
    settings = None
    if invocation.resume is not None:
        wrong = [
            *map(option_name, given),
            *(option_name(key) for key in ("out", "config") if call.get(key)),
        ]
        if wrong:
            raise UsageError(
                f"--resume uses the settings of the recommendation; omit {', '.join(wrong)}",
                "specbench recommend --resume DIR",
            )
    elif invocation.force:
        raise UsageError(
            "--force needs --resume",
            "specbench recommend --resume DIR --force",
        )
    else:
        settings = _parse_settings(given, invocation)
    return _run_recommendation(settings, invocation)


def _run_recommendation(
    settings: tuple[RunConfig, dict[str, str]] | None, invocation: RecommendInvocation
) -> ExitCode:
    """Search for the best method and print the recommendation.

    If `settings` is None, resume an interrupted search.
    """
    # Validate first: importing torch takes a second.
    from specbench_cli.commands._progress import make_progress
    from specbench_cli.commands._running import NOISE_ERROR, show_resume_command
    from specbench_cli.predict.recommend import journal as kept
    from specbench_cli.predict.recommend.search import create_journal
    from specbench_cli.store.run_dir import new_path

    if invocation.resume is not None and kept.read_result(invocation.resume) is None:
        file = invocation.resume / kept.FILE
        requests = permission.collect_requests(kept.Journal.read(invocation.resume).config, file)
        permission_check(invocation.trust)(requests, str(file))
    with make_progress(json=invocation.as_json, start_s=0.0) as view:
        if settings is None:
            place = Path(str(invocation.resume))
            if (result := kept.read_result(place)) is not None:
                _show(result, place, json=invocation.as_json)
                return ExitCode.OK
            journal = kept.Journal.read(place)
        else:
            config, sources = settings
            view.stage("checking which methods can run here")
            journal = create_journal(config, sources, invocation.minutes)
            name = "-".join(["recommend", *(Path(task).stem for task in config.tasks)])
            place = invocation.out or new_path(name, journal.model_dump(mode="json"))
            kept.create(place, journal)
        command = f"specbench recommend --resume {shlex.quote(str(place))}"
        with show_resume_command(place, view, is_repeat=False, command=command):
            code, result = _search(journal, place, view, invocation)
    _show(result, place, json=invocation.as_json)
    if code is ExitCode.ENVIRONMENT:
        output.error(*NOISE_ERROR)
    return code


def _search(
    journal: Journal, place: Path, view: RunView, invocation: RecommendInvocation
) -> tuple[ExitCode, dict[str, Any]]:
    """Search for the best method, confirm its speedup, and store the recommendation in the
    folder.
    """
    from specbench_cli.measure import repeat_process
    from specbench_cli.predict.recommend import journal as kept
    from specbench_cli.predict.recommend.advice import advise
    from specbench_cli.predict.recommend.search import recommend as search
    from specbench_cli.report import outputs
    from specbench_cli.store.run_dir import RunDir, register_run

    start = time.monotonic()
    try:
        outcome = search(journal, place, view, invocation.force)
    except repeat_process.UnfinishedRepeat as fault:
        if fault.already_reported:
            raise typer.Exit(fault.exit_code) from fault
        raise
    except SpecbenchError:
        kept.discard(place)
        raise
    reading = None
    if outcome.run is not None:
        register_run(outcome.run)
        view.stage("writing the confirmation's report")
        reading = outputs.write_outputs(RunDir.open(outcome.run))
    result = advise(
        journal,
        outcome,
        reading.summary if reading is not None else None,
        sizes=invocation.batches,
        costs=invocation.costs,
        others=invocation.against,
    )
    result["header"] = _header(journal, reading)
    result["wall_s"] = round(time.monotonic() - start, 1)
    kept.finish(place, result)
    return outcome.exit_code, result


def _header(journal: Journal, reading: Any) -> list[str]:
    """Return the heading lines of a recommendation: its models, tasks and settings."""
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


def _parse_settings(
    given: Mapping[str, Any], invocation: RecommendInvocation
) -> tuple[RunConfig, dict[str, str]]:
    """Return the settings that all runs of the search share, and where each setting comes from.

    Raises:
        UsageError: A setting is invalid or not supported by `specbench recommend`.
    """
    from specbench_cli.commands._running import read_settings
    from specbench_cli.config.sources import from_command_line

    flags = {name: value for name, value in given.items() if name not in PARAM_FIELDS}
    config, sources = read_settings(
        from_command_line({"methods": registry.lossless_methods()} | flags, given.get("set", [])),
        invocation.config,
        permission_check(invocation.trust),
    )
    foreign = {
        "--targets or --drafts": config.targets or config.drafts,
        "--load": config.load,
        "--tune": config.tune,
        "--sweep": config.sweep,
        "--verify replay": config.verify == "replay",
        f"--executor {config.executor}": config.executor != "local",
    }
    if wrong := [name for name, value in foreign.items() if value]:
        raise UsageError(
            f"specbench recommend does not support {', '.join(wrong)}",
            "remove it from the config file or the environment",
        )
    return config, sources
