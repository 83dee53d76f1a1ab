"""Code shared by the commands of `specbench train`: recipes, progress bars and curves."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from specbench_cli import files, output
from specbench_cli.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    import torch

    from specbench_cli.models.resolve import Checkpoint
    from specbench_cli.training.family import Schedule
    from specbench_cli.training.heads.mat import Estimate
    from specbench_cli.training.loop import Point, Result

    Plan = TypeVar("Plan", bound=Schedule)

CURVE_POINTS = 100
CURVES = "training_curve"


def recipes(
    recipes: "tuple[Plan, ...]",
    scale: float,
    smoke: bool,
    out: Path,
    resume: bool,
    tokens: int | None = None,
    sequences: int | None = None,
    lr: float | None = None,
) -> "list[Plan]":
    """The recipes to follow; their earlier work is deleted where it is not to be resumed.

    Args:
        tokens: that each is to read, in place of `scale`.
        sequences: that an update reads, in place of the recipe's; the tokens stay as many.
        lr: the peak learning rate, in place of the recipe's.
    """
    from dataclasses import replace

    if not scale > 0:
        raise UsageError(f"--steps-scale is {scale}, it must be above 0")
    files.check_own(out / f"{CURVES}.json", _is_curves)
    for recipe in recipes:
        check_model(out, recipe.name)
        if not resume:
            forget_work(out, recipe.name)
    if sequences is not None:
        recipes = tuple(recipe.wider(sequences) for recipe in recipes)
    if lr is not None:
        recipes = tuple(replace(recipe, peak_lr=lr) for recipe in recipes)
    scales = [tokens / recipe.tokens if tokens else scale for recipe in recipes]
    pairs = zip(recipes, scales, strict=True)
    return [recipe.smoke() if smoke else recipe.scaled(factor) for recipe, factor in pairs]


def check_model(out: Path, name: str) -> None:
    """Raise UsageError if training would replace a model that specbench did not train.

    Args:
        out: the folder of `--out`.
        name: name of the model's folder inside `out`.
    """
    from specbench_cli.training.loop import has_work
    from specbench_cli.training.trainer import WORK

    folder = out / name
    for file in (folder, folder / "model.safetensors", folder / "config.json"):
        files.refuse_link(file)
    if not folder.exists() or has_work(out / WORK / name):
        return
    if folder.is_dir() and not any(folder.iterdir()):
        return
    config = files.read_own(folder / "config.json") if folder.is_dir() else None
    if config is None or not _is_trained(config):
        raise UsageError(
            f"{folder} exists already, and specbench did not train it",
            "choose another --out, or move that folder away",
        )


def forget_work(out: Path, name: str) -> None:
    """Remove the checkpoints of an earlier training.

    Raises:
        UsageError: the folder contains other files.
    """
    from specbench_cli.training.loop import forget
    from specbench_cli.training.trainer import WORK

    folder = out / WORK / name
    files.refuse_link(folder)
    if folder.exists():
        forget(folder)


def _is_trained(config: bytes) -> bool:
    """Return True if specbench wrote a config.json."""
    try:
        found = json.loads(config)
    except ValueError:
        return False
    return isinstance(found, dict) and "specbench" in found


def _is_curves(content: bytes) -> bool:
    """Return True if `finish` wrote the content."""
    try:
        found = json.loads(content)
    except ValueError:
        return False
    return isinstance(found, dict) and all("curve" in each for each in found.values())


def target_and_draft(target: str, draft: str | None) -> "tuple[Checkpoint, Checkpoint]":
    """Return the target and its draft. Raise UsageError if none is named and none is customary."""
    from specbench_cli.models import resolve

    found = resolve(target)
    drafting = draft or found.draft
    if drafting is None:
        raise UsageError(f"{target} has no customary draft", "--draft MODEL")
    return found, resolve(drafting)


def device(wanted: str) -> "torch.device":
    """Return the device to train on for "auto", "cpu" or "cuda"."""
    import torch

    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise EnvironmentFault("no CUDA device is here", "use --device cpu")
    return torch.device("cuda" if found and wanted != "cpu" else "cpu")


class Bars:
    """Progress bars: called with a model's name and a point of its training, as trainers report;
    or told how much there is of something else."""

    def __init__(self, shown: Progress) -> None:
        self._shown, self._tasks = shown, dict[str, TaskID]()

    def __call__(self, name: str, point: "Point") -> None:
        self._at(name, point.step, point.steps, f"loss {point.loss:.3f}")

    def count(self, name: str, done: int, of: int) -> None:
        """So many of what is made before."""
        self._at(name, done, of, "")

    def _at(self, name: str, done: int, of: int, more: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._shown.add_task(name, total=of, more=more)
        self._shown.update(self._tasks[name], completed=done, more=more)


@contextmanager
def bars() -> "Iterator[Bars]":
    """A progress bar for each thing; an interruption says how to go on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[more]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=output.console(stderr=True)) as shown:
        try:
            yield Bars(shown)
        except KeyboardInterrupt:
            output.note("to go on: the same command, without --fresh")
            raise


@contextmanager
def counted(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar of a number that grows, told by the function yielded.

    Args:
        total: what it grows to, where that is known.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeRemainingColumn(), console=output.console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def finish(
    results: "Mapping[str, Result]",
    out: Path,
    mat: "Mapping[str, Sequence[Estimate]] | None" = None,
) -> None:
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
        if mat:
            facts[name]["mat"] = [asdict(estimate) for estimate in mat[name]]
        output.data(str(out / name))
    files.replace(path, json.dumps(facts, indent=1) + "\n")
    _draw(facts, out / f"{CURVES}.png")


def _draw(facts: "Mapping[str, dict[str, Any]]", path: Path) -> None:
    """The loss curves, and beside them what MAT heads came to on held-out replies."""
    from matplotlib.figure import Figure

    from specbench_cli.report.figures.drawing import style

    with style.defaults():
        heads = {name: fact for name, fact in facts.items() if fact.get("mat")}
        figure = Figure(figsize=(10 if heads else 6, 3.2), layout="constrained")
        read = "tokens read (millions)"
        axes = figure.add_subplot(
            1,
            2 if heads else 1,
            1,
            xlabel=read,
            ylabel="training loss (nats a token)",
            yscale="log",
        )
        lines = {}
        for name, fact in facts.items():
            curve = fact["curve"]
            tokens = [point["tokens"] / 1e6 for point in curve]
            (lines[name],) = axes.plot(tokens, [point["loss"] for point in curve], label=name)
        axes.legend(fontsize="x-small")
        if heads:
            axes = figure.add_subplot(1, 2, 2, xlabel=read, ylabel="MAT, chains, held-out replies")
            for name, fact in heads.items():
                step = fact["tokens"] / fact["steps"] / 1e6
                colour, mat = lines[name].get_color(), fact["mat"]
                at = [point["step"] * step for point in mat]
                axes.plot(at, [point["mat"] for point in mat], marker=".", color=colour, label=name)
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
