"""`specbench train replies`, `head` and a command a kind: draft heads for a target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config import options
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.config.train import HeadOptions, MethodHeadOptions, RepliesOptions
    from specbench_cli.training.heads.trainer import HeadResult, HeadTrainer, Kind, Progress
    from specbench_cli.training.loop import Report, Schedule


SAY_EVERY = 60
"""Seconds between two words on replies in the making."""


def trainer_for(
    asked: HeadOptions | RepliesOptions, report: Report, counts: Progress, keeps: str = "eagle"
) -> HeadTrainer:
    """Return the trainer of heads for a target.

    Args:
        asked: options of the command.
        report: called with each point of a training.
        counts: called with the number of replies so far.
        keeps: kind of head. The trainer keeps the target's hidden states that this kind reads.
    """
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.heads.trainer import N_REPLIES, HeadTrainer

    found, place = resolve(asked.target), shared.device(asked.device)
    trainer = HeadTrainer(
        asked.out,
        found.path,
        [] if asked.smoke else load_gsm8k(asked.data),
        asked.seed,
        place,
        n_replies=asked.replies or N_REPLIES,
        report=report,
        counts=counts,
        label=found.label,
        template=found.template,
        source=None if Path(asked.target).exists() else found.label,
        draft=None if (draft := found.draft) is None else lambda: resolve(draft).path,
        keeps=keeps,
    )
    return trainer.smoke() if asked.smoke else trainer


@options.parsed_command("specbench_cli.config.train:RepliesOptions")
def replies(asked: RepliesOptions) -> None:
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

    trainer = trainer_for(asked, lambda _name, _point: None, progress, asked.head)
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


def _trains(name: str, what: str, more: str) -> Callable[[], None]:
    """Return the command that trains the head of a kind."""
    model = "PaperHeadOptions" if name == "space" else "HeadOptions"

    def command(asked: HeadOptions) -> None:
        with shared.bars() as report:
            trainer = trainer_for(asked, report, report.count, name)
            kind = kind_named(name)
            train_head(trainer, kind, trainer.schedule(kind), asked)

    command.__name__ = name
    command.__doc__ = f"""Train {what}, for a target (embedded-{name}).

        The target answers questions like those of training first, which OUT/training keeps;
        {more}
        """
    return options.parsed_command(f"specbench_cli.config.train:{model}")(command)


def train_head(
    trainer: HeadTrainer, kind: Kind, schedule: Schedule, asked: HeadOptions
) -> HeadResult:
    """Train the head of a kind by a schedule, at the scale that the options ask for."""
    (scaled,) = shared.recipes(
        (schedule,),
        asked.steps_scale,
        asked.smoke,
        asked.out,
        asked.resume,
        asked.tokens,
        asked.sequences,
        asked.lr,
    )
    result = trainer.train_kind(kind, scaled, asked.loss)
    shared.finish({scaled.name: result}, asked.out)
    output.note(
        f"{scaled.name}: {result.curve[-1].tokens:,} tokens in {result.seconds:.0f} s;"
        f" {result.parameters:,} parameters; MAT {result.mat[-1].mat:.2f} as a chain on held-out"
        " replies"
    )
    return result


COMMANDS = tuple(_trains(name, *said) for name, said in KINDS.items())


def kind_named(name: str) -> Kind:
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


@options.parsed_command("specbench_cli.config.train:MethodHeadOptions")
def stateless(asked: MethodHeadOptions) -> None:
    """Train the head that a method drafts with: a plug-in's, or any registered one's.

    OUT gets a folder named after its kind, for --set METHOD.head=FOLDER. Each level of a head
    without a state (a FeatureHead) learns the target's distribution at its place, on the target's
    own replies; otherwise as [bold]specbench train eagle[/bold].
    Example: docs/tutorials/add-a-head.md.
    """
    from specbench_cli import registry

    names = [name for file in asked.plugins for name in registry.load_plugin(file)]
    if asked.method is None and len(names) != 1:
        which = f"which of {', '.join(names)}?" if names else "the head of which method?"
        raise UsageError(which, "specbench train head METHOD [--plugin FILE]")
    kind = kind_named(asked.method or names[0])
    with shared.bars() as report:
        trainer = trainer_for(asked, report, report.count)
        train_head(trainer, kind, trainer.schedule(kind, ours=False), asked)
