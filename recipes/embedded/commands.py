"""Commands of `python -m recipes.embedded`, which train and measure the embedded models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from recipes.command_line import create_app
from recipes.embedded.quality import measure_quality
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config import options
from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import Option
from specbench_cli.config.train import WHAT, Data, Out, Resume, Seed, Smoke, StepsScale, Where
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from recipes.embedded.family import Recipe
    from recipes.embedded.trainer import Trainer
    from specbench_cli.training.loop import Report


class PairOptions(CommandOptions):
    """Options of `pair`."""

    out: Out
    seed: Seed = 0
    resume: Resume = True
    steps_scale: StepsScale = 1.0
    smoke: Smoke = False
    device: Where = "auto"
    data: Data = None


class TargetOptions(CommandOptions):
    """Options for the folder of the trained target."""

    out: Out
    target: Annotated[
        Path | None,
        Option(
            WHAT,
            "DIR",
            "Folder of the finished target.",
            default="OUT/embedded-7m, else the shipped one",
        ),
    ] = None


class VariantOptions(PairOptions, TargetOptions):
    """Options of `exit` and `train_foreign`; the help lists those of `TargetOptions` first."""


@options.parsed_command("recipes.embedded.commands:PairOptions")
def train_pair(options: PairOptions) -> None:
    """Train the embedded target (7.5M parameters) and its draft (0.9M).

    The command writes embedded-7m/, embedded-1m/, training_curve.json and .png to OUT. Checkpoints
    and the full loss curves are in OUT/training. Repeat the command to continue a stopped training.
    """
    from recipes.embedded.family import BASE, DRAFT, TARGET

    recipes = _scale_recipes(options, BASE, TARGET, DRAFT)
    with shared.show_bars() as report:
        shared.finish(_create_trainer(options, report).train_pair(*recipes), options.out)


@options.parsed_command("recipes.embedded.commands:VariantOptions")
def train_early_exit(options: VariantOptions) -> None:
    """Fine-tune the target so that its earlier layers can predict tokens too (embedded-exit)."""
    from recipes.embedded.family import EXIT

    (recipe,) = _scale_recipes(options, EXIT)
    with shared.show_bars() as report:
        trainer = _create_trainer(options, report)
        shared.finish(
            trainer.train_early_exit(recipe, _find_target(options.target, options.out)), options.out
        )


@options.parsed_command("recipes.embedded.commands:VariantOptions")
def train_foreign(options: VariantOptions) -> None:
    """Train a small draft model with another tokenizer and vocabulary (embedded-xv)."""
    from recipes.embedded.family import FOREIGN

    (recipe,) = _scale_recipes(options, FOREIGN)
    with shared.show_bars() as report:
        trainer = _create_trainer(options, report)
        shared.finish(
            trainer.train_foreign(recipe, _find_target(options.target, options.out)), options.out
        )


app = create_app(
    "Train the models that specbench ships, and measure their accuracy.",
    {
        "pair": (
            train_pair,
            "Examples: [bold]python -m recipes.embedded pair --out pair[/bold] (the shipped pair:"
            " 82 minutes on 2 cores that had other work too) - [bold]python -m recipes.embedded"
            " pair --out try --smoke[/bold] (seconds, no download)",
        ),
        "exit": (
            train_early_exit,
            "Example: [bold]python -m recipes.embedded exit --out pair[/bold] (after `pair --out"
            " pair`; ten minutes of one core)",
        ),
        "foreign": (
            train_foreign,
            "Example: [bold]python -m recipes.embedded foreign --out pair[/bold] (after `pair --out"
            " pair`, which stores the target's replies)",
        ),
        "quality": (
            measure_quality,
            "Example: [bold]python -m recipes.embedded quality --out results/quality[/bold] (all of"
            " mini; twenty minutes of one core) - shown by [bold]specbench list models"
            " embedded[/bold]",
        ),
    },
)


def _scale_recipes(options: PairOptions, *recipes: Recipe) -> list[Recipe]:
    """Return the training recipes, changed as the options `--steps-scale` and `--smoke` require."""
    return shared.prepare_recipes(
        recipes, options.steps_scale, options.smoke, options.out, options.resume
    )


def _create_trainer(options: PairOptions, report: Report) -> Trainer:
    """Return the trainer of the embedded models."""
    from recipes.embedded.trainer import Trainer
    from specbench_cli.training.corpus import load_gsm8k

    place = shared.choose_device(options.device)
    if options.smoke:
        return Trainer(
            options.out, [], options.seed, place, n_replies=16, fast=False, report=report
        )
    return Trainer(options.out, load_gsm8k(options.data), options.seed, place, report=report)


def _find_target(folder: Path | None, out: Path) -> Path:
    """Return the folder of the target model.

    It is the given folder, else the target trained in `out`, else the one shipped with specbench.
    """
    from recipes.embedded.family import TARGET
    from specbench_cli.models import resolve

    found = folder or out / TARGET.name
    if (found / "config.json").is_file():
        return found
    if folder is not None:
        raise UsageError(
            f"--target {folder} contains no model", "python -m recipes.embedded pair --out DIR"
        )
    return resolve(TARGET.name).path
