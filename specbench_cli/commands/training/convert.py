"""`specbench train convert`: a head's pickled weights to safetensors."""

from pathlib import Path
from typing import Annotated

import typer

from specbench_cli import output
from specbench_cli.commands import OUTPUT
from specbench_cli.errors import UsageError

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder with pytorch_model.bin and config.json.")
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="DIR", help="Folder for model.safetensors and config.json.", rich_help_panel=OUTPUT
    ),
]
Unpickle = Annotated[
    bool,
    typer.Option(
        "--unpickle",
        help="Read the pickle; its tensors alone, running no code of it.",
        rich_help_panel=OUTPUT,
    ),
]


def convert(folder: Folder, out: Out, unpickle: Unpickle = False) -> None:
    """Convert a head that was published as a pickle; everything else here reads safetensors."""
    if not unpickle:
        raise UsageError(
            f"{folder}: a pickle is only read where --unpickle says so",
            f"specbench train convert {folder} --out {out} --unpickle",
        )
    from specbench_cli.training.convert import convert as converted

    output.data(str(converted(folder, out)))
