"""`specbench train grid`: small drafts of several sizes, each on several numbers of tokens."""

from collections.abc import Callable
from itertools import product
from typing import Annotated

import typer

from specbench_cli import files, output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training._shared import Data, Out, Resume, Smoke, Where
from specbench_cli.config.numbers import number, short
from specbench_cli.errors import UsageError

COLUMNS = ("layers", "parameters", "tokens", "seed", "alpha", "mat", "mbsu")


def grid(
    out: Out,
    target: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model that the drafts are for, one of the embedded family: what they read is"
            " what it has read.",
            rich_help_panel=shared.WHAT,
        ),
    ] = "embedded",
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Draft whose shape they have, its layers apart.",
            show_default="the target's own",
            rich_help_panel=shared.WHAT,
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            metavar="N,N,...", help="Layers of the drafts.", rich_help_panel=shared.TRAINING
        ),
    ] = "1,2,4",
    tokens: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Tokens that they read, to the next 2,048: 0.3M, 500k, 3e5.",
            rich_help_panel=shared.TRAINING,
        ),
    ] = "0.1M,0.3M,1M,3M,10M",
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Drafts of each kind, with weights and texts of their own: seeds 0 to N - 1.",
            rich_help_panel=shared.TRAINING,
        ),
    ] = 3,
    resume: Resume = True,
    smoke: Smoke = False,
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Train drafts of several sizes from nothing, on several numbers of tokens of text.

    OUT gets a folder for each, the least tokens first, with its alpha and MAT on the same held-out
    questions. [bold]specbench report --scaling OUT[/bold] fits the law of these. What is there is
    not trained again; a training that was stopped goes on.
    """
    from specbench_cli.models import resolve
    from specbench_cli.training.align import LENGTH, RECORD, SEQUENCES, Aligner
    from specbench_cli.training.corpus import load_gsm8k

    sizes = _numbers("--tokens", tokens, number)
    depths = [int(n) for n in _numbers("--layers", layers, int)]
    found, place = resolve(target), shared.device(device)
    own = draft or found.draft
    with shared.bars() as report:
        trainer = Aligner(
            out,
            found.path,
            [] if smoke else load_gsm8k(data),
            0,  # of the held-out questions, which are the same for all
            place,
            fast=False,  # to compile takes longer than most of these trainings
            report=report,
            counts=report.count,
            label=found.label,
            template=found.template,
            draft=None if own is None else lambda: resolve(own).path,
        )
        trainer = trainer.smoke() if smoke else trainer
        rows = []
        for (at, size), depth, seed in product(enumerate(sizes, 1), depths, range(seeds)):
            updates = at if smoke else max(1, round(size / (SEQUENCES * LENGTH)))
            name = f"{depth}-layers-{short(size)}-seed-{seed}"
            shared.check_model(out, name)
            if not resume:
                shared.forget_work(out, name)
                files.remove_own(out / name / RECORD)  # without it the draft is trained again
            rows.append(trainer.grow(name, depth, updates, seed))
    output.rows(rows, COLUMNS)
    output.note(f"their law: specbench report --scaling {out}")


def _numbers(option: str, words: str, read: Callable[[str], float]) -> list[float]:
    """The numbers of an option, each once, the least first."""
    try:
        found = sorted({read(word) for word in words.split(",")})
    except ValueError:
        found = []
    if not found or not 0 < found[0] <= found[-1] < float("inf"):
        example = "0.1M,1M,10M" if read is number else "1,2,4"
        raise UsageError(
            f"{option} {words!r} are no numbers above 0, separated by commas",
            f"{option} {example}",
        )
    return found
