"""`specbench train`: the recipes that made the models we ship."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training.acceptance import specdec
from specbench_cli.commands.training.convert import convert
from specbench_cli.commands.training.datastore import rest
from specbench_cli.commands.training.draft import draft
from specbench_cli.commands.training.grid import grid
from specbench_cli.commands.training.heads import COMMANDS as HEADS
from specbench_cli.commands.training.heads import compare, replies, stateless
from specbench_cli.commands.training.judge import judge
from specbench_cli.commands.training.quality import quality
from specbench_cli.commands.training.specee import specee
from specbench_cli.config import options
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.config.train import EmbeddedOptions, PairOptions
    from specbench_cli.training.family import Recipe
    from specbench_cli.training.trainer import Report, Trainer

app = typer.Typer(
    help="Train drafts and heads for a target; the embedded models.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Train drafts and heads for a target; the embedded models."""


@options.parsed_command("specbench_cli.config.train:PairOptions")
def pair(asked: PairOptions) -> None:
    """Train the embedded target (7.5M parameters) and its draft (0.9M).

    OUT gets embedded-7m/, embedded-1m/, training_curve.json and .png; checkpoints and the full
    loss curves lie in OUT/training. A run that was stopped continues with the same command.
    """
    from specbench_cli.training.family import BASE, DRAFT, TARGET

    recipes = _recipes(asked, BASE, TARGET, DRAFT)
    with shared.bars() as report:
        shared.finish(_trainer(asked, report).pair(*recipes), asked.out)


@options.parsed_command("specbench_cli.config.train:EmbeddedOptions")
def early_exit(asked: EmbeddedOptions) -> None:
    """Fine-tune the target so that its earlier layers can speak too (embedded-exit)."""
    from specbench_cli.training.family import EXIT

    (recipe,) = _recipes(asked, EXIT)
    with shared.bars() as report:
        trainer = _trainer(asked, report)
        shared.finish(trainer.exit(recipe, _target(asked.target, asked.out)), asked.out)


@options.parsed_command("specbench_cli.config.train:EmbeddedOptions")
def foreign(asked: EmbeddedOptions) -> None:
    """Train a small draft with a tokenizer and vocabulary of its own (embedded-xv)."""
    from specbench_cli.training.family import FOREIGN

    (recipe,) = _recipes(asked, FOREIGN)
    with shared.bars() as report:
        trainer = _trainer(asked, report)
        shared.finish(trainer.foreign(recipe, _target(asked.target, asked.out)), asked.out)


app.command(
    "pair",
    epilog="Examples: [bold]specbench train pair --out pair[/bold] (the shipped pair: 82 "
    "minutes on 2 cores that had other work too) - [bold]specbench train pair --out try "
    "--smoke[/bold] (seconds, no download)",
)(pair)
app.command(
    "exit",
    epilog="Example: [bold]specbench train exit --out pair[/bold] (after `train pair --out pair`; "
    "ten minutes of one core)",
)(early_exit)
app.command(
    "foreign",
    epilog="Example: [bold]specbench train foreign --out pair[/bold] (after `train pair --out "
    "pair`; its replies are kept for this)",
)(foreign)
app.command(
    "quality",
    epilog="Example: [bold]specbench train quality --out results/quality[/bold] (all of mini; "
    "twenty minutes of one core) - shown by [bold]specbench list models embedded[/bold]",
)(quality)
app.command(
    "draft",
    epilog="Examples: [bold]specbench train draft --loss tvd++ --out drafts[/bold] (the shipped"
    " pair; minutes) - [bold]specbench train draft --loss kl --loss tvd --seeds 3 --out drafts"
    "[/bold] (a table) - then [bold]specbench run --draft drafts/seed-0/tvd++[/bold]",
)(draft)
app.command(
    "grid",
    epilog="Examples: [bold]specbench train grid --out grid[/bold] (45 drafts for the shipped"
    " target: hours; it may be stopped at any time) - [bold]specbench train grid --tokens"
    " 0.1M,0.3M,1M --layers 1,2 --out grid[/bold] - then [bold]specbench report --scaling grid"
    "[/bold]",
)(grid)
app.command(
    "replies",
    epilog="Example: [bold]specbench train replies --target smollm2-135m --replies 20000 "
    "--out heads[/bold] (days of one core; it may be stopped at any time)",
)(replies)
for head in HEADS:
    app.command(
        head.__name__,
        epilog=f"Example: [bold]specbench train {head.__name__} --out heads[/bold] (for the "
        "shipped target; a quarter of an hour of one core) - [bold]--smoke[/bold] (seconds, no "
        "download)",
    )(head)
app.command(
    "head",
    epilog="Example: [bold]specbench train head --plugin my_head.py --out heads[/bold] - then "
    "[bold]specbench run --plugin my_head.py --set my-method.head=heads/KIND[/bold]",
)(stateless)
app.command(
    "compare",
    epilog="Example: [bold]specbench train compare medusa hydra --tokens 2000000 --out heads[/bold]"
    " (for the shipped target; minutes a head) - [bold]--smoke[/bold] (seconds, no download)",
)(compare)
app.command(
    "specdec++",
    epilog="Example: [bold]specbench train specdec++ --out heads[/bold] (for the shipped pair; "
    "minutes of one core) - [bold]--smoke[/bold] (seconds, no download)",
)(specdec)
app.command(
    "judge",
    epilog="Example: [bold]specbench train judge --out heads[/bold] (for the shipped pair; minutes"
    " of one core) - then [bold]specbench run -m judge --set judge.head=heads/judge[/bold]",
)(judge)
app.command(
    "specee",
    epilog="Example: [bold]specbench train specee --target embedded-exit --out heads[/bold]"
    " (minutes of one core) - then [bold]specbench run -m specee --target embedded-exit --set"
    " specee.head=heads/exits[/bold]",
)(specee)
app.command(
    "rest",
    epilog="Examples: [bold]specbench train rest --out store[/bold] (of the shipped target's own "
    "replies; minutes of one core) - [bold]specbench train rest --target smollm2-135m --text "
    "corpus.jsonl --out store[/bold] - then [bold]specbench run -m rest --set "
    "rest.datastore=store/datastore[/bold]",
)(rest)
app.command(
    "convert",
    epilog="Example: [bold]specbench train convert EAGLE-Vicuna-7B --out eagle-vicuna --unpickle"
    "[/bold] - then [bold]specbench run -m eagle --set eagle.head=eagle-vicuna[/bold]",
)(convert)


def _recipes(asked: PairOptions | EmbeddedOptions, *recipes: Recipe) -> list[Recipe]:
    """Return recipes at the scale that the options ask for."""
    return shared.recipes(recipes, asked.steps_scale, asked.smoke, asked.out, asked.resume)


def _trainer(asked: PairOptions | EmbeddedOptions, report: Report) -> Trainer:
    """Return the trainer of the embedded models."""
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.trainer import Trainer

    place = shared.device(asked.device)
    if asked.smoke:
        return Trainer(asked.out, [], asked.seed, place, n_replies=16, fast=False, report=report)
    return Trainer(asked.out, load_gsm8k(asked.data), asked.seed, place, report=report)


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
