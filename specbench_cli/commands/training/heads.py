"""`specbench train replies`, `head`, `compare` and a command a kind: draft heads for a target."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli import files, output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training._shared import (
    Data,
    Out,
    Rate,
    Resume,
    Scale,
    Seed,
    Sequences,
    Smoke,
    Tokens,
    Where,
)
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.training.heads.trainer import HeadResult, HeadTrainer, Kind, Progress
    from specbench_cli.training.trainer import Report


SAY_EVERY = 60
"""Seconds between two words on replies in the making."""


class Loss(StrEnum):
    """What a head is trained towards."""

    TTT = "ttt"
    PAPER = "paper"


class KeptFor(StrEnum):
    """A kind of head that rows are kept for."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"


Rows = Annotated[
    KeptFor,
    typer.Option(
        "--head",
        help="Kind of head whose rows of the target are kept meanwhile.",
        rich_help_panel=shared.WHAT,
    ),
]
Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="Model that the head drafts for: a short name, a folder or a GGUF file; one of"
        " Llama's kind that answers chats.",
        rich_help_panel=shared.WHAT,
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--replies",
        help="Questions that the target answers; more of them go on from fewer.",
        metavar="N",
        min=8,
        show_default="3000",
        rich_help_panel=shared.TRAINING,
    ),
]
Towards = Annotated[
    Loss,
    typer.Option(
        help="ttt: the target's distribution over several tokens, drafted in training; paper: the"
        " loss of the publication. Schedules around a loss (Falcon's glancing) are not made.",
        rich_help_panel=shared.TRAINING,
    ),
]


def _trainer(
    out: Path,
    target: str,
    data: Path | None,
    seed: int,
    device: shared.Device,
    smoke: bool,
    count: int | None,
    report: "Report",
    counts: "Progress",
    keeps: str = KeptFor.EAGLE.value,
) -> "HeadTrainer":
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.heads.trainer import N_REPLIES, HeadTrainer

    found, place = resolve(target), shared.device(device)
    trainer = HeadTrainer(
        out,
        found.path,
        [] if smoke else load_gsm8k(data),
        seed,
        place,
        n_replies=count or N_REPLIES,
        report=report,
        counts=counts,
        label=found.label,
        template=found.template,
        source=None if Path(target).exists() else found.label,
        draft=None if (draft := found.draft) is None else lambda: resolve(draft).path,
        keeps=keeps,
    )
    return trainer.smoke() if smoke else trainer


