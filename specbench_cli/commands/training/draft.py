"""`specbench train draft`: align a draft model with its target by distillation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import files, output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from specbench_cli.config.train import DraftOptions
    from specbench_cli.models.resolve import Checkpoint
    from specbench_cli.training.align import Aligner, AlignEstimate, AlignResult, EstimatePairs
    from specbench_cli.training.corpus import Chat


TABLE, DRAWN = "alignment.json", "alignment.svg"
"""File names of the results of all losses: a table and a figure."""


@parsed_command("specbench_cli.config.train:DraftOptions")
def draft(options: DraftOptions) -> None:
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

    shared.check_outputs(options.out, TABLE, DRAWN)
    _check_combination(options)
    target, place = resolve(options.target), shared.choose_device(options.device)
    problems = [] if options.smoke else load_gsm8k(options.data)
    rows: list[dict[str, object]] = []
    results: dict[str, EstimatePairs] = {}
    for loss in dict.fromkeys(each.value for each in options.loss):
        name = _name(loss, options)
        pairs: list[tuple[AlignEstimate, AlignEstimate]] = []
        for seed in range(options.seeds):
            result = _align(name, loss, seed, options, target, place, problems)
            pairs.append((result.mat[0], result.mat[-1]))
        results[name] = pairs
        rows.append(
            make_loss_row(name, result.curve[-1].tokens, pairs, next(iter(results.values())))
        )
    text = json.dumps(rows, indent=1) + "\n"
    files.write_listed(options.out / TABLE, text)
    if len(results) > 1:
        draw_alignment(results, options.out / DRAWN)
    output.rows(rows)


def _check_combination(options: DraftOptions) -> None:
    """Raise UsageError for options that are invalid or cannot be combined."""
    if not options.temperature > 0:
        raise UsageError(
            f"--temperature must be above 0, got {options.temperature:g}", "--temperature 1"
        )
    for option, given in (("--draft", options.draft), ("--pretrain", options.pretrain)):
        if options.layers and given:
            raise UsageError(
                f"{option} and --layers cannot be combined: both choose the initial draft model",
                "omit one of them",
            )
    if options.begin and not options.layers:
        raise UsageError("--begin needs --layers", "--layers 2")


def _name(loss: str, options: DraftOptions) -> str:
    """Return the name of the folder for draft models that are trained with this loss."""
    samples = options.teacher_samples
    name = loss if samples == "target" else f"{loss}-{samples}"
    return name + ("-sorted" if options.exits else "")


def _align(
    name: str,
    loss: str,
    seed: int,
    options: DraftOptions,
    target: Checkpoint,
    place: torch.device,
    problems: list[Chat],
) -> AlignResult:
    """Train one draft model with one loss, and write its training curve."""
    from specbench_cli.training.align import make_alignment

    folder = options.out / f"seed-{seed}"
    files.check_no_link(folder)
    with shared.show_bars() as report:
        trainer = _trainer(folder, seed, options, target, place, problems, report)
        plan = make_alignment(
            name, loss, options.teacher_samples, options.temperature, options.steps, trainer.length
        )
        (plan,) = shared.prepare_recipes(
            (plan,), options.steps_scale, options.smoke, folder, options.resume, options.tokens
        )
        result = trainer.align(plan)
    shared.finish({name: result}, folder)
    return result


def _trainer(
    folder: Path,
    seed: int,
    options: DraftOptions,
    target: Checkpoint,
    place: torch.device,
    problems: list[Chat],
    report: shared.Bars,
) -> Aligner:
    """Return the trainer of the draft models with one random seed."""
    from specbench_cli.models import resolve
    from specbench_cli.training.align import Aligner
    from specbench_cli.training.heads.trainer import N_REPLIES

    own = options.draft or target.draft
    trainer = Aligner(
        folder,
        target.path,
        problems,
        seed,
        place,
        n_replies=options.replies or N_REPLIES,
        report=report,
        progress=report.count,
        label=target.label,
        template=target.template,
        draft=None if own is None else lambda: resolve(own).path,
        pretrain=min(options.pretrain, 2) if options.smoke else options.pretrain,
        exits=tuple(options.exits),
        layers=options.layers or 0,
        begin=options.begin or "first",
        vocabulary=options.vocabulary,
    )
    return trainer.for_smoke_test() if options.smoke else trainer
