"""Reference page of all options, generated from the config models: docs/reference/cli.md.

python -m recipes.options > docs/reference/cli.md
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Literal, NamedTuple, get_args, get_origin

from typer.models import CommandInfo

from specbench_cli import app
from specbench_cli.config.options import ARGUMENTS, Setting, settings_of
from specbench_cli.config.run import RunConfig
from specbench_cli.config.sources import BLOCKS, variable
from specbench_cli.report.markdown_table import table

HEAD = """\
# Options: every command, argument and option

For everyone who writes a command line, a config file or a script: each option with its values, \
its default and its other names.

`python -m recipes.options > docs/reference/cli.md` generates this page from the config models in \
`specbench_cli/config`. An option of a run can also be set by its environment variable, and by its \
key in `specbench.yaml` (`specbench init` writes one with comments). Precedence: option, `--set`, \
environment, `--config` file, `./specbench.yaml`, profile, default."""
COLUMNS = ("option", "value", "default", "meaning")
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
EXAMPLE = re.compile(r"^specbench .+$|(?<=\[bold\])specbench [^\[]+", re.MULTILINE)
"""A command in the text below the options of a help page."""
LARGEST = 2**63
"""The bound of all whole numbers of a run, which the page leaves out."""


class Command(NamedTuple):
    """A command with the words that name it."""

    words: str
    info: CommandInfo

    @property
    def settings(self) -> list[Setting]:
        """Options and arguments of the command."""
        return settings_of(self.info.callback) if self.info.callback is not None else []


def page() -> str:
    """Return the reference page in Markdown. Commands that have the same options share a table."""
    sections = [HEAD]
    for _, same in groupby(_commands(), key=lambda command: _tables(command.settings)):
        sections.append(_section(list(same)))
    return "\n\n".join(sections) + "\n"


def _commands() -> Iterator[Command]:
    """Yield all commands, in the order of the help."""
    for info in app.app.registered_commands:
        yield Command(f"specbench {info.name}", info)
    for group in app.app.registered_groups:
        for info in group.typer_instance.registered_commands if group.typer_instance else ():
            yield Command(f"specbench {group.name} {info.name}", info)


def _section(commands: list[Command]) -> str:
    """Return the section of commands that have the same options."""
    names = [f"`{command.words}`" for command in commands]
    heading = " to ".join((names[0], names[-1])) if len(names) > 2 else ", ".join(names)
    abouts = [_summary(command) for command in commands]
    if len(commands) > 1:
        abouts = [f"- {name}: {about}" for name, about in zip(names, abouts, strict=True)]
    parts = (f"## {heading}", "\n".join(abouts), _examples(commands), _tables(commands[0].settings))
    return "\n\n".join(filter(None, parts))


def _examples(commands: list[Command]) -> str:
    """Return the examples in the help of commands as a code block."""
    found = [line for each in commands for line in EXAMPLE.findall(each.info.epilog or "")]
    return "\n".join(("```bash", *dict.fromkeys(found), "```")) if found else ""


def _summary(command: Command) -> str:
    """Return the first paragraph of the help of a command."""
    return " ".join((inspect.getdoc(command.info.callback) or "").split("\n\n")[0].split())


def _tables(found: list[Setting]) -> str:
    """Return the options of a command, as one table per help panel."""
    visible = [each for each in found if not each.option.hidden]
    parts = []
    for panel in dict.fromkeys(each.option.panel for each in visible):
        rows = [_row(each) for each in visible if each.option.panel == panel]
        parts += [f"**{panel}**", table(COLUMNS, rows, escaped=True)]
    return "\n\n".join(parts)


def _row(setting: Setting) -> tuple[str, str, str, str]:
    """Return the cells of an option."""
    option, field = setting.option, setting.field
    names = setting.flags if option.panel != ARGUMENTS else [setting.flag]
    default = "required" if field.is_required() and option.default is None else setting.default
    about = f"{option.help} {_other_names(setting)}".strip()
    return ", ".join(f"`{name}`" for name in names), _values(setting), f"`{default}`", about


def _values(setting: Setting) -> str:
    """Return the placeholder of a value, or the words to choose from, and its bounds."""
    option, kind = setting.option, setting.field.annotation
    choices = option.choices or next(
        (get_args(each) for each in (kind, *get_args(kind)) if get_origin(each) is Literal), ()
    )
    if kind is bool:
        return "switch"
    if choices:
        return ", ".join(f"`{word}`" for word in choices)
    bounds = [
        f"{word} {bound:g}"
        for each in setting.field.metadata
        for name, word in BOUNDS.items()
        if (bound := getattr(each, name, None)) is not None and bound != LARGEST
    ]
    placeholder = f"`{option.metavar}`" if option.panel != ARGUMENTS else ""
    return ", ".join(filter(None, (placeholder, *bounds)))


def _other_names(setting: Setting) -> str:
    """Return the environment variable and the config key of an option."""
    if setting.option.env is not None:
        return f"Environment: `{setting.option.env}`."
    if RunConfig.model_fields.get(setting.name) is not setting.field:
        return ""
    if setting.name in BLOCKS:
        return f"Key: `{setting.name}`."
    return f"Key: `{setting.name}`; environment: `{variable(setting.name)}`."


if __name__ == "__main__":
    sys.stdout.write(page())
