"""`specbench init`: a config file to begin with, and the schema of config files."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.config import options
from specbench_cli.config.options import PANELS, settings
from specbench_cli.config.sources import BLOCKS
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.config.commands import InitOptions

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


@options.parsed_command("specbench_cli.config.commands:InitOptions")
def init(asked: InitOptions) -> None:
    """Write a commented config file with every setting; an existing one is left alone."""
    if asked.as_schema:
        from specbench_cli.config.schema import schema as schema_of

        output.data(json.dumps(schema_of(), indent=2))
        return
    file = asked.file
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


def _text() -> str:
    """Return the text of the config file: all settings, with help and default, by help panel."""
    from specbench_cli.config.run import RunConfig

    lines, found = [HEAD], [*settings(RunConfig)]
    for panel in PANELS:
        lines.append(f"# {panel}\n")
        for each in found:
            if each.option.panel == panel:
                about = f"# {each.option.help} Default: {each.default}."
                lines += textwrap.wrap(about, _WIDTH, subsequent_indent="# ")
                lines.append(f"# {BLOCKS.get(each.name, f'{each.name}:')}\n")
    return "\n".join(lines).rstrip() + "\n"
