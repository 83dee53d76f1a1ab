"""`specbench train specdec++`: train the acceptance head that adapts the draft length."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import files
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config import options

if TYPE_CHECKING:
    from specbench_cli.config.train import AcceptanceOptions
    from specbench_cli.training.acceptance import AcceptanceResult

CALIBRATION = "acceptance_calibration"


@options.parsed_command("specbench_cli.config.train:AcceptanceOptions")
def specdec(asked: AcceptanceOptions) -> None:
    """Train a SpecDec++ acceptance head for a target and its draft model.

    The target first answers training questions, which are stored in OUT/training. The files
    OUT/acceptance_calibration.json and .png compare predictions with labels on held-out answers.
    """
    from specbench_cli.training.acceptance import ACCEPTANCE, AcceptanceTrainer
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.heads.trainer import N_REPLIES

    shared.check_outputs(asked.out, f"{CALIBRATION}.json", f"{CALIBRATION}.png")
    models, drafts = shared.target_and_draft(asked.target, asked.draft)
    with shared.bars() as report:
        trainer = AcceptanceTrainer(
            asked.out,
            models.path,
            [] if asked.smoke else load_gsm8k(asked.data),
            asked.seed,
            shared.device(asked.device),
            n_replies=asked.replies or N_REPLIES,
            report=report,
            progress=report.count,
            label=models.label,
            template=models.template,
            draft=lambda: drafts.path,
            labels=asked.labels,
            draft_label=drafts.label,
        )
        trainer = trainer.for_smoke_test() if asked.smoke else trainer
        own = trainer.rename_recipe(ACCEPTANCE)
        (recipe,) = shared.recipes((own,), asked.steps_scale, asked.smoke, asked.out, asked.resume)
        weight = asked.rejection_weight
        result = trainer.fit(replace(recipe, mixing=asked.mixing, rejection_weight=weight))
        shared.finish({recipe.name: result}, asked.out)
    _write_calibration(result, weight, asked.out)


def _write_calibration(result: AcceptanceResult, rejection_weight: float, out: Path) -> None:
    """Write and draw the calibration of the predictions."""
    from specbench_cli.report.figures.training import draw_calibration

    facts = {
        "kl": result.divergence,
        "kl_of_the_mean": result.divergence_of_mean,
        "rejection_weight": rejection_weight,
        "bins": [asdict(part) for part in result.bins],
    }
    file = out / f"{CALIBRATION}.json"
    files.write_listed(file, json.dumps(facts, indent=1) + "\n")
    draw_calibration(result.bins, rejection_weight, file.with_suffix(".png"))
