"""`specbench init`: create a commented config file, or print the schema of config files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from specbench_cli.config.commands import InitOptions

EXAMPLES = (
    "specbench init",
    "specbench init nightly.yaml",
    "specbench init --schema > specbench.schema.json",
)
EPILOG = "\n\n".join(("Examples:", *EXAMPLES))


@parsed_command("specbench_cli.config.commands:InitOptions")
def init(options: InitOptions) -> None:
    """Create a commented config file with all settings. Existing files are not overwritten."""
    from specbench_cli.config.schema import make_commented_file, make_schema

    if options.as_schema:
        output.data(json.dumps(make_schema(), indent=2))
        return
    file = options.file
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(make_commented_file())
    except FileExistsError as fault:
        raise UsageError(
            f"{file} exists already", "specbench init OTHER.yaml, or remove the file"
        ) from fault
    except OSError as error:
        raise UsageError(f"cannot write to {file}: {error.strerror}") from error
    option = f" --config {file}" if options.changed_flags("file") else ""
    output.note(f"{file} created; specbench run{option} reads it")
