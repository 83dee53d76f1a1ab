"""`specbench train`: the recipes that made the models we ship."""

import json
import shutil
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specbench_cli import output
from specbench_cli.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    import torch

    from specbench_cli.training.loop import Point, Result

CURVE_POINTS = 100

app = typer.Typer(help="Train the embedded models.", no_args_is_help=True)


class Device(StrEnum):
    """Where to train."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.callback()
def _group() -> None:
    """Train the embedded models."""


@app.command(
    epilog="Examples: [bold]specbench train pair --out pair[/bold] (the shipped pair, half an hour "
    "on 2 cores) - [bold]specbench train pair --out try --smoke[/bold] (seconds, no download)"
)
def pair(
    out: Annotated[Path, typer.Option(help="Folder for the two models and the work in progress.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data.", min=0)] = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Continue what OUT holds, or start over.")
    ] = True,
    steps_scale: Annotated[
        float, typer.Option(help="Factor on the steps of the recipe; 1 made the shipped pair.")
    ] = 1.0,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A few steps on generated text: does it run at all?")
    ] = False,
    device: Annotated[Device, typer.Option(help="Where to train.")] = Device.AUTO,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with gsm8k_train.jsonl; else it is downloaded.",
            envvar="SPECBENCH_DATA",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train the embedded target (7.5M parameters) and its draft (0.9M).

    OUT gets embedded-7m/, embedded-1m/, training_curve.json and .png; checkpoints and the full
    loss curves lie in OUT/training. A run that was stopped continues with the same command.
    """
    if steps_scale <= 0:
        raise UsageError(f"--steps-scale is {steps_scale}, it must be above 0")
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.pair import DRAFT, TARGET, WORK, train_pair

    place = _device(device)
    gsm8k = [] if smoke else load_gsm8k(data)
    recipes = [r.smoke() if smoke else r.scaled(steps_scale) for r in (TARGET, DRAFT)]
    if not resume:
        shutil.rmtree(out / WORK, ignore_errors=True)
    with _bars() as bars:
        tasks = {}

        def report(name: str, point: "Point") -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=point.steps, loss=point.loss)
            bars.update(tasks[name], completed=point.step, loss=point.loss)

        results = train_pair(
            out,
            recipes,
            gsm8k,
            seed=seed,
            device=place,
            compiled=not smoke,
            report=report,
        )
    _write_curves(results, out)
    for name in results:
        output.data(str(out / name))


def _device(wanted: Device) -> "torch.device":
    import torch

    found = torch.cuda.is_available()
    if wanted is Device.CUDA and not found:
        raise EnvironmentFault("no CUDA device is here", "use --device cpu")
    return torch.device("cuda" if found and wanted is not Device.CPU else "cpu")


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=output.console(stderr=True),
    )


def _write_curves(results: "dict[str, Result]", out: Path) -> None:
    """`training_curve.json` and `.png`: losses averaged over a hundredth of the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot(
        xlabel="tokens read (millions)", ylabel="training loss (nats a token)", yscale="log"
    )
    facts = {}
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
        axes.plot([p["tokens"] / 1e6 for p in curve], [p["loss"] for p in curve], label=name)
    axes.legend()
    figure.savefig(out / "training_curve.png", dpi=100)
    text = json.dumps(facts, indent=1)
    (out / "training_curve.json").write_text(text + "\n", encoding="utf-8")


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
