"""Options and arguments of commands other than `run`, `recommend`, `predict` and `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from specbench_cli.config.options import ARGUMENTS, OUTPUT, OVERWRITE, Option, option_fields

Form = Literal["table", "tsv", "json"]
"""Output format of tables."""


class CommandOptions(BaseModel):
    """Base class for the options and arguments of a command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def changed_flags(self, *names: str) -> list[str]:
        """Return the command-line options, among these fields, whose values differ from their
        defaults.
        """
        found = {each.name: each for each in option_fields(type(self))}
        return [
            found[name].flag
            for name in names
            if (value := getattr(self, name)) and value != found[name].field.default
        ]


CONTENT = "What to show"


class ReportOptions(CommandOptions):
    """Options of `specbench report`."""

    runs: Annotated[
        list[str],
        Option(
            ARGUMENTS,
            "RUN",
            "Run folders, or `last`. Several runs make one report. Instead of runs, answer files of"
            " Spec-Bench (.jsonl) are possible; vanilla's file comes first.",
        ),
    ]
    also: Annotated[
        str | None,
        Option(
            CONTENT,
            "spec-bench",
            "Add metrics as the benchmark Spec-Bench computes them (arXiv:2401.07851). With --to,"
            " also write files in its answer format.",
        ),
    ] = None
    force: Annotated[
        bool, Option(CONTENT, None, "Report runs together even if they are not comparable.")
    ] = False
    explain: Annotated[
        bool, Option(CONTENT, None, "Print all notes below the table, not only the short ones.")
    ] = False
    prompt: Annotated[
        str | None,
        Option(CONTENT, "ID", "Show the outputs for one prompt, next to vanilla's."),
    ] = None
    method: Annotated[
        str | None,
        Option(CONTENT, "NAME", "With --prompt: methods to show.", default="all", short="-m"),
    ] = None
    to: Annotated[
        str | None,
        Option(
            OUTPUT,
            "FORMATS",
            "Write files instead: md, html, latex, csv, json, separated by commas.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            OUTPUT,
            "DIR",
            "Output folder of --to.",
            default="report/ in the run's folder",
            short="-o",
        ),
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False
    form: Annotated[
        Form,
        Option(
            OUTPUT,
            "table|tsv|json",
            "Output format. json prints one object per row.",
            name="--format",
        ),
    ] = "table"
    as_json: Annotated[
        bool,
        Option(
            OUTPUT,
            None,
            "Same as --format json. With --prompt: print the comparison as JSON.",
            name="--json",
        ),
    ] = False

    @property
    def output_format(self) -> Form:
        """Output format of tables."""
        return "json" if self.as_json else self.form


GATE = "Gate"
BASELINES = "Baselines and trends"


class CompareOptions(CommandOptions):
    """Options of `specbench compare`."""

    sides: Annotated[
        list[str],
        Option(
            ARGUMENTS,
            "BASE NEW",
            "Two runs to compare: run folders, `last`, folders with several runs of one command,"
            " or baselines. With"
            " --save or --over-time: any number of runs.",
        ),
    ] = []
    tolerance: Annotated[
        str, Option(GATE, "X", "Largest slowdown that passes, e.g. 5% or 0.05.")
    ] = "5%"
    # This is a copy of comparison.outcome.FAIL_ON. Importing that module here would slow down
    # `--help`.
    fail_on: Annotated[
        str,
        Option(
            GATE,
            "OUTCOMES",
            "Outcomes that fail the comparison (exit code 1), separated by commas, or none. broken:"
            " an output that failed or was wrong only in NEW. changed-output: other tokens. mat:"
            " the same tokens with other counters. slower, faster: significantly, and by more than"
            " --tolerance. missing: a method only in BASE. new: a method only in NEW.",
        ),
    ] = "broken,changed-output,mat,slower"
    save: Annotated[
        str | None,
        Option(
            BASELINES,
            "NAME",
            "Save runs as baseline NAME of this machine, in results/baselines.",
        ),
    ] = None
    over_time: Annotated[
        bool,
        Option(
            BASELINES,
            None,
            "Show how the metrics changed over the given runs (default: all runs).",
        ),
    ] = False
    to: Annotated[
        str | None,
        Option(
            OUTPUT,
            "FORMATS",
            "Documents instead of a table: markdown, junit, json (indented), separated by"
            " commas. One document is printed, or written to --out. Several need --out.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            OUTPUT,
            "PATH",
            "Output file for one format, folder for several.",
            default="stdout",
            short="-o",
        ),
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False
    form: Annotated[
        Form,
        Option(
            OUTPUT,
            "table|tsv|json",
            "Format of the printed result, without --to. json is one line.",
            name="--format",
        ),
    ] = "table"
    as_json: Annotated[bool, Option(OUTPUT, None, "Same as --format json.", name="--json")] = False

    @property
    def output_format(self) -> Form:
        """Output format of tables."""
        return "json" if self.as_json else self.form


AUDIT = "What to audit"


class AuditOptions(CommandOptions):
    """Options of `specbench audit`."""

    methods: Annotated[list[str], Option(ARGUMENTS, "METHOD", "Methods to audit.")] = []
    every: Annotated[bool, Option(AUDIT, None, "Audit every registered method.", name="--all")] = (
        False
    )
    plugins: Annotated[
        list[str],
        Option(
            AUDIT, "FILE", "Load methods from a Python file. Without METHOD: audit all of them."
        ),
    ] = []
    out: Annotated[
        Path | None,
        Option(
            OUTPUT,
            "DIR",
            "Folder for the certificates (JSON).",
            default="results/certificates",
            short="-o",
        ),
    ] = None
    resume: Annotated[
        bool,
        Option(
            AUDIT,
            None,
            "Skip methods whose certificate in --out was made with the current code.",
        ),
    ] = False
    overwrite: Annotated[bool, OVERWRITE] = False
    as_json: Annotated[
        bool, Option(OUTPUT, None, "Print certificates as JSON lines.", name="--json")
    ] = False


class ListOptions(CommandOptions):
    """Options of `specbench list`."""

    kind: Annotated[
        Literal["methods", "tasks", "models", "runs", "shapes", "hardware"],
        Option(
            ARGUMENTS,
            "KIND",
            "What to list: methods, tasks, models, runs, or the shapes and hardware that `specbench"
            " predict` knows.",
        ),
    ]
    name: Annotated[str | None, Option(ARGUMENTS, "NAME", "Show this one in full.")] = None
    as_json: Annotated[
        bool, Option(OUTPUT, None, "Print JSON lines with all fields.", name="--json")
    ] = False
    markdown: Annotated[bool, Option(OUTPUT, None, "With methods: print a Markdown table.")] = False
    families: Annotated[bool, Option(OUTPUT, None, "With methods: print names by family.")] = False


EXPORT = "What to write"


class ExportOptions(CommandOptions):
    """Options of `specbench export`."""

    run: Annotated[str, Option(ARGUMENTS, "RUN", "Run folder, or `last`.")]
    inspect: Annotated[
        bool, Option(EXPORT, None, "Write Inspect AI logs, one per task and method.")
    ] = False
    lm_eval: Annotated[
        bool,
        Option(EXPORT, None, "Write lm-evaluation-harness results and samples."),
    ] = False
    wandb: Annotated[
        bool,
        Option(EXPORT, None, "Log results to Weights & Biases (offline), one run per method."),
    ] = False
    mlflow: Annotated[bool, Option(EXPORT, None, "Log results to MLflow, one run per method.")] = (
        False
    )
    out: Annotated[
        Path | None,
        Option(OUTPUT, "DIR", "Output folder.", default="export/ in the run's folder", short="-o"),
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False


class PublishOptions(CommandOptions):
    """Options of `specbench publish`."""

    runs: Annotated[
        list[str],
        Option(ARGUMENTS, "RUN", "Run folders, names from `specbench list runs`, or `last`."),
    ]
    to: Annotated[Path, Option(OUTPUT, "DIR", "Gallery folder. Created if it does not exist.")]
    overwrite: Annotated[
        bool,
        Option(
            OUTPUT,
            None,
            "Overwrite gallery files that were changed or not written by specbench.",
        ),
    ] = False
    as_json: Annotated[
        bool, Option(OUTPUT, None, "Print one JSON object per run.", name="--json")
    ] = False


class InitOptions(CommandOptions):
    """Options of `specbench init`."""

    file: Annotated[
        Path,
        Option(ARGUMENTS, "FILE", "Config file to create."),
    ] = Path("specbench.yaml")
    as_schema: Annotated[
        bool,
        Option(OUTPUT, None, "Print the JSON schema of config files instead.", name="--schema"),
    ] = False


class NewMethodOptions(CommandOptions):
    """Options of `specbench new-method`."""

    name: Annotated[str, Option(ARGUMENTS, "NAME", "Name of the new method.")]
    kind: Annotated[
        Literal["lookup", "draft", "head", "tree", "batch"],
        Option(
            OUTPUT,
            "lookup|draft|head|tree|batch",
            "Skeleton: lookup (drafts from earlier text), draft (a chain from a draft model), head"
            " (a trained head), tree (a tree from a draft model), batch (drafts for a batch of"
            " sequences together).",
        ),
    ] = "lookup"
    out: Annotated[Path, Option(OUTPUT, "DIR", "Folder for the two files.")] = Path()


class DoctorOptions(CommandOptions):
    """Options of `specbench doctor`."""

    as_json: Annotated[bool, Option(OUTPUT, None, "Print one JSON object.", name="--json")] = False
