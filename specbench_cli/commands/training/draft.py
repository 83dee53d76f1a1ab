"""`specbench train draft`: align a draft model with its target, by one loss or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import files, output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config import options
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from specbench_cli.config.train import DraftOptions
    from specbench_cli.models.resolve import Checkpoint
    from specbench_cli.training.align import Aligner, AlignEstimate, AlignResult, EstimatePairs
    from specbench_cli.training.corpus import Chat


TABLE, DRAWN = "alignment.json", "alignment.svg"
"""Files with the results of all losses."""


@options.parsed_command("specbench_cli.config.train:DraftOptions")
def draft(asked: DraftOptions) -> None:
    """Align a draft model with its target by distillation.

    To create a draft model for a target that has none, use --layers 2 --vocabulary 8192.

    The target first answers training questions, once per seed; the replies are stored in
    OUT/seed-N. Each loss and seed gets a folder in OUT, for `specbench run --draft`.
    OUT/alignment.json holds acceptance and MAT before and after training, on held-out questions,
    with 95% intervals over seeds.
    """
    from specbench_cli.models import resolve
    from specbench_cli.report.figures.training import draw_alignment
    from specbench_cli.training.align import make_loss_row
    from specbench_cli.training.corpus import load_gsm8k

    shared.check_outputs(asked.out, TABLE, DRAWN)
    _check_combination(asked)
    target, place = resolve(asked.target), shared.device(asked.device)
    problems = [] if asked.smoke else load_gsm8k(asked.data)
    rows: list[dict[str, object]] = []
    worth: dict[str, EstimatePairs] = {}
    for loss in dict.fromkeys(each.value for each in asked.loss):
        name = _name(loss, asked)
        said: list[tuple[AlignEstimate, AlignEstimate]] = []
        for seed in range(asked.seeds):
            result = _align(name, loss, seed, asked, target, place, problems)
            said.append((result.mat[0], result.mat[-1]))
        worth[name] = said
        rows.append(make_loss_row(name, result.curve[-1].tokens, said, next(iter(worth.values()))))
    text = json.dumps(rows, indent=1) + "\n"
    files.write_listed(asked.out / TABLE, text)
    if len(worth) > 1:
        draw_alignment(worth, asked.out / DRAWN)
    output.rows(rows)


def _check_combination(asked: DraftOptions) -> None:
    """Raise UsageError for options that do not go together."""
    if not asked.temperature > 0:
        raise UsageError(
            f"--temperature is {asked.temperature:g}, and must be above 0", "--temperature 1"
        )
    for option, given in (("--draft", asked.draft), ("--pretrain", asked.pretrain)):
        if asked.layers and given:
            raise UsageError(
                f"{option} and --layers: a draft begins as a model, or as layers of the target",
                "leave one of them out",
            )
    if asked.begin and not asked.layers:
        raise UsageError("--begin is of a draft that is made of the target", "--layers 2")


def _name(loss: str, asked: DraftOptions) -> str:
    """Return the folder name of the drafts of a loss."""
    samples = asked.teacher_samples
    name = loss if samples == "target" else f"{loss}-{samples}"
    return name + ("-sorted" if asked.exits else "")


def _align(
    name: str,
    loss: str,
    seed: int,
    asked: DraftOptions,
    target: Checkpoint,
    place: torch.device,
    problems: list[Chat],
) -> AlignResult:
    """Align one draft by a loss, and write its training curve."""
    from specbench_cli.training.align import make_alignment

    folder = asked.out / f"seed-{seed}"
    files.refuse_link(folder)
    with shared.bars() as report:
        trainer = _trainer(folder, seed, asked, target, place, problems, report)
        plan = make_alignment(
            name, loss, asked.teacher_samples, asked.temperature, asked.steps, trainer.length
        )
        (plan,) = shared.recipes(
            (plan,), asked.steps_scale, asked.smoke, folder, asked.resume, asked.tokens
        )
        result = trainer.align(plan)
    shared.finish({name: result}, folder)
    return result


def _trainer(
    folder: Path,
    seed: int,
    asked: DraftOptions,
    target: Checkpoint,
    place: torch.device,
    problems: list[Chat],
    report: shared.Bars,
) -> Aligner:
    """Return the trainer of the drafts of a seed."""
    from specbench_cli.models import resolve
    from specbench_cli.training.align import Aligner
    from specbench_cli.training.heads.trainer import N_REPLIES

    own = asked.draft or target.draft
    trainer = Aligner(
        folder,
        target.path,
        problems,
        seed,
        place,
        n_replies=asked.replies or N_REPLIES,
        report=report,
        progress=report.count,
        label=target.label,
        template=target.template,
        draft=None if own is None else lambda: resolve(own).path,
        pretrain=min(asked.pretrain, 2) if asked.smoke else asked.pretrain,
        exits=tuple(asked.exits),
        layers=asked.layers or 0,
        begin=asked.begin or "first",
        vocabulary=asked.vocabulary,
    )
    return trainer.for_smoke_test() if asked.smoke else trainer