def replies(
    out: Out,
    target: Target = "embedded",
    count: Count = None,
    head: Rows = KeptFor.EAGLE,
    seed: Seed = 0,
    smoke: Smoke = False,
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Have a target answer the questions that its heads are trained on.

    The other commands do this themselves where replies lack. Here it can be done before, or beside
    them: GSM8K's training problems, and for other targets than the embedded ones questions that the
    target asks itself (Magpie, arXiv:2406.08464). They lie in OUT/training/replies.jsonl, a line
    each as soon as it is whole, and for other targets the rows that heads read lie beside them.
    Stop it as you like: the same command goes on, and a larger --replies adds to what is there.
    """
    import time

    started, last = time.monotonic(), 0.0

    def progress(name: str, done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > SAY_EVERY or done == of:
            last = now
            output.note(f"{name}: {done} of {of} after {now - started:.0f} s")

    trainer = _trainer(
        out,
        target,
        data,
        seed,
        device,
        smoke,
        count,
        lambda _name, _point: None,
        progress,
        head.value,
    )
    chats = trainer.replies()
    said = sum(chat.weights.count(1.0) for chat in chats)
    output.note(f"{len(chats)} replies, {said} tokens of answers")


KINDS = {
    "eagle": (
        "an EAGLE-1/2 head",
        "features are computed on the fly. OUT/training_curve.json and .png say what MAT the head"
        " came to meanwhile, on questions that it is not trained on.",
    ),
    "eagle3": (
        "an EAGLE-3 head",
        "it reads three of the target's layers, and says the tokens that the target says most.",
    ),
    "mtp": ("a multi-token-prediction layer, to be drafted from", "as `train eagle`."),
    "medusa": (
        "Medusa's heads",
        "as `train eagle`. They share the target's output matrix, which the paper's have each.",
    ),
    "hydra": ("Hydra's heads, which read the tokens drafted before", "as `train medusa`."),
    "hydra++": ("Hydra++'s, which read a layer of their own too", "as `train medusa`."),
    "pard": (
        "a draft for PARD: the target's own draft model, adapted to mask tokens",
        "as `train eagle`. The draft model learns to say several tokens in one forward.",
    ),
    "p-eagle": (
        "a P-EAGLE head, which drafts all tokens at once",
        "as `train eagle3`; drafted tokens are read as masks.",
    ),
    "dflash": (
        "a DFlash head, which denoises a block of tokens at once",
        "it reads three of the target's layers.",
    ),
    "clover": ("Clover's head, which keeps a state over the tokens drafted", "as `train eagle`."),
    "hidden-transfer": (
        "Hidden Transfer's maps to pseudo states",
        "as `train eagle`, through the target's upper layers, for fewer tokens.",
    ),
    "falcon": (
        "Falcon's head, which drafts two tokens a pass",
        "as `train eagle`, for fewer; the paper's glancing is left out.",
    ),
    "chimera": ("Chimera's two encoders and heads", "as `train eagle`, for fewer tokens."),
    "space": (
        "SPACE's mask token, and fine-tune the target to answer it",
        "OUT/embedded-space is both: give it to --target, beside -m vanilla,space. The target"
        " learns by low-rank additions, towards texts alone.",
    ),
}
"""What has a command of its own: what it makes, and more to say of it."""


def _trains(name: str, what: str, more: str) -> Callable[..., None]:
    """The command that trains heads of a kind."""
    towards = Loss.PAPER if name == "space" else Loss.TTT

    def command(
        out: Out,
        target: Target = "embedded",
        loss: Towards = towards,
        count: Count = None,
        seed: Seed = 0,
        resume: Resume = True,
        steps_scale: Scale = 1.0,
        tokens: Tokens = None,
        sequences: Sequences = None,
        lr: Rate = None,
        smoke: Smoke = False,
        device: Where = shared.Device.AUTO,
        data: Data = None,
    ) -> None:
        with shared.bars() as report:
            trainer = _trainer(
                out, target, data, seed, device, smoke, count, report, report.count, name
            )
            kind = _kind(name)
            (schedule,) = shared.recipes(
                (trainer.schedule(kind),), steps_scale, smoke, out, resume, tokens, sequences, lr
            )
            _finish(out, schedule.name, trainer.train_kind(kind, schedule, loss.value))

    command.__name__ = name
    command.__doc__ = f"""Train {what}, for a target (embedded-{name}).

        The target answers questions like those of training first, which OUT/training keeps;
        {more}
        """
    return command


COMPARISON = "comparison.json"
"""File of `train compare` with the table."""
COMMANDS = tuple(_trains(name, *said) for name, said in KINDS.items())


def _kind(name: str) -> "Kind":
    """The kind of head of that name, or the one that the method of that name drafts with.

    Raises:
        UsageError: there is none, or the method has none that can be trained here.
    """
    from methods._heads.layer import LayerHead
    from methods._heads.module import heads, parallel_heads
    from specbench_cli import registry
    from specbench_cli.engine.models.head import FeatureHead

    known: dict[str, Kind] = {**heads(), **parallel_heads()}
    if name in known:
        return known[name]
    named = registry.resolve(name)
    asked = [wanted.kind for wanted in registry.build(named, {}).artifacts()]
    found: list[Kind] = [kind for kind in asked if issubclass(kind, FeatureHead)]
    found += [kind.module for kind in asked if issubclass(kind, LayerHead)]
    if len(found) != 1:
        raise UsageError(
            f"{named} asks for {len(found)} heads that are trained here (`FeatureHead`), not for"
            " one",
            "specbench train --help",
        )
    return found[0]


def _finish(out: Path, name: str, result: "HeadResult") -> None:
    """Add a head to the curves, and say what it took."""
    shared.finish({name: result}, out, {name: result.mat})
    output.note(
        f"{name}: {result.curve[-1].tokens:,} tokens in {result.seconds:.0f} s;"
        f" {result.parameters:,} parameters; MAT {result.mat[-1].mat:.2f} as a chain on held-out"
        " replies"
    )


def stateless(
    out: Out,
    method: Annotated[
        str | None,
        typer.Argument(
            metavar="METHOD",
            help="The method that drafts with it.",
            show_default="the one of --plugin",
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Python file with the method.", rich_help_panel=shared.WHAT
        ),
    ] = None,
    target: Target = "embedded",
    loss: Towards = Loss.TTT,
    count: Count = None,
    seed: Seed = 0,
    resume: Resume = True,
    steps_scale: Scale = 1.0,
    tokens: Tokens = None,
    sequences: Sequences = None,
    lr: Rate = None,
    smoke: Smoke = False,
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Train the head that a method drafts with: a plug-in's, or any registered one's.

    OUT gets a folder named after its kind, for --set METHOD.head=FOLDER. Each level of a head
    without a state (a FeatureHead) learns the target's distribution at its place, on the target's
    own replies; otherwise as [bold]specbench train eagle[/bold]. docs/heads.md has an example.
    """
    from specbench_cli import registry

    names = [name for file in plugin or () for name in registry.load_plugin(file)]
    if method is None and len(names) != 1:
        which = f"which of {', '.join(names)}?" if names else "the head of which method?"
        raise UsageError(which, "specbench train head METHOD [--plugin FILE]")
    kind = _kind(method or names[0])
    with shared.bars() as report:
        trainer = _trainer(out, target, data, seed, device, smoke, count, report, report.count)
        found = trainer.schedule(kind, ours=False)
        (schedule,) = shared.recipes(
            (found,), steps_scale, smoke, out, resume, tokens, sequences, lr
        )
        _finish(out, schedule.name, trainer.train_kind(kind, schedule, loss.value))


def compare(
    kinds: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND", help="Heads or methods that draft with one: medusa hydra ..."
        ),
    ],
    out: Out,
    target: Target = "embedded",
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Python file with further methods.", rich_help_panel=shared.WHAT
        ),
    ] = None,
    loss: Towards = Loss.TTT,
    count: Count = None,
    seed: Seed = 0,
    resume: Resume = True,
    tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Tokens that each head is trained on.",
            min=1,
            rich_help_panel=shared.TRAINING,
        ),
    ] = (2_048_000),
    smoke: Smoke = False,
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Train several heads one after another at an equal budget, and make the table.

    All learn for as many tokens, of the same replies in the same order. The table says MAT as a
    chain on held-out replies, parameters, tokens and seconds; OUT/comparison.json holds it too.
    The seconds are of this machine while nothing else ran on it, if nothing else did.
    """
    import json

    from specbench_cli import registry

    shared.check_outputs(out, COMPARISON)
    for file in plugin or ():
        registry.load_plugin(file)
    wanted = [_kind(name) for name in dict.fromkeys(kinds)]
    records = []
    for kind in wanted:
        with shared.bars() as report:
            trainer = _trainer(out, target, data, seed, device, smoke, count, report, report.count)
            found = trainer.schedule(kind)
            (schedule,) = shared.recipes((found,), 1.0, smoke, out, resume, tokens)
            result = trainer.train_kind(kind, schedule, loss.value)
        _finish(out, schedule.name, result)
        records.append(
            {
                "head": schedule.name,
                "MAT": round(result.mat[-1].mat, 3),
                "accepted": result.mat[-1].accepted,
                "parameters": result.parameters,
                "tokens": result.curve[-1].tokens,
                "seconds": round(result.seconds),
            }
        )
    text = json.dumps(records, indent=1) + "\n"
    files.write_listed(out / COMPARISON, text)
    output.rows(records)
