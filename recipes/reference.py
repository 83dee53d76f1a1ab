"""Generator of the pages in docs/reference: options, configuration, records and metrics.

Run it with `python -m recipes.reference`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

from typer.models import CommandInfo

from specbench_cli import app, registry
from specbench_cli.commands._card import catalogue_row, describe_entry, family_rows
from specbench_cli.config.options import (
    ARGUMENTS,
    OptionField,
    command_option_fields,
    option_fields,
)
from specbench_cli.config.profile import PROFILES
from specbench_cli.config.run import RunConfig
from specbench_cli.config.sources import PARAM_FIELDS, variable_name
from specbench_cli.report.markdown_table import inline, table
from specbench_cli.store import schema
from specbench_cli.summary.metrics import METRICS

FOLDER = Path(__file__).parents[1] / "docs/reference"
GENERATED = "`python -m recipes.reference` generates this page from `%s`."
CLI = f"""\
# Commands and options

For everyone who writes a command line or a script: after reading you know every command, argument \
and option, with its values, its default and its other names.

{GENERATED % "specbench_cli/config"} An option of `specbench run` can also be set by its \
environment variable and by its key in a config file: see [Configuration](config.md)."""
CONFIG = f"""\
# Configuration

For everyone who keeps the settings of a run in a file or in the environment: after reading you \
can write `specbench.yaml` and know which source takes precedence.

{GENERATED % "specbench_cli/config/run.py"}

Every option of `specbench run` can also be a key of a YAML file or an environment variable. If \
several sources set an option, the first of these takes precedence:

1. the command line: options and `--set METHOD.PARAMETER=VALUE`
2. an environment variable `SPECBENCH_*`
3. the file of `--config FILE`
4. `specbench.yaml` in the working folder
5. the profile of `--profile NAME`
6. the default

The manifest of a run stores each value with its source. `specbench init` writes a file with all \
keys as comments, and `specbench init --schema` prints a JSON schema for editors.

```yaml
# specbench.yaml
methods: [sps, {{name: sps, label: sps-7, params: {{length: 7}}}}, pld]
tasks: [mini]
max_new_tokens: 64
set: {{pld: {{ngram: 2}}}}
sweep: {{sps: {{length: 1:6:1}}}}
```

A method that is measured twice needs labels, as `sps-7` here.

## Keys"""
LIMITS = """\
## Limits

A run, and a table of several runs, has at most 128 methods, because all pairs are compared. A \
sweep has at most 64 values. Labels, names of models and tasks, and `--out` must not contain line \
breaks or control characters. A config file has at most 1 MB, a grammar 10 MB, a trace of arrivals \
64 MB."""
RECORDS = f"""\
# Records

For everyone who reads `records.jsonl` with a program: after reading you know each field, its type \
and when it is null.

{GENERATED % "specbench_cli/store/schema.py"}

`records.jsonl` has one record per line. A record is the output of one method for one prompt (a \
turn of a question) in one repeat of the run. No two records of a run have the same `prompt_id`, \
`turn`, `label` and `pass`. `records.parquet` has the same fields in columns. \
[Files of a run](../../results/README.md) describes the other files.

1 + sum(`steps.committed`) = `n_tokens` = length of `output_ids`. `ns.total` = `prefill` + \
`decode` + `learn`, and `decode` = `draft` + `verify` + `host`. Methods of other programs (`hf:*`, \
`engine:*`) leave fields null that they cannot report."""
METRICS_HEAD = f"""\
# Metrics

For everyone who reads `summary.csv`, `--to json` or `run.summary` in Python: after reading you \
know the meaning and the unit of every column.

{GENERATED % "specbench_cli/summary/metrics.py"}

Each metric is computed per method, over all prompts and over each task family. The columns are in \
this order. Tables show some of them under these headings."""
VARIABLES = {
    "SPECBENCH_CACHE": "Folder for downloaded data, converted models and measured costs."
    " Default: ~/.cache/specbench.",
    "SPECBENCH_DATA": "Folder with files of tasks, which is searched before the cache.",
    "SPECBENCH_DEBUG": "1 prints the traceback of an error.",
    "SPECBENCH_LINEAR": "Kernel of matrix products on a CPU, in place of the fastest one.",
    "SPECBENCH_WORKER_TIMEOUT": "Seconds to wait for an answer of a draft worker. Default: 30.",
}
"""Environment variables that do not set an option of `specbench run`."""
COLUMNS = ("option", "value", "default", "meaning")
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
EXAMPLE = re.compile(r"^specbench .+$|(?<=\[bold\])specbench [^\[]+", re.MULTILINE)
"""A command in the text below the options of a help page."""
LARGEST = 2**63
"""Upper bound of all integers in a record. The pages do not show it."""


