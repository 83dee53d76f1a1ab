"""Commands of `python -m recipes.embedded`: training and measuring the embedded family."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from recipes.command_line import create_app
from recipes.embedded.quality import quality
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
    """Options that name the finished target."""

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
    """Options of `exit` and `foreign`; the help lists those of `TargetOptions` first."""


@options.parsed_command("recipes.embedded.commands:PairOptions")
def pair(asked: PairOptions) -> None:
    """Train the embedded target (7.5M parameters) and its draft (0.9M).

    OUT gets embedded-7m/, embedded-1m/, training_curve.json and .png; checkpoints and the full
    loss curves lie in OUT/training. A run that was stopped continues with the same command.
    """
    from recipes.embedded.family import BASE, DRAFT, TARGET

    recipes = _recipes(asked, BASE, TARGET, DRAFT)
    with shared.show_bars() as report:
        shared.finish(_trainer(asked, report).train_pair(*recipes), asked.out)


@options.parsed_command("recipes.embedded.commands:VariantOptions")
def early_exit(asked: VariantOptions) -> None:
    """Fine-tune the target so that its earlier layers can speak too (embedded-exit)."""
    from recipes.embedded.family import EXIT

    (recipe,) = _recipes(asked, EXIT)
    with shared.show_bars() as report:
        trainer = _trainer(asked, report)
        shared.finish(trainer.train_early_exit(recipe, _target(asked.target, asked.out)), asked.out)


@options.parsed_command("recipes.embedded.commands:VariantOptions")
def foreign(asked: VariantOptions) -> None:
    """Train a small draft with a tokenizer and vocabulary of its own (embedded-xv)."""
    from recipes.embedded.family import FOREIGN

    (recipe,) = _recipes(asked, FOREIGN)
    with shared.show_bars() as report:
        trainer = _trainer(asked, report)
        shared.finish(trainer.train_foreign(recipe, _target(asked.target, asked.out)), asked.out)


app = create_app(
    "Train the embedded family, and measure what its models can do.",
    {
        "pair": (
            pair,
            "Examples: [bold]python -m recipes.embedded pair --out pair[/bold] (the shipped pair:"
            " 82 minutes on 2 cores that had other work too) - [bold]python -m recipes.embedded"
            " pair --out try --smoke[/bold] (seconds, no download)",
        ),
        "exit": (
            early_exit,
            "Example: [bold]python -m recipes.embedded exit --out pair[/bold] (after `pair --out"
            " pair`; ten minutes of one core)",
        ),
        "foreign": (
            foreign,
            "Example: [bold]python -m recipes.embedded foreign --out pair[/bold] (after `pair --out"
            " pair`; its replies are kept for this)",
        ),
        "quality": (
            quality,
            "Example: [bold]python -m recipes.embedded quality --out results/quality[/bold] (all of"
            " mini; twenty minutes of one core) - shown by [bold]specbench list models"
            " embedded[/bold]",
        ),
    },
)


def _recipes(asked: PairOptions, *recipes: Recipe) -> list[Recipe]:
    """Return recipes at the scale that the options ask for."""
    return shared.prepare_recipes(recipes, asked.steps_scale, asked.smoke, asked.out, asked.resume)


def _trainer(asked: PairOptions, report: Report) -> Trainer:
    """Return the trainer of the embedded models."""
    from recipes.embedded.trainer import Trainer
    from specbench_cli.training.corpus import load_gsm8k

    place = shared.choose_device(asked.device)
    if asked.smoke:
        return Trainer(asked.out, [], asked.seed, place, n_replies=16, fast=False, report=report)
    return Trainer(asked.out, load_gsm8k(asked.data), asked.seed, place, report=report)


def _target(given: Path | None, out: Path) -> Path:
    """Return the folder of the finished target."""
    from recipes.embedded.family import TARGET
    from specbench_cli.models import resolve

    here = given or out / TARGET.name
    if (here / "config.json").is_file():
        return here
    if given is not None:
        raise UsageError(
            f"--target {given} holds no model", "python -m recipes.embedded pair --out DIR"
        )
    return resolve(TARGET.name).path
