"""`python -m recipes.studies grid`: small drafts of several sizes and training lengths."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from recipes.studies.numbers import number, short
from specbench_cli import files, output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config import options
from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import Option
from specbench_cli.config.train import TRAINING, WHAT, Data, Out, Resume, Smoke, Where
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from recipes.studies.scratch_training import ScratchTrainer

COLUMNS = ("layers", "parameters", "tokens", "seed", "alpha", "mat", "mbsu")


class GridOptions(CommandOptions):
    """Options of `grid`."""

    out: Out
    target: Annotated[
        str,
        Option(
            WHAT,
            "MODEL",
            "Target of the drafts, one of the embedded models. The drafts are trained on the"
            " target's own training corpus.",
        ),
    ] = "embedded"
    draft: Annotated[
        str | None,
        Option(
            WHAT,
            "MODEL",
            "Draft whose shape they have, except for the number of layers.",
            default="the target's own",
        ),
    ] = None
    layers: Annotated[str, Option(TRAINING, "N,N,...", "Layers of the drafts.")] = "1,2,4"
    tokens: Annotated[
        str,
        Option(
            TRAINING,
            "N,N,...",
            "Training tokens, rounded to multiples of 2,048: 0.3M, 500k, 3e5.",
        ),
    ] = "0.1M,0.3M,1M,3M,10M"
    seeds: Annotated[
        int,
        Field(ge=1),
        Option(
            TRAINING,
            "N",
            "Drafts of each size, with different initial weights and texts: seeds 0 to N - 1.",
        ),
    ] = 3
    resume: Resume = True
    smoke: Smoke = False
    device: Where = "auto"
    data: Data = None


@options.parsed_command("recipes.studies.grid:GridOptions")
def grid(options: GridOptions) -> None:
    """Train drafts with several numbers of layers from random weights, for several token counts.

    OUT gets a folder for each draft, with its alpha and MAT on the same held-out questions. The
    shortest trainings run first. [bold]python -m recipes.studies scaling OUT[/bold] fits the
    scaling laws. Finished drafts are not trained again, and a stopped training continues.
    """
    from specbench_cli.training.align import LENGTH, RECORD, SEQUENCES

    sizes = _numbers("--tokens", options.tokens, number)
    depths = [int(n) for n in _numbers("--layers", options.layers, int)]
    out, rows = options.out, []
    with shared.show_bars() as report:
        trainer = _trainer(options, report)
        for (at, size), depth, seed in product(enumerate(sizes, 1), depths, range(options.seeds)):
            updates = at if options.smoke else max(1, round(size / (SEQUENCES * LENGTH)))
            name = f"{depth}-layers-{short(size)}-seed-{seed}"
            shared.check_model(out, name)
            if not options.resume:
                shared.delete_work(out, name)
                files.remove_own(out / name / RECORD)  # without it the draft is trained again
            rows.append(trainer.train_draft(name, depth, updates, seed))
    output.rows(rows, COLUMNS)
    output.note(f"to fit the scaling laws: python -m recipes.studies scaling {out}")


def _trainer(options: GridOptions, report: shared.Bars) -> ScratchTrainer:
    """Return the trainer of all drafts."""
    from recipes.studies.scratch_training import ScratchTrainer
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import load_gsm8k

    found, place = resolve(options.target), shared.choose_device(options.device)
    own = options.draft or found.draft
    trainer = ScratchTrainer(
        options.out,
        found.path,
        [] if options.smoke else load_gsm8k(options.data),
        0,  # seed of the held-out questions, which are the same for all drafts
        place,
        fast=False,  # compiling would take longer than most of these trainings
        report=report,
        progress=report.count,
        label=found.label,
        template=found.template,
        draft=None if own is None else lambda: resolve(own).path,
    )
    return trainer.for_smoke_test() if options.smoke else trainer


def _numbers(option: str, words: str, read: Callable[[str], float]) -> list[float]:
    """Return the distinct numbers in an option's value, sorted."""
    try:
        found = sorted({read(word) for word in words.split(",")})
    except ValueError:
        found = []
    if not found or not 0 < found[0] <= found[-1] < float("inf"):
        example = "0.1M,1M,10M" if read is number else "1,2,4"
        raise UsageError(
            f"{option} {words!r} must be numbers above 0, separated by commas",
            f"{option} {example}",
        )
    return found
