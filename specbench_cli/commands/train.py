"""`specbench train`: the recipes that made the models we ship."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specbench_cli import output
from specbench_cli.commands.quality import quality
from specbench_cli.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    import torch

    from specbench_cli.training.family import Recipe
    from specbench_cli.training.loop import Point, Result
    from specbench_cli.training.trainer import Report, Trainer

CURVE_POINTS = 100
CURVES = "training_curve"

app = typer.Typer(help="Train the embedded models.", no_args_is_help=True)


class Device(StrEnum):
    """Where to train."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Out = Annotated[Path, typer.Option(help="Folder for the models and the work in progress.")]
Seed = Annotated[int, typer.Option(help="Seed of weights and data.", min=0)]
Resume = Annotated[
    bool,
    typer.Option("--resume/--fresh", help="Continue what OUT holds, or start this model over."),
]
Scale = Annotated[
    float, typer.Option(help="Factor on the steps of the recipe; 1 made the shipped models.")
]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="A few steps on generated text: does it run at all?")
]
Where = Annotated[Device, typer.Option(help="Where to train.")]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with gsm8k_train.jsonl; else it is downloaded.",
        envvar="SPECBENCH_DATA",
        show_default=False,
    ),
]
Target = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the finished target; else OUT/embedded-7m, else the shipped one.",
        show_default=False,
    ),
]


@app.callback()
def _group() -> None:
    """Train the embedded models."""


@app.command(
    epilog="Examples: [bold]specbench train pair --out pair[/bold] (the shipped pair: 82 "
    "minutes on 2 cores that had other work too) - [bold]specbench train pair --out try "
    "--smoke[/bold] (seconds, no download)"
)
def pair(
    out: Out,
    seed: Seed = 0,
    resume: Resume = True,
    steps_scale: Scale = 1.0,
    smoke: Smoke = False,
    device: Where = Device.AUTO,
    data: Data = None,
) -> None:
    """Train the embedded target (7.5M parameters) and its draft (0.9M).

    OUT gets embedded-7m/, embedded-1m/, training_curve.json and .png; checkpoints and the full
    loss curves lie in OUT/training. A run that was stopped continues with the same command.
    """
    from specbench_cli.training.family import BASE, DRAFT, TARGET

    recipes = _recipes((BASE, TARGET, DRAFT), steps_scale, smoke, out, resume)
    with _bars() as report:
        trainer = _trainer(out, data, seed, device, smoke, report)
        _finish(trainer.pair(*recipes), out)


@app.command(
    "exit",
    epilog="Example: [bold]specbench train exit --out pair[/bold] (after `train pair --out pair`; "
    "ten minutes of one core)",
)
def early_exit(
    out: Out,
    target: Target = None,
    seed: Seed = 0,
    resume: Resume = True,
    steps_scale: Scale = 1.0,
    smoke: Smoke = False,
    device: Where = Device.AUTO,
    data: Data = None,
) -> None:
    """Fine-tune the target so that its earlier layers can speak too (embedded-exit)."""
    from specbench_cli.training.family import EXIT

    (recipe,) = _recipes((EXIT,), steps_scale, smoke, out, resume)
    with _bars() as report:
        trainer = _trainer(out, data, seed, device, smoke, report)
        _finish(trainer.exit(recipe, _target(target, out)), out)


@app.command(
    epilog="Example: [bold]specbench train foreign --out pair[/bold] (after `train pair --out "
    "pair`; its replies are kept for this)"
)
def foreign(
    out: Out,
    target: Target = None,
    seed: Seed = 0,
    resume: Resume = True,
    steps_scale: Scale = 1.0,
    smoke: Smoke = False,
    device: Where = Device.AUTO,
    data: Data = None,
) -> None:
    """Train a small draft with a tokenizer and vocabulary of its own (embedded-xv)."""
    from specbench_cli.training.family import FOREIGN

    (recipe,) = _recipes((FOREIGN,), steps_scale, smoke, out, resume)
    with _bars() as report:
        trainer = _trainer(out, data, seed, device, smoke, report)
        _finish(trainer.foreign(recipe, _target(target, out)), out)


