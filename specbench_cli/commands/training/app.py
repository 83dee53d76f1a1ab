"""`specbench train`: drafts, heads and datastores for a target."""

from __future__ import annotations

import typer

from specbench_cli.commands.training.acceptance import specdec
from specbench_cli.commands.training.convert import convert
from specbench_cli.commands.training.datastore import rest
from specbench_cli.commands.training.draft import draft
from specbench_cli.commands.training.heads import COMMANDS as HEADS
from specbench_cli.commands.training.heads import replies, stateless
from specbench_cli.commands.training.judge import judge
from specbench_cli.commands.training.specee import specee

app = typer.Typer(help="Train drafts, heads and datastores for a target.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Train drafts, heads and datastores for a target."""


app.command(
    "draft",
    epilog="Examples: [bold]specbench train draft --loss tvd++ --out drafts[/bold] (the shipped"
    " pair; minutes) - [bold]specbench train draft --loss kl --loss tvd --seeds 3 --out drafts"
    "[/bold] (a table) - then [bold]specbench run --draft drafts/seed-0/tvd++[/bold]",
)(draft)
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
