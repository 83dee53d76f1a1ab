"""`specbench train specdec++`: the head by which a draft's length adapts."""

import json
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli import files
from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training._shared import Data, Out, Resume, Scale, Seed, Smoke, Where
from specbench_cli.commands.training.heads import Count
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.training.acceptance import AcceptanceResult

CALIBRATION = "acceptance_calibration"


class Labels(StrEnum):
    """What a label is."""

    SAMPLED = "sampled"
    GREEDY = "greedy"


Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="Model that verifies: one of Llama's kind that answers chats.",
        rich_help_panel=shared.WHAT,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Model that drafts.",
        show_default="the target's",
        rich_help_panel=shared.WHAT,
    ),
]
Told = Annotated[
    Labels,
    typer.Option(
        help="sampled: the chance min(1, p/q) that a drawn token stands, as published; greedy: "
        "whether the likeliest token does.",
        rich_help_panel=shared.TRAINING,
    ),
]
Mixing = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Share of positions that hold the target's own token.",
        min=0,
        max=1,
        rich_help_panel=shared.TRAINING,
    ),
]
Weight = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="How much a rejection weighs in the loss.",
        min=0,
        rich_help_panel=shared.TRAINING,
    ),
]


def specdec(
    out: Out,
    target: Target = "embedded",
    draft: Draft = None,
    labels: Told = Labels.SAMPLED,
    mixing: Mixing = 0.15,
    rejection_weight: Weight = 6.0,
    count: Count = None,
    seed: Seed = 0,
    resume: Resume = True,
    steps_scale: Scale = 1.0,
    smoke: Smoke = False,
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Train the acceptance head of SpecDec++ for a target and its draft (embedded-acceptance).

    The target answers questions like those of training first, which OUT/training keeps. On answers
    held out, OUT/acceptance_calibration.json and .png compare what the head predicts with the
    labels.
    """
    from specbench_cli.models import resolve
    from specbench_cli.training.acceptance import ACCEPTANCE, AcceptanceTrainer
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.heads.trainer import N_REPLIES

    shared.check_outputs(out, f"{CALIBRATION}.json", f"{CALIBRATION}.png")
    models = resolve(target)
    drafting = draft or models.draft
    if drafting is None:
        raise UsageError(f"{target} has no customary draft", "--draft MODEL")
    drafts = resolve(drafting)
    with shared.bars() as report:
        trainer = AcceptanceTrainer(
            out,
            models.path,
            [] if smoke else load_gsm8k(data),
            seed,
            shared.device(device),
            n_replies=count or N_REPLIES,
            report=report,
            counts=report.count,
            label=models.label,
            template=models.template,
            draft=lambda: drafts.path,
            labels=labels.value,
            drafts=drafts.label,
        )
        trainer = trainer.smoke() if smoke else trainer
        own = trainer.recipe(ACCEPTANCE)
        (recipe,) = shared.recipes((own,), steps_scale, smoke, out, resume)
        recipe = replace(recipe, mixing=mixing, rejection_weight=rejection_weight)
        result = trainer.fit(recipe)
        shared.finish({recipe.name: result}, out)
    _calibrated(result, rejection_weight, out)


def _calibrated(result: "AcceptanceResult", rejection_weight: float, out: Path) -> None:
    """Write what the predictions are worth, and draw it."""
    facts = {
        "kl": result.divergence,
        "kl_of_the_mean": result.divergence_of_mean,
        "rejection_weight": rejection_weight,
        "bins": [asdict(part) for part in result.bins],
    }
    file = out / f"{CALIBRATION}.json"
    files.write_listed(file, json.dumps(facts, indent=1) + "\n")
    _draw(result, rejection_weight, file.with_suffix(".png"))


def _draw(result: "AcceptanceResult", rejection_weight: float, path: Path) -> None:
    """Draw the labelled share of acceptance by the predicted one."""
    from matplotlib.figure import Figure

    from specbench_cli.report.figures.drawing import style

    with style.defaults():
        figure = Figure(figsize=(3.3, 3.2), layout="constrained")
        axes = figure.add_subplot(
            xlabel="predicted chance of acceptance",
            ylabel="labelled chance",
            xlim=(0, 1),
            ylim=(0, 1),
        )
        shares = [at / 100 for at in range(101)]
        axes.plot(shares, shares, color="#999999", linewidth=0.8, label="equal")
        weighted = [s / (s + rejection_weight * (1 - s)) for s in shares]
        axes.plot(
            weighted, shares, "--", color="#999999", linewidth=0.8, label="where the loss is least"
        )
        axes.plot([b.predicted for b in result.bins], [b.labelled for b in result.bins], "o-")
        axes.legend(frameon=False)
        shared.write_figure(figure, path, dpi=100)
