"""`specbench train draft`: a draft model aligned with its target, by one loss or by several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from specbench_cli import files, output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config import options
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from specbench_cli.config.train import DraftOptions
    from specbench_cli.models.resolve import Checkpoint
    from specbench_cli.training.align import Aligned, Aligner, AlignResult
    from specbench_cli.training.corpus import Chat

    Said = Sequence[tuple[Aligned, Aligned]]  # of each seed, before and after


TABLE, DRAWN = "alignment.json", "alignment.svg"
"""Files with the results of all losses."""
FIGURES = ("alpha", "mat", "mbsu")
"""What a draft is worth."""


@options.parsed_command("specbench_cli.config.train:DraftOptions")
def draft(asked: DraftOptions) -> None:
    """Align a draft model with its target: it learns to say what the target says.

    [bold]--layers 2 --vocabulary 8192[/bold] makes one for a target that has none.

    The target answers questions like those of training first, once a seed, which OUT/seed-N keeps.
    OUT gets a folder for each loss and seed, for --draft of [bold]specbench run[/bold], and
    OUT/alignment.json: acceptance and MAT before and after, on held-out questions, by loss, with
    95% intervals over seeds, also of how far a loss is over the first one.
    """
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import load_gsm8k

    shared.check_outputs(asked.out, TABLE, DRAWN)
    _check_combination(asked)
    target, place = resolve(asked.target), shared.device(asked.device)
    problems = [] if asked.smoke else load_gsm8k(asked.data)
    rows: list[dict[str, object]] = []
    worth: dict[str, Said] = {}
    for loss in dict.fromkeys(each.value for each in asked.loss):
        name = _name(loss, asked)
        said: list[tuple[Aligned, Aligned]] = []
        for seed in range(asked.seeds):
            result = _align(name, loss, seed, asked, target, place, problems)
            said.append((result.mat[0], result.mat[-1]))
        worth[name] = said
        rows.append(_row(name, result.curve[-1].tokens, said, next(iter(worth.values()))))
    text = json.dumps(rows, indent=1) + "\n"
    files.write_listed(asked.out / TABLE, text)
    if len(worth) > 1:
        _draw(worth, asked.out / DRAWN)
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
    from specbench_cli.training.align import alignment

    folder = asked.out / f"seed-{seed}"
    files.refuse_link(folder)
    with shared.bars() as report:
        trainer = _trainer(folder, seed, asked, target, place, problems, report)
        plan = alignment(
            name, loss, asked.teacher_samples, asked.temperature, asked.steps, trainer.length
        )
        (plan,) = shared.recipes(
            (plan,), asked.steps_scale, asked.smoke, folder, asked.resume, asked.tokens
        )
        result = trainer.align(plan)
    shared.finish({name: result}, folder, {name: result.mat})
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
        counts=report.count,
        label=target.label,
        template=target.template,
        draft=None if own is None else lambda: resolve(own).path,
        pretrain=min(asked.pretrain, 2) if asked.smoke else asked.pretrain,
        exits=tuple(asked.exits),
        layers=asked.layers or 0,
        begin=asked.begin or "first",
        vocabulary=asked.vocabulary,
    )
    return trainer.smoke() if asked.smoke else trainer


def _row(name: str, tokens: int, said: Said, first: Said) -> dict[str, object]:
    """A loss in the table: its mean over seeds, and how far it is over the first loss, seed by
    seed, each with its interval."""
    row: dict[str, object] = {"loss": name, "tokens": tokens, "seeds": len(said)}
    for figure in FIGURES:
        before, after, of_first = (
            [getattr(each, figure) for each in ends]
            for ends in (*zip(*said, strict=True), [ends[1] for ends in first])
        )
        row[f"{figure} before"] = round(mean(before), 4)
        over = [ours - theirs for ours, theirs in zip(after, of_first, strict=True)]
        for what, values in ((figure, after), (f"{figure} over first", over)):
            row[what] = round(mean(values), 4)
            half = _half(values)
            row[f"{what} low"] = None if half is None else round(mean(values) - half, 4)
            row[f"{what} high"] = None if half is None else round(mean(values) + half, 4)
    return row


def _half(values: Sequence[float]) -> float | None:
    """Half of the interval of a mean, by Student's t; None of one value."""
    from scipy.stats import t

    from specbench_cli.stats.bootstrap import LEVEL

    n = len(values)
    return float(t.ppf((1 + LEVEL) / 2, n - 1)) * stdev(values) / n**0.5 if n > 1 else None


def _draw(worth: Mapping[str, Said], path: Path) -> None:
    """Alpha and MAT by loss: each seed, their mean with its interval, and where they began."""
    from matplotlib.figure import Figure

    from specbench_cli.report.figures.drawing import style

    with style.defaults():
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        for axes, what in zip(figure.subplots(1, 2), FIGURES, strict=False):
            for at, said in enumerate(worth.values()):
                after = [getattr(end, what) for _, end in said]
                axes.plot([at] * len(after), after, ".", color="0.6", zorder=1)
                axes.errorbar(at + 0.2, mean(after), _half(after), fmt="o", color="C0", capsize=3)
            begun = mean(getattr(begin, what) for said in worth.values() for begin, _ in said)
            axes.axhline(begun, color="0.4", lw=0.8, ls="--", label="before")
            axes.set_xticks(range(len(worth)), list(worth), rotation=30)
            axes.set_ylabel("MAT" if what == "mat" else what)
            axes.legend(fontsize="x-small")
        shared.write_figure(figure, path)
