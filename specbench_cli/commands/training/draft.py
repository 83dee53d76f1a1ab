"""`specbench train draft`: a draft model aligned with its target, by one loss or by several."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli import files, output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training._shared import Data, Out, Resume, Scale, Smoke, Tokens, Where
from specbench_cli.commands.training.heads import Count
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.training.align import Aligned

    Said = Sequence[tuple[Aligned, Aligned]]  # of each seed, before and after


BEGIN = "first"
"""As which layers of the target a draft begins, unless asked otherwise."""
TABLE, DRAWN = "alignment.json", "alignment.svg"
"""Files with the results of all losses."""
FIGURES = ("alpha", "mat", "mbsu")
"""What a draft is worth."""


class Loss(StrEnum):
    """What a draft is aligned by."""

    CE = "ce"
    KL = "kl"
    REVERSE_KL = "reverse-kl"
    JSD = "jsd"
    TVD = "tvd"
    TVD_PLUS = "tvd++"
    LK = "lk"


class Begin(StrEnum):
    """As which of the target's layers a new draft's begin."""

    FIRST = "first"
    LAST = "last"
    ENDS = "ends"


class Samples(StrEnum):
    """Whose replies a draft reads."""

    TARGET = "target"
    OWN = "own"
    MIXED = "mixed"


def draft(
    out: Out,
    target: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model that the draft is to agree with: a short name, a folder or a GGUF file; one"
            " of Llama's kind that answers chats.",
            rich_help_panel=shared.WHAT,
        ),
    ] = "embedded",
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model that the draft begins as; it has the target's vocabulary.",
            show_default="the target's own",
            rich_help_panel=shared.WHAT,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Make a new draft: so many layers of the target, its embeddings and its output.",
            show_default="--draft",
            rich_help_panel=shared.WHAT,
        ),
    ] = None,
    begin: Annotated[
        Begin | None,
        typer.Option(
            help="Which of the target's layers those are to begin with: the first, the last, or"
            " half of each.",
            show_default=BEGIN,
            rich_help_panel=shared.WHAT,
        ),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Cut the draft's output to the N tokens that the target answers with most.",
            show_default="all",
            rich_help_panel=shared.WHAT,
        ),
    ] = None,
    loss: Annotated[
        list[Loss],
        typer.Option(
            metavar="LOSS",
            help=f"By what it is aligned: {', '.join(Loss)}; given several times, each makes a"
            " draft, and they are compared.",
            rich_help_panel=shared.TRAINING,
        ),
    ] = [Loss.KL],  # noqa: B006 (typer reads it, and copies)
    teacher_samples: Annotated[
        Samples,
        typer.Option(
            help="Whose replies it reads: the target's, its own (new ones every 100 updates), or"
            " both in turn.",
            rich_help_panel=shared.TRAINING,
        ),
    ] = Samples.TARGET,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T",
            help="At which both distributions are taken.",
            rich_help_panel=shared.TRAINING,
        ),
    ] = 1.0,
    pretrain: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Updates on text first, from random weights of the draft's shape, once a seed; 0:"
            " it begins with its own weights. For the embedded models alone.",
            rich_help_panel=shared.TRAINING,
        ),
    ] = 0,
    exits: Annotated[
        list[int] | None,
        typer.Option(
            "--sorted",
            metavar="N",
            min=1,
            help="Its first N layers learn to draft by themselves too, for s2d; may be repeated.",
            show_default="the whole draft alone",
            rich_help_panel=shared.TRAINING,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Updates, of 2,048 tokens each.",
            rich_help_panel=shared.TRAINING,
        ),
    ] = 400,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Drafts of each loss, each with data of its own: seeds 0 to N - 1.",
            rich_help_panel=shared.TRAINING,
        ),
    ] = 1,
    count: Count = None,
    resume: Resume = True,
    steps_scale: Scale = 1.0,
    tokens: Tokens = None,
    smoke: Smoke = False,
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Align a draft model with its target: it learns to say what the target says.

    [bold]--layers 2 --vocabulary 8192[/bold] makes one for a target that has none.

    The target answers questions like those of training first, once a seed, which OUT/seed-N keeps.
    OUT gets a folder for each loss and seed, for --draft of [bold]specbench run[/bold], and
    OUT/alignment.json: acceptance and MAT before and after, on held-out questions, by loss, with
    95% intervals over seeds, also of how far a loss is over the first one.
    """
    from specbench_cli.models import resolve
    from specbench_cli.training.align import Aligner, alignment
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.heads.trainer import N_REPLIES

    shared.check_outputs(out, TABLE, DRAWN)
    if not temperature > 0:
        raise UsageError(
            f"--temperature is {temperature:g}, and must be above 0", "--temperature 1"
        )
    for option, given in (("--draft", draft), ("--pretrain", pretrain)):
        if layers and given:
            raise UsageError(
                f"{option} and --layers: a draft begins as a model, or as layers of the target",
                "leave one of them out",
            )
    if begin and not layers:
        raise UsageError("--begin is of a draft that is made of the target", "--layers 2")
    found, place = resolve(target), shared.device(device)
    own = draft or found.draft
    problems = [] if smoke else load_gsm8k(data)
    rows: list[dict[str, object]] = []
    worth: dict[str, Said] = {}
    for each in dict.fromkeys(loss):
        said: list[tuple[Aligned, Aligned]] = []
        for seed in range(seeds):
            with shared.bars() as report:
                folder = out / f"seed-{seed}"
                files.refuse_link(folder)
                trainer = Aligner(
                    folder,
                    found.path,
                    problems,
                    seed,
                    place,
                    n_replies=count or N_REPLIES,
                    report=report,
                    counts=report.count,
                    label=found.label,
                    template=found.template,
                    draft=None if own is None else lambda: resolve(own).path,
                    pretrain=min(pretrain, 2) if smoke else pretrain,
                    exits=tuple(exits or ()),
                    layers=layers or 0,
                    begin=(begin or Begin(BEGIN)).value,
                    vocabulary=vocabulary,
                )
                trainer = trainer.smoke() if smoke else trainer
                name = each.value if teacher_samples == "target" else f"{each}-{teacher_samples}"
                name += "-sorted" if exits else ""
                plan = alignment(
                    name, each.value, teacher_samples.value, temperature, steps, trainer.length
                )
                (plan,) = shared.recipes((plan,), steps_scale, smoke, folder, resume, tokens)
                result = trainer.align(plan)
            shared.finish({name: result}, folder, {name: result.mat})
            before, after = result.mat[0], result.mat[-1]
            said.append((before, after))
        worth[name] = said
        rows.append(_row(name, result.curve[-1].tokens, said, next(iter(worth.values()))))
    text = json.dumps(rows, indent=1) + "\n"
    files.write_listed(out / TABLE, text)
    if len(worth) > 1:
        _draw(worth, out / DRAWN)
    output.rows(rows)


def _row(name: str, tokens: int, said: "Said", first: "Said") -> dict[str, object]:
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


def _draw(worth: Mapping[str, "Said"], path: Path) -> None:
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
