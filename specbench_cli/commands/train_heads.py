"""`specbench train eagle`, `eagle3`, `mtp` and `head`: draft heads for a finished target."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli.commands import _training as shared
from specbench_cli.commands._training import Data, Out, Resume, Scale, Seed, Smoke, Where
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.training.corpus import Chat


class Loss(StrEnum):
    """What a head is trained towards."""

    TTT = "ttt"
    PAPER = "paper"


Target = Annotated[
    str, typer.Option(help="Model that the head drafts for: a Llama folder with the family's chat.")
]
Towards = Annotated[
    Loss,
    typer.Option(
        help="ttt: the target's distribution over several tokens, drafted in training; paper: as "
        "the method was published."
    ),
]


def _trains(kind: str, help_text: str) -> Callable[..., None]:
    """The command that trains heads of a kind."""

    def command(
        out: Out,
        target: Target = "embedded",
        loss: Towards = Loss.TTT,
        seed: Seed = 0,
        resume: Resume = True,
        steps_scale: Scale = 1.0,
        smoke: Smoke = False,
        device: Where = shared.Device.AUTO,
        data: Data = None,
    ) -> None:
        from specbench_cli.models import resolve
        from specbench_cli.training.corpus import load_gsm8k
        from specbench_cli.training.head_family import SCHEDULES
        from specbench_cli.training.head_trainer import HeadTrainer

        (recipe,) = shared.recipes((SCHEDULES[kind],), steps_scale, smoke, out, resume)
        folder, place = resolve(target).path, shared.device(device)
        problems: Sequence[Chat] = [] if smoke else load_gsm8k(data)
        with shared.bars() as report:
            trainer = HeadTrainer(out, folder, problems, seed, place, report=report)
            result = (trainer.smoke() if smoke else trainer).train(recipe, loss.value)
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
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import load_gsm8k
    from specbench_cli.training.head_family import schedule_of
    from specbench_cli.training.head_trainer import HeadTrainer

    name = registry.resolve(method or names[0])
    asked = [wanted.kind for wanted in registry.build(name, {}).artifacts()]
    kinds = [kind for kind in asked if issubclass(kind, FeatureHead)]
    if len(kinds) != 1:
        raise UsageError(
            f"{name} asks for {len(kinds)} heads without a state (`FeatureHead`), not for one",
            "specbench train --help",
        )
    (schedule,) = shared.recipes((schedule_of(kinds[0]),), steps_scale, smoke, out, resume)
    folder, place = resolve(target).path, shared.device(device)
    problems: Sequence[Chat] = [] if smoke else load_gsm8k(data)
    with shared.bars() as report:
        trainer = HeadTrainer(out, folder, problems, seed, place, report=report)
        trainer = trainer.smoke() if smoke else trainer
        result = trainer.train_stateless(kinds[0], schedule)
        shared.finish({schedule.name: result}, out, {schedule.name: result.mat})
