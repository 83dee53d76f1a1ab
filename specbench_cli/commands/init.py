"""`specbench init`: a config file to begin with, and the schema of config files."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from specbench_cli import output
from specbench_cli.commands import OUTPUT, run
from specbench_cli.config.sources import BLOCKS, option
from specbench_cli.errors import UsageError

FILE = Path("specbench.yaml")
EXAMPLES = (
    "specbench init",
    "specbench init nightly.yaml",
    "specbench init --schema > specbench.schema.json",
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))
HEAD = """\
# Settings of `specbench run` in this folder. A line is an option's name and its value; an option on
# the command line and a variable SPECBENCH_NAME override it. What is commented out is as it stands.
methods: [sps, pld]
tasks: [mini]
limit: 12
"""
_WIDTH = 96


def init(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The file; specbench.yaml is read without being named."
        ),
    ] = FILE,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema", help="Print the JSON schema of such files instead.", rich_help_panel=OUTPUT
        ),
    ] = False,
) -> None:
    """Write a commented config file with every setting; an existing one is left alone."""
    if schema:
        from specbench_cli.config.schema import schema as schema_of

        about = {name: param.help for name, param in _settings().items()}
        output.data(json.dumps(schema_of(about), indent=2))
        return
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(_text())
    except FileExistsError as fault:
        raise UsageError(
            f"{file} is there already", "specbench init OTHER.yaml, or remove it"
        ) from fault
    except OSError as error:
        raise UsageError(f"cannot write to {file}: {error.strerror}") from error
    output.note(f"{file}: specbench run{'' if file == FILE else f' --config {file}'} reads it")


def _settings() -> dict[str, Any]:
    """The options of `specbench run` that a file may hold, by their key."""
    from specbench_cli.config.run import RunConfig

    app = typer.Typer()
    app.command()(run.run)
    by_option = {name: param for param in get_command(app).params for name in param.opts}
    return {name: by_option[option(name)] for name in RunConfig.model_fields}


def _text() -> str:
    """The file: each panel of the help, each setting with what it means and its default."""
    lines = [HEAD]
    for panel in run.PANELS:
        lines.append(f"# {panel}\n")
        for name, param in _settings().items():
            if param.rich_help_panel == panel:
                usual = f" Default: {param.show_default}." if param.show_default else ""
                lines += textwrap.wrap(f"# {param.help}{usual}", _WIDTH, subsequent_indent="# ")
                lines.append(f"# {BLOCKS.get(name, f'{name}:')}\n")
    return "\n".join(lines).rstrip() + "\n"
