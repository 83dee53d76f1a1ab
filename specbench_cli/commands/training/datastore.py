"""`specbench train rest`: the datastore that REST retrieves from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli import output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training._shared import Data, Out, Resume, Seed, Where
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.training.corpus import Chat

SMOKE = 24
"""Replies of a run that only tries."""

Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL", help="Model whose tokens the datastore is in.", rich_help_panel=shared.WHAT
    ),
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help='Text to retrieve from: FILE.txt, or FILE.jsonl with {"text": "..."} a line; repeat '
        "it for several.",
        show_default="the target's own replies",
        rich_help_panel=shared.WHAT,
    ),
]
Replies = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Without --text: questions that the target answers.",
        min=1,
        rich_help_panel=shared.TRAINING,
    ),
]
Smoke = Annotated[
    bool,
    typer.Option(
        "--smoke",
        help="A few replies on generated text: does it run at all?",
        rich_help_panel=shared.TRAINING,
    ),
]


def rest(
    out: Out,
    target: Target = "embedded",
    text: Texts = None,
    replies: Replies = 3000,
    seed: Seed = 0,
    resume: Resume = True,
    smoke: Smoke = False,
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Make the datastore that REST retrieves from, OUT/datastore: texts and their suffix array.

    Of files (--text) for any target; else of a target's own replies to questions like those of
    training, which OUT/training keeps: a target of the embedded family. A run that was stopped
    continues with the same command.
    """
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.datastore import DatastoreMaker

    shared.check_model(out, "datastore")
    folder = resolve(target).path
    if text:
        if smoke:
            raise UsageError("--smoke and --text do not go together", "leave one of them out")
        with shared.counted("texts", None) as progress:
            made = DatastoreMaker(out, folder, progress).of_texts(text, fresh=not resume)
    else:
        problems: list[Chat] = [] if smoke else load_gsm8k(data)
        n, place = SMOKE if smoke else replies, shared.device(device)
        with shared.counted("replies", n) as progress:
            made = DatastoreMaker(out, folder, progress).of_replies(
                problems, n, seed, place, fresh=not resume
            )
    output.data(str(made))