class Command(NamedTuple):
    """A command with its name on the command line, such as "specbench list methods"."""

    words: str
    info: CommandInfo

    @property
    def settings(self) -> list[OptionField]:
        """Options and arguments of the command."""
        return command_option_fields(self.info.callback) if self.info.callback is not None else []


def pages() -> dict[str, str]:
    """Return the text of all generated pages, by file name."""
    return {
        "cli.md": cli_page(),
        "config.md": config_page(),
        "records.md": records_page(),
        "metrics.md": metrics_page(),
        "methods.md": methods_page(),
    }


def methods_page() -> str:
    """Return the page of methods with new tables. The text between the tables is kept."""
    page = (FOLDER / "methods.md").read_text(encoding="utf-8")
    described = [catalogue_row(describe_entry(name)) for name in registry.built_in_methods()]
    for marker, rows in (("families", family_rows()), ("methods", described)):
        lines = table(list(rows[0]), [[*row.values()] for row in rows], escaped=True)
        before, after = page.split(f"<!-- {marker} -->\n")
        _, _, text = after.partition("\n\n")
        page = f"{before}<!-- {marker} -->\n{lines}\n\n{text}"
    return page


def config_page() -> str:
    """Return the page that lists all config keys, profiles and environment variables."""
    found = [each for each in option_fields(RunConfig) if not each.option.hidden]
    parts = [CONFIG]
    for panel in dict.fromkeys(each.option.panel for each in found):
        rows = [
            (
                f"`{each.name}`",
                _values(each),
                f"`{each.default}`",
                "" if each.name in PARAM_FIELDS else f"`{variable_name(each.name)}`",
                each.option.help,
            )
            for each in found
            if each.option.panel == panel
        ]
        columns = ("key", "value", "default", "environment variable", "meaning")
        parts += [f"**{panel}**", table(columns, rows, escaped=True)]
    profiles = [(f"`{name}`", about) for name, about in PROFILES.items()]
    variables = [(f"`{name}`", about) for name, about in VARIABLES.items()]
    parts += ["## Profiles", table(("profile", "settings"), profiles, escaped=True)]
    parts += ["## Other environment variables"]
    parts += [table(("variable", "meaning"), variables, escaped=True), LIMITS]
    return "\n\n".join(parts) + "\n"


