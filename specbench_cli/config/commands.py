"""Options and arguments of the commands that have no run settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from specbench_cli.config.options import ARGUMENTS, OUTPUT, OVERWRITE, Option, settings

Form = Literal["table", "tsv", "json"]
"""How tables are printed."""


class CommandOptions(BaseModel):
    """Options and arguments of one call of a command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def given(self, *names: str) -> list[str]:
        """Return the flags of the named fields that differ from their defaults."""
        found = {each.name: each for each in settings(type(self))}
        return [
            found[name].flag
            for name in names
            if (value := getattr(self, name)) and value != found[name].field.default
        ]


SHOWN = "What to show"


class ReportOptions(CommandOptions):
    """Options of `specbench report`."""

    runs: Annotated[
        list[str],
        Option(
            ARGUMENTS,
            "RUN",
            "Folders of runs, or `last`; several become one report; or the folder of runs of"
            " several targets. Or answer files of Spec-Bench (.jsonl), vanilla's first.",
        ),
    ]
    also: Annotated[
        str | None,
        Option(
            SHOWN,
            "spec-bench",
            "Also the figures by Spec-Bench's formulas; with --to, its answer files too.",
        ),
    ] = None
    force: Annotated[
        bool, Option(SHOWN, None, "Put runs side by side that do not belong together.")
    ] = False
    explain: Annotated[
        bool, Option(SHOWN, None, "Print all notes below the table, not only the short ones.")
    ] = False
    prompt: Annotated[
        str | None,
        Option(SHOWN, "ID", "Show outputs on this prompt beside vanilla's instead."),
    ] = None
    method: Annotated[
        str | None,
        Option(SHOWN, "M", "With --prompt: of these rows.", default="all", short="-m"),
    ] = None
    to: Annotated[
        str | None,
        Option(
            OUTPUT,
            "FORMATS",
            "Write files instead: md, html, latex, csv, json; separate by commas.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(OUTPUT, "DIR", "Their folder.", default="report/ in the first run's", short="-o"),
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False
    form: Annotated[
        Form,
        Option(OUTPUT, None, "How the tables are printed; json: an object a row.", name="--format"),
    ] = "table"
    as_json: Annotated[
        bool,
        Option(
            OUTPUT,
            None,
            "Short for --format json; with --prompt: a comparison.",
            name="--json",
        ),
    ] = False

    @property
    def printed(self) -> Form:
        """How tables are printed."""
        return "json" if self.as_json else self.form


GATED = "Gate"
BASELINES = "Baselines and trends"


class CompareOptions(CommandOptions):
    """Options of `specbench compare`."""

    sides: Annotated[
        list[str],
        Option(
            ARGUMENTS,
            "BASE NEW",
            "Runs, `last`, folders of several runs of one program, baseline files, or names of"
            " baselines. With --save or --over-time: RUN...",
        ),
    ] = []
    tolerance: Annotated[str, Option(GATED, "5%|0.05", "Slowdown that is let pass.")] = "5%"
    # FAIL_ON of compare.outcome, which is not imported for a page of help.
    fail_on: Annotated[
        str,
        Option(
            GATED,
            "OUTCOMES",
            "What closes the gate: some of broken, changed-output, mat, slower, missing,"
            " faster, new; or none.",
        ),
    ] = "broken,changed-output,mat,slower"
    save: Annotated[
        str | None,
        Option(
            BASELINES,
            "NAME",
            "Keep RUN... as this machine's baseline NAME in results/baselines.",
        ),
    ] = None
    over_time: Annotated[
        bool,
        Option(
            BASELINES,
            None,
            "How figures went over RUN..., default all runs, and where they changed.",
        ),
    ] = False
    to: Annotated[
        str | None,
        Option(OUTPUT, "FORMATS", "Instead of a table: markdown, junit, json; separate by commas."),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            OUTPUT,
            "PATH",
            "A file for one format, a folder for several.",
            default="stdout",
            short="-o",
        ),
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False
    form: Annotated[
        Form, Option(OUTPUT, None, "How it is printed; json: one document.", name="--format")
    ] = "table"
    as_json: Annotated[bool, Option(OUTPUT, None, "Short for --format json.", name="--json")] = (
        False
    )

    @property
    def printed(self) -> Form:
        """How tables are printed."""
        return "json" if self.as_json else self.form


AUDITED = "What to audit"


class AuditOptions(CommandOptions):
    """Options of `specbench audit`."""

    methods: Annotated[list[str], Option(ARGUMENTS, "METHOD", "Methods.")] = []
    every: Annotated[bool, Option(AUDITED, None, "Every registered method.", name="--all")] = False
    plugins: Annotated[
        list[str], Option(AUDITED, "FILE", "Python file with methods; alone, all of them.")
    ] = []
    out: Annotated[
        Path | None,
        Option(
            OUTPUT,
            "DIR",
            "Where each certificate goes as JSON; reports look into the default.",
            default="results/certificates",
            short="-o",
        ),
    ] = None
    resume: Annotated[
        bool,
        Option(
            AUDITED,
            None,
            "Keep the certificates in --out that were made with the same code; audit the other"
            " methods.",
        ),
    ] = False
    overwrite: Annotated[bool, OVERWRITE] = False
    as_json: Annotated[bool, Option(OUTPUT, None, "Certificates as JSON lines.", name="--json")] = (
        False
    )


class ListOptions(CommandOptions):
    """Options of `specbench list`."""

    kind: Annotated[
        Literal["methods", "tasks", "models", "runs", "shapes", "hardware"],
        Option(ARGUMENTS, "KIND", "What to list."),
    ]
    name: Annotated[str | None, Option(ARGUMENTS, "NAME", "One of them, in full.")] = None
    as_json: Annotated[
        bool, Option(OUTPUT, None, "JSON lines, with every fact.", name="--json")
    ] = False
    markdown: Annotated[bool, Option(OUTPUT, None, "Methods as a Markdown table.")] = False
    families: Annotated[
        bool, Option(OUTPUT, None, "Method names by family, as in docs/reference/methods.md.")
    ] = False


WRITTEN = "What to write"


class ExportOptions(CommandOptions):
    """Options of `specbench export`."""

    run: Annotated[str, Option(ARGUMENTS, "RUN", "A run's folder, or `last`.")]
    inspect: Annotated[
        bool, Option(WRITTEN, None, "Logs for Inspect AI's viewer: one a task and row.")
    ] = False
    lm_eval: Annotated[
        bool,
        Option(WRITTEN, None, "Results and samples as lm-evaluation-harness logs them: by row."),
    ] = False
    wandb: Annotated[
        bool, Option(WRITTEN, None, "Figures for Weights & Biases, offline: a run a row.")
    ] = False
    mlflow: Annotated[
        bool, Option(WRITTEN, None, "Figures for MLflow, or its server: a run a row.")
    ] = False
    out: Annotated[
        Path | None,
        Option(OUTPUT, "DIR", "The folder.", default="export/ in the run's", short="-o"),
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False


class PublishOptions(CommandOptions):
    """Options of `specbench publish`."""

    runs: Annotated[
        list[str],
        Option(
            ARGUMENTS, "RUN...", "A run's folder, its name in `specbench list runs`, or `last`."
        ),
    ]
    to: Annotated[Path, Option(OUTPUT, "DIR", "The gallery's folder; made if need be.")]
    overwrite: Annotated[
        bool,
        Option(
            OUTPUT,
            None,
            "Replace pages of --to that specbench did not write, or that were changed since.",
        ),
    ] = False
    as_json: Annotated[bool, Option(OUTPUT, None, "A JSON object a run.", name="--json")] = False


class InitOptions(CommandOptions):
    """Options of `specbench init`."""

    file: Annotated[
        Path,
        Option(ARGUMENTS, "FILE", "The file; specbench.yaml is read without being named."),
    ] = Path("specbench.yaml")
    as_schema: Annotated[
        bool,
        Option(OUTPUT, None, "Print the JSON schema of such files instead.", name="--schema"),
    ] = False


class DoctorOptions(CommandOptions):
    """Options of `specbench doctor`."""

    as_json: Annotated[
        bool, Option(OUTPUT, None, "One JSON object, without paths.", name="--json")
    ] = False
