"""Command group `specbench train`: draft models, heads and datastores for a target."""

from __future__ import annotations

import typer

from specbench_cli.commands.training.acceptance import specdec
from specbench_cli.commands.training.convert import convert
from specbench_cli.commands.training.datastore import rest
from specbench_cli.commands.training.draft import draft
from specbench_cli.commands.training.heads import COMMANDS as HEADS
from specbench_cli.commands.training.heads import replies, train_method_head
from specbench_cli.commands.training.judge import judge
from specbench_cli.commands.training.specee import specee

app = typer.Typer(
    help="Train draft models and heads, and build datastores, for a target model.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Train draft models and heads, and build datastores, for a target model."""


def _epilog(*paragraphs: str) -> str:
    return "\n\n".join(("Examples:", *paragraphs))


app.command(
    "draft",
    epilog=_epilog(
        "specbench train draft --loss tvd++ --out drafts",
        "specbench train draft --loss kl --loss tvd --seeds 3 --out drafts",
        "specbench run --draft drafts/seed-0/tvd++",
        "Training for the embedded models takes minutes on one core.",
    ),
)(draft)
app.command(
    "replies",
    epilog=_epilog(
        "specbench train replies --target smollm2-135m --replies 20000 --out heads",
        "The example above takes days on one core. It can be interrupted at any time.",
    ),
)(replies)
for head in HEADS:
    app.command(
        head.__name__,
        epilog=_epilog(
            f"specbench train {head.__name__} --out heads",
            f"specbench train {head.__name__} --smoke --out smoke",
            "Training for the small target in the package (embedded) takes about 15 minutes on"
            " one core; --smoke takes"
            " seconds and downloads nothing.",
        ),
    )(head)
app.command(
    "head",
    epilog=_epilog(
        "specbench train head --plugin my_head.py --out heads",
        "specbench run --plugin my_head.py --set my-method.head=heads/KIND",
    ),
)(train_method_head)
app.command(
    "specdec++",
    epilog=_epilog(
        "specbench train specdec++ --out heads",
        "specbench train specdec++ --smoke --out smoke",
        "Training for the embedded models takes minutes on one core; --smoke takes seconds and"
        " downloads nothing.",
    ),
)(specdec)
app.command(
    "judge",
    epilog=_epilog(
        "specbench train judge --out heads",
        "specbench run -m judge --set judge.head=heads/judge",
        "Training for the embedded models takes minutes on one core.",
    ),
)(judge)
app.command(
    "specee",
    epilog=_epilog(
        "specbench train specee --target embedded-exit --out heads",
        "specbench run -m specee --target embedded-exit --set specee.head=heads/exits",
        "Training for embedded-exit takes minutes on one core.",
    ),
)(specee)
app.command(
    "rest",
    epilog=_epilog(
        "specbench train rest --out store",
        "specbench train rest --target smollm2-135m --text corpus.jsonl --out store",
        "specbench run -m rest --set rest.datastore=store/datastore",
    ),
)(rest)
app.command(
    "convert",
    epilog=_epilog(
        "specbench train convert EAGLE-Vicuna-7B --out eagle-vicuna --unpickle",
        "specbench run -m eagle --set eagle.head=eagle-vicuna",
    ),
)(convert)