app.command(
    epilog="Example: [bold]specbench train quality --out results/quality[/bold] (all of mini; "
    "twenty minutes of one core) - shown by [bold]specbench list models embedded[/bold]"
)(quality)


def _recipes(
    recipes: "tuple[Recipe, ...]", scale: float, smoke: bool, out: Path, resume: bool
) -> "list[Recipe]":
    """The recipes to follow; their earlier work is deleted where it is not to be resumed."""
    from specbench_cli.training.trainer import WORK

    if not scale > 0:
        raise UsageError(f"--steps-scale is {scale}, it must be above 0")
    if not resume:
        for recipe in recipes:
            shutil.rmtree(out / WORK / recipe.name, ignore_errors=True)
    return [recipe.smoke() if smoke else recipe.scaled(scale) for recipe in recipes]


def _trainer(
    out: Path, data: Path | None, seed: int, device: Device, smoke: bool, report: "Report"
) -> "Trainer":
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.trainer import Trainer

    place = _device(device)
    if smoke:
        return Trainer(out, [], seed, place, n_replies=64, fast=False, report=report)
    return Trainer(out, load_gsm8k(data), seed, place, report=report)


def _target(given: Path | None, out: Path) -> Path:
    """The folder of the finished target."""
    from specbench_cli.models import resolve
    from specbench_cli.training.family import TARGET

    here = given or out / TARGET.name
    if (here / "config.json").is_file():
        return here
    if given is not None:
        raise UsageError(f"--target {given} holds no model", "specbench train pair --out DIR")
    return resolve(TARGET.name).path


def _device(wanted: Device) -> "torch.device":
    import torch

    found = torch.cuda.is_available()
    if wanted is Device.CUDA and not found:
        raise EnvironmentFault("no CUDA device is here", "use --device cpu")
    return torch.device("cuda" if found and wanted is not Device.CPU else "cpu")


@contextmanager
def _bars() -> "Iterator[Report]":
    """A progress bar a model, fed by the function yielded."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.console(stderr=True)) as bars:
        tasks = {}

        def report(name: str, point: "Point") -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=point.steps, loss=point.loss)
            bars.update(tasks[name], completed=point.step, loss=point.loss)

        yield report


def _finish(results: "Mapping[str, Result]", out: Path) -> None:
    """Add the curves to those in `training_curve.json`, draw them all, print the folders."""
    path = out / f"{CURVES}.json"
    facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name, result in results.items():
        curve = _thin(result.curve)
        last = result.curve[-1]
        facts[name] = {
            "steps": last.steps,
            "tokens": last.tokens,
            "seconds": round(result.seconds),
            "final_loss": curve[-1]["loss"],
            "curve": curve,
        }
        output.data(str(out / name))
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    _draw(facts, out / f"{CURVES}.png")


def _draw(facts: "Mapping[str, dict[str, list[dict[str, float]]]]", path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot(
        xlabel="tokens read (millions)", ylabel="training loss (nats a token)", yscale="log"
    )
    for name, fact in facts.items():
        curve = fact["curve"]
        axes.plot([p["tokens"] / 1e6 for p in curve], [p["loss"] for p in curve], label=name)
    axes.legend()
    figure.savefig(path, dpi=100)


def _thin(curve: "list[Point]") -> list[dict[str, float]]:
    """About `CURVE_POINTS` means of neighbouring points; the last mean ends at the last step."""
    width = max(1, len(curve) // CURVE_POINTS)
    ends = range(len(curve), 0, -width)
    parts = [curve[max(0, end - width) : end] for end in reversed(ends)]
    return [
        {
            "step": part[-1].step,
            "tokens": part[-1].tokens,
            "loss": round(sum(p.loss for p in part) / len(part), 4),
        }
        for part in parts
    ]
