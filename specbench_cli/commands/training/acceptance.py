"""`specbench train specdec++`: train the acceptance head that adapts the draft length."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import files
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config.options import parsed_command

if TYPE_CHECKING:
    from specbench_cli.config.train import AcceptanceOptions
    from specbench_cli.training.acceptance import AcceptanceResult

CALIBRATION = "acceptance_calibration"


@parsed_command("specbench_cli.config.train:AcceptanceOptions")
def specdec(options: AcceptanceOptions) -> None:
    """Train a SpecDec++ acceptance head for a target and its draft model.

    The target first answers training questions. Its replies are stored in OUT/training. The files
    OUT/acceptance_calibration.json and .png compare predictions with labels on held-out answers.
    """
    from specbench_cli.training.acceptance import ACCEPTANCE, AcceptanceTrainer
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.heads.trainer import N_REPLIES

    shared.check_outputs(options.out, f"{CALIBRATION}.json", f"{CALIBRATION}.png")
    models, drafts = shared.resolve_pair(options.target, options.draft)
    with shared.show_bars() as report:
        trainer = AcceptanceTrainer(
            options.out,
            models.path,
            [] if options.smoke else load_gsm8k(options.data),
            options.seed,
            shared.choose_device(options.device),
            n_replies=options.replies or N_REPLIES,
            report=report,
            progress=report.count,
            label=models.label,
            template=models.template,
            draft=lambda: drafts.path,
            labels=options.labels,
            draft_label=drafts.label,
        )
        trainer = trainer.for_smoke_test() if options.smoke else trainer
        own = trainer.rename_recipe(ACCEPTANCE)
        (recipe,) = shared.prepare_recipes(
            (own,), options.steps_scale, options.smoke, options.out, options.resume
        )
        weight = options.rejection_weight
        result = trainer.fit(replace(recipe, mixing=options.mixing, rejection_weight=weight))
        shared.finish({recipe.name: result}, options.out)
    _write_calibration(result, weight, options.out)


def _write_calibration(result: AcceptanceResult, rejection_weight: float, out: Path) -> None:
    """Store and draw how well the head's acceptance probabilities match the observed acceptance."""
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
