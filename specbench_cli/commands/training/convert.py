"""`specbench train convert`: convert a head's pickled weights to safetensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.config.train import ConvertOptions


@parsed_command("specbench_cli.config.train:ConvertOptions")
def convert(options: ConvertOptions) -> None:
    """Convert a head to safetensors from a pickle (pytorch_model.bin), as some were published."""
    if not options.unpickle:
        raise UsageError(
            f"{options.folder}: a pickle is only read with --unpickle",
            f"specbench train convert {options.folder} --out {options.out} --unpickle",
        )
    from specbench_cli.training.convert import convert as converted

    output.data(str(converted(options.folder, options.out)))
