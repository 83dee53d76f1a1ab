"""`specbench train replies`, `eagle`, `eagle3`, `mtp` and `head`: draft heads for a target."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli import output
from specbench_cli.commands import _training as shared
from specbench_cli.commands._training import Data, Out, Resume, Scale, Seed, Smoke, Where
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.training.head_trainer import HeadTrainer
    from specbench_cli.training.trainer import Report


SAY_EVERY = 60
"""Seconds between two words on replies in the making."""


class Loss(StrEnum):
    """What a head is trained towards."""

    TTT = "ttt"
    PAPER = "paper"


class Kind(StrEnum):
    """A kind of head."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"


Rows = Annotated[
    Kind,
    typer.Option("--head", help="Kind of head whose rows of the target are kept meanwhile."),
]
Target = Annotated[
    str,
    typer.Option(
        help="Model that the head drafts for: a short name, a folder or a GGUF file; one of"
        " Llama's kind that answers chats."
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--replies",
        help="Questions that the target answers; more of them go on from fewer. Default: 3,000.",
        min=8,
        show_default=False,
    ),
]
Towards = Annotated[
    Loss,
    typer.Option(
        help="ttt: the target's distribution over several tokens, drafted in training; paper: as "
        "the method was published."
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
    keeps: str = "eagle",
    report: "Report" = lambda _name, _point: None,
) -> "HeadTrainer":
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.head_trainer import N_REPLIES, HeadTrainer

    found, place = resolve(target), shared.device(device)
    trainer = HeadTrainer(
        out,
        found.path,
        [] if smoke else load_gsm8k(data),
        seed,
        place,
        n_replies=count or N_REPLIES,
        report=report,
        label=found.label,
        template=found.template,
        keeps=keeps,
    )
    return trainer.smoke() if smoke else trainer


def replies(
    out: Out,
    target: Target = "embedded",
    count: Count = None,
    head: Rows = Kind.EAGLE,
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

    trainer = _trainer(out, target, data, seed, device, smoke, count, head.value)
    chats = trainer.replies(progress)
    said = sum(chat.weights.count(1.0) for chat in chats)
    output.note(f"{len(chats)} replies, {said} tokens of answers")


def _trains(kind: str, help_text: str) -> Callable[..., None]:
    """The command that trains heads of a kind."""

    def command(
        out: Out,
        target: Target = "embedded",
        loss: Towards = Loss.TTT,
        count: Count = None,
        seed: Seed = 0,
        resume: Resume = True,
        steps_scale: Scale = 1.0,
        smoke: Smoke = False,
        device: Where = shared.Device.AUTO,
        data: Data = None,
    ) -> None:
        from specbench_cli.training.head_family import SCHEDULES

        with shared.bars() as report:
            trainer = _trainer(out, target, data, seed, device, smoke, count, kind, report)
            schedule = SCHEDULES[kind] if trainer.of_family else trainer.schedule(kind)
            (recipe,) = shared.recipes((schedule,), steps_scale, smoke, out, resume)
            result = trainer.train(recipe, loss.value)
            shared.finish({recipe.name: result}, out, {recipe.name: result.mat})

    command.__name__, command.__doc__ = kind, help_text
    return command


COMMANDS = (
    _trains(
        "eagle",
        """Train an EAGLE-1/2 head for a target (embedded-eagle).

        The target answers questions like those of training first, which OUT/training keeps;
        features are computed on the fly. OUT/training_curve.json says what MAT the head came to
        meanwhile, on questions that it is not trained on.
        """,
    ),
    _trains(
        "eagle3",
        """Train an EAGLE-3 head for a target (embedded-eagle3).

        It reads three of the target's layers, and says the tokens that the target says most.
        Otherwise as [bold]specbench train eagle[/bold].
        """,
    ),
    _trains(
        "mtp",
        """Train a multi-token-prediction layer for a target (embedded-mtp), to be drafted from.

        Otherwise as [bold]specbench train eagle[/bold].
        """,
    ),
)


def stateless(
    out: Out,
    plugin: Annotated[list[str], typer.Option(metavar="FILE", help="Python file with the method.")],
    method: Annotated[
        str | None,
        typer.Argument(help="Its name, where the file holds several.", show_default=False),
    ] = None,
    target: Target = "embedded",
    count: Count = None,
    seed: Seed = 0,
    resume: Resume = True,
    steps_scale: Scale = 1.0,
    smoke: Smoke = False,
    device: Where = shared.Device.AUTO,
    data: Data = None,
) -> None:
    """Train the head without a state (a FeatureHead) that a plug-in's method asks for.

    OUT gets a folder named after its kind, for --set METHOD.head=FOLDER. Each level learns the
    target's distribution at its place, on the target's own replies; otherwise as
    [bold]specbench train eagle[/bold]. docs/heads.md has an example.
    """
    from specbench_cli import registry

    names = [name for file in plugin for name in registry.load_plugin(file)]
    if method is None and len(names) != 1:
        raise UsageError(
            f"which of {', '.join(names)}?", "specbench train head METHOD --plugin ..."
        )
    from specbench_cli.engine.models.head import FeatureHead
    from specbench_cli.training.head_family import schedule_of

    name = registry.resolve(method or names[0])
    asked = [wanted.kind for wanted in registry.build(name, {}).artifacts()]
    kinds = [kind for kind in asked if issubclass(kind, FeatureHead)]
    if len(kinds) != 1:
        raise UsageError(
            f"{name} asks for {len(kinds)} heads without a state (`FeatureHead`), not for one",
            "specbench train --help",
        )
    with shared.bars() as report:
        trainer = _trainer(out, target, data, seed, device, smoke, count, report=report)
        schedule = schedule_of(kinds[0], of_family=trainer.of_family)
        (schedule,) = shared.recipes((schedule,), steps_scale, smoke, out, resume)
        result = trainer.train_stateless(kinds[0], schedule)
        shared.finish({schedule.name: result}, out, {schedule.name: result.mat})