def records_page() -> str:
    """Return the page that describes the fields of a record, and of the objects inside a record."""
    parts = [RECORDS, "## Record", _fields(schema.Record)]
    for kind in RECORD_PARTS:
        summary = " ".join((inspect.getdoc(kind) or "").split("\n\nAttributes:")[0].split())
        parts += [f"## {kind.__name__}", summary, _fields(kind)]
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Return the page that describes all metrics, in the order of their declaration."""
    rows = (
        (f"`{name}`", inline(each.heading), inline(each.unit), inline(each.meaning))
        for name, each in METRICS.items()
    )
    found = table(("name", "heading", "unit", "meaning"), rows, escaped=True)
    return f"{METRICS_HEAD}\n\n{found}\n"


RECORD_PARTS = (
    schema.Params,
    schema.Steps,
    schema.DraftedTokens,
    schema.Trace,
    schema.ForwardKind,
    schema.Ns,
    schema.Verdict,
    schema.Likelihood,
    schema.BatchMembership,
)
"""Classes of the objects in a record."""
ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
"""A field with its meaning, in the section Attributes of a docstring."""


def _fields(kind: type) -> str:
    """Return a table of a dataclass's fields. Their meanings come from the docstring of the
    class.
    """
    documented = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    meanings = {name: " ".join(text.split()) for name, text in ATTRIBUTE.findall(documented)}
    rows = [
        (f"`{field.name.rstrip('_')}`", f"`{_type(str(field.type))}`", meanings[field.name])
        for field in dataclasses.fields(kind)
    ]
    return table(("field", "type", "meaning"), rows, escaped=True)


def _type(annotation: str) -> str:
    """Return the type of a field as a reader of JSON sees it, without minimum and maximum."""
    plain = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", annotation)
    for name, kind in TYPES.items():
        plain = re.sub(rf"\b{name}\b", kind, plain)
    return plain.replace("None", "null")


TYPES = {
    **dict.fromkeys(("Count", "Integer"), "int"),
    **dict.fromkeys(("Finite", "LogProb", "Share"), "float"),
    **dict.fromkeys(("Name", "Reason", "Family"), "str"),
}


def cli_page() -> str:
    """Return the page of all command-line options. Commands with the same options share a table."""
    sections = [CLI]
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
    """Return the section of the page for commands that have the same options."""
    names = [f"`{command.words}`" for command in commands]
    heading = " to ".join((names[0], names[-1])) if len(names) > 2 else ", ".join(names)
    abouts = [_summary(command) for command in commands]
    if len(commands) > 1:
        abouts = [f"- {name}: {about}" for name, about in zip(names, abouts, strict=True)]
    parts = (f"## {heading}", "\n".join(abouts), _examples(commands), _tables(commands[0].settings))
    return "\n\n".join(filter(None, parts))


def _examples(commands: list[Command]) -> str:
    """Return a code block with the examples from the help of some commands."""
    found = [line for each in commands for line in EXAMPLE.findall(each.info.epilog or "")]
    return "\n".join(("```bash", *dict.fromkeys(found), "```")) if found else ""


def _summary(command: Command) -> str:
    """Return the first paragraph of the help of a command."""
    return " ".join((inspect.getdoc(command.info.callback) or "").split("\n\n")[0].split())


def _tables(found: list[OptionField]) -> str:
    """Return tables of options, one table for each panel of the help."""
    visible = [each for each in found if not each.option.hidden]
    parts = []
    for panel in dict.fromkeys(each.option.panel for each in visible):
        rows = [_row(each) for each in visible if each.option.panel == panel]
        parts += [f"**{panel}**", table(COLUMNS, rows, escaped=True)]
    return "\n\n".join(parts)


def _row(setting: OptionField) -> tuple[str, str, str, str]:
    """Return the table cells of one option."""
    option, field = setting.option, setting.field
    names = setting.flags if option.panel != ARGUMENTS else [setting.flag]
    default = "required" if field.is_required() and option.default is None else setting.default
    about = f"{option.help} {_other_names(setting)}".strip()
    return ", ".join(f"`{name}`" for name in names), _values(setting), f"`{default}`", about


def _values(setting: OptionField) -> str:
    """Return the allowed values of an option: its placeholder or its choices, and its bounds."""
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


def _other_names(setting: OptionField) -> str:
    """Return the environment variable and the config key of an option."""
    if setting.option.env is not None:
        return f"Environment: `{setting.option.env}`."
    if RunConfig.model_fields.get(setting.name) is not setting.field:
        return ""
    if setting.name in PARAM_FIELDS:
        return f"Key: `{setting.name}`."
    return f"Key: `{setting.name}`; environment: `{variable_name(setting.name)}`."


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
