"""`specbench train`: the recipes that made the models we ship."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training._shared import Data, Out, Resume, Scale, Seed, Smoke, Where
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
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.training.trainer import Report, Trainer

app = typer.Typer(
    help="Train drafts and heads for a target; the embedded models.", no_args_is_help=True
)


Target = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of the finished target.",
        show_default="OUT/embedded-7m, else the shipped one",
        rich_help_panel=shared.WHAT,
    ),
]


@app.callback()
def _group() -> None:
    """Train drafts and heads for a target; the embedded models."""


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
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Train the embedded target (7.5M parameters) and its draft (0.9M).

    OUT gets embedded-7m/, embedded-1m/, training_curve.json and .png; checkpoints and the full
    loss curves lie in OUT/training. A run that was stopped continues with the same command.
    """
    from specbench_cli.training.family import BASE, DRAFT, TARGET

    recipes = shared.recipes((BASE, TARGET, DRAFT), steps_scale, smoke, out, resume)
    with shared.bars() as report:
        trainer = _trainer(out, data, seed, device, smoke, report)
        shared.finish(trainer.pair(*recipes), out)


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
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Fine-tune the target so that its earlier layers can speak too (embedded-exit)."""
    from specbench_cli.training.family import EXIT

    (recipe,) = shared.recipes((EXIT,), steps_scale, smoke, out, resume)
    with shared.bars() as report:
        trainer = _trainer(out, data, seed, device, smoke, report)
        shared.finish(trainer.exit(recipe, _target(target, out)), out)


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
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Train a small draft with a tokenizer and vocabulary of its own (embedded-xv)."""
    from specbench_cli.training.family import FOREIGN

    (recipe,) = shared.recipes((FOREIGN,), steps_scale, smoke, out, resume)
    with shared.bars() as report:
        trainer = _trainer(out, data, seed, device, smoke, report)
        shared.finish(trainer.foreign(recipe, _target(target, out)), out)


app.command(
    epilog="Example: [bold]specbench train quality --out results/quality[/bold] (all of mini; "
    "twenty minutes of one core) - shown by [bold]specbench list models embedded[/bold]"
)(quality)
app.command(
    epilog="Examples: [bold]specbench train draft --loss tvd++ --out drafts[/bold] (the shipped"
    " pair; minutes) - [bold]specbench train draft --loss kl --loss tvd --seeds 3 --out drafts"
    "[/bold] (a table) - then [bold]specbench run --draft drafts/seed-0/tvd++[/bold]"
)(draft)
app.command(
    epilog="Examples: [bold]specbench train grid --out grid[/bold] (45 drafts for the shipped"
    " target: hours; it may be stopped at any time) - [bold]specbench train grid --tokens"
    " 0.1M,0.3M,1M --layers 1,2 --out grid[/bold] - then [bold]specbench report --scaling grid"
    "[/bold]"
)(grid)
app.command(
    epilog="Example: [bold]specbench train replies --target smollm2-135m --replies 20000 "
    "--out heads[/bold] (days of one core; it may be stopped at any time)"
)(replies)
for head in HEADS:
    app.command(
        epilog=f"Example: [bold]specbench train {head.__name__} --out heads[/bold] (for the "
        "shipped target; a quarter of an hour of one core) - [bold]--smoke[/bold] (seconds, no "
        "download)"
    )(head)
app.command(
    "head",
    epilog="Example: [bold]specbench train head --plugin my_head.py --out heads[/bold] - then "
    "[bold]specbench run --plugin my_head.py --set my-method.head=heads/KIND[/bold]",
)(stateless)
app.command(
    epilog="Example: [bold]specbench train compare medusa hydra --tokens 2000000 --out heads[/bold]"
    " (for the shipped target; minutes a head) - [bold]--smoke[/bold] (seconds, no download)"
)(compare)
app.command(
    "specdec++",
    epilog="Example: [bold]specbench train specdec++ --out heads[/bold] (for the shipped pair; "
    "minutes of one core) - [bold]--smoke[/bold] (seconds, no download)",
)(specdec)
app.command(
    epilog="Example: [bold]specbench train judge --out heads[/bold] (for the shipped pair; minutes"
    " of one core) - then [bold]specbench run -m judge --set judge.head=heads/judge[/bold]"
)(judge)
app.command(
    epilog="Example: [bold]specbench train specee --target embedded-exit --out heads[/bold]"
    " (minutes of one core) - then [bold]specbench run -m specee --target embedded-exit --set"
    " specee.head=heads/exits[/bold]"
)(specee)
app.command(
    epilog="Examples: [bold]specbench train rest --out store[/bold] (of the shipped target's own "
    "replies; minutes of one core) - [bold]specbench train rest --target smollm2-135m --text "
    "corpus.jsonl --out store[/bold] - then [bold]specbench run -m rest --set "
    "rest.datastore=store/datastore[/bold]"
)(rest)
app.command(
    epilog="Example: [bold]specbench train convert EAGLE-Vicuna-7B --out eagle-vicuna --unpickle"
    "[/bold] - then [bold]specbench run -m eagle --set eagle.head=eagle-vicuna[/bold]"
)(convert)


def _trainer(
    out: Path, data: Path | None, seed: int, device: shared.Device, smoke: bool, report: "Report"
) -> "Trainer":
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.trainer import Trainer

    place = shared.device(device)
    if smoke:
        return Trainer(out, [], seed, place, n_replies=16, fast=False, report=report)
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
