"""Code shared by the commands of `specbench train`: schedules, progress bars and loss curves."""

import json
from collections.abc import Iterator, Mapping
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
    from specbench_cli.training.loop import Schedule, TrainingPoint, TrainingResult

    Plan = TypeVar("Plan", bound=Schedule)

CURVE_POINTS = 100
CURVES = "training_curve"
MODEL_FILES = {
    "adapter_config.json",
    "adapter_model.safetensors",
    "alignment.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""Files of a trained model or head in its folder."""


def prepare_recipes(
    recipes: "tuple[Plan, ...]",
    scale: float,
    smoke: bool,
    out: Path,
    resume: bool,
    tokens: int | None = None,
    sequences: int | None = None,
    lr: float | None = None,
) -> "list[Plan]":
    """Return the training schedules, changed as the command-line options require.

    Delete old checkpoints, unless the training is resumed.

    Args:
        recipes: the default training schedule of each model.
        scale: Factor for the number of training steps.
        smoke: True for a smoke test of a few steps.
        tokens: Number of training tokens per model. If given, `scale` is not used.
        sequences: Batch size in sequences. It does not change the number of training tokens.
        lr: Peak learning rate.
    """
    from dataclasses import replace

    if not scale > 0:
        raise UsageError(f"--steps-scale must be above 0, got {scale}")
    files.check_own(out / f"{CURVES}.json", _is_curves)
    check_outputs(out, f"{CURVES}.png")
    for recipe in recipes:
        check_model(out, recipe.name)
        if not resume:
            delete_work(out, recipe.name)
    if sequences is not None:
        recipes = tuple(recipe.with_batch_size(sequences) for recipe in recipes)
    if lr is not None:
        recipes = tuple(replace(recipe, peak_lr=lr) for recipe in recipes)
    scales = [tokens / recipe.tokens if tokens else scale for recipe in recipes]
    pairs = zip(recipes, scales, strict=True)
    return [
        recipe.for_smoke_test() if smoke else recipe.scale_steps(factor) for recipe, factor in pairs
    ]


def check_model(out: Path, name: str) -> None:
    """Raise UsageError if training would replace a file that specbench did not write.

    Args:
        out: the folder of `--out`.
        name: name of the model's folder inside `out`.
    """
    from specbench_cli.training.loop import WORK, has_work

    folder = out / name
    for place in (out / WORK, out / WORK / name, folder):
        files.check_no_link(place)
    if not folder.exists():
        return
    found = {each.name for each in folder.iterdir()} if folder.is_dir() else {""}
    for file in sorted(MODEL_FILES & found):
        files.check_no_link(folder / file)
    if found and files.FILE_LIST not in found and not has_work(out / WORK / name):
        raise UsageError(
            f"{folder} exists already, and specbench did not train it",
            "choose another --out, or move that folder away",
        )
    check_outputs(folder, *sorted(MODEL_FILES & found))


def check_outputs(folder: Path, *names: str) -> None:
    """Raise UsageError if one of these files exists in the folder and specbench did not write
    it.
    """
    for name in names:
        files.check_listed(folder / name)


def delete_work(out: Path, name: str) -> None:
    """Remove the checkpoints of an earlier training.

    Raises:
        UsageError: the folder contains other files.
    """
    from specbench_cli.training.loop import WORK, remove_work

    folder = out / WORK / name
    files.check_no_link(folder)
    if folder.exists():
        remove_work(folder)


def _is_curves(content: bytes) -> bool:
    """Return True if `content` is that of a `training_curve.json` file that specbench wrote."""
    found = files.json_object(content)
    return bool(found) and all(
        isinstance(each, dict) and "curve" in each for each in found.values()
    )


def resolve_pair(target: str, draft: str | None) -> "tuple[Checkpoint, Checkpoint]":
    """Return the target and draft models. Without `draft`, use the target's default draft model.

    Raises:
        UsageError: the target has no default draft model.
    """
    from specbench_cli.models import resolve

    found = resolve(target)
    drafting = draft or found.draft
    if drafting is None:
        raise UsageError(f"{target} has no default draft model", "--draft MODEL")
    return found, resolve(drafting)


def choose_device(name: str) -> "torch.device":
    """Return the device to train on.

    Args:
        name: "cpu", "cuda", or "auto", which means CUDA if this machine has it.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise EnvironmentFault("this machine has no CUDA device", "use --device cpu")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


class Bars:
    """Progress bars of a training, one per model.

    A trainer calls the `Bars` object with a model's name and the newest point of its loss curve.
    """

    def __init__(self, shown: Progress) -> None:
        self._shown, self._tasks = shown, dict[str, TaskID]()

    def __call__(self, name: str, point: "TrainingPoint") -> None:
        self._update(name, point.step, point.steps, f"loss {point.loss:.3f}")

    def count(self, name: str, done: int, of: int | None) -> None:
        """Show how many items, such as replies, are done. `of` is their total, or None if
        unknown.
        """
        self._update(name, done, of, "")

    def _update(self, name: str, done: int, of: int | None, more: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._shown.add_task(name, total=of, more=more)
        self._shown.update(self._tasks[name], completed=done, more=more)


@contextmanager
def show_bars() -> "Iterator[Bars]":
    """Show progress bars within a `with` block. After Ctrl-C, print how to resume."""
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
            output.note("to resume: run the same command again, without --fresh")
            raise


def finish(results: "Mapping[str, TrainingResult]", out: Path) -> None:
    """Store and draw the loss curves of trained models, and print the folders of the models."""
    path = out / f"{CURVES}.json"
    content = files.read_own(path)
    facts = json.loads(content) if content is not None else {}
    for name, result in results.items():
        curve = _thin_curve(result.curve)
        last = result.curve[-1]
        facts[name] = {
            "steps": last.steps,
            "tokens": last.tokens,
            "seconds": round(result.seconds),
            "final_loss": curve[-1]["loss"],
            "curve": curve,
        }
        if estimates := getattr(result, "mat", None):
            facts[name]["mat"] = [asdict(estimate) for estimate in estimates]
        output.data(str(out / name))
    files.write_own(path, json.dumps(facts, indent=1) + "\n", _is_curves)
    _draw(facts, out / f"{CURVES}.png")


def _draw(facts: "Mapping[str, dict[str, Any]]", path: Path) -> None:
    """Draw the loss curves of all models in a folder."""
    from specbench_cli.report.figures.training import draw_curves

    draw_curves(facts, path)


def _thin_curve(curve: "list[TrainingPoint]") -> list[dict[str, float]]:
    """Return a loss curve reduced to about `CURVE_POINTS` points. Each is a mean of neighbours."""
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
