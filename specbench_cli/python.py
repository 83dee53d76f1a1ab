"""`import specbench_cli as sb`: runs, their figures and comparisons from Python and in notebooks.

The engine, the records, the settings and the errors are those of the command line: a setting has
the name of its option (`max_new_tokens=64`), and what is not given comes from the environment,
`./specbench.yaml`, a profile and the defaults, in the same order.
"""

from __future__ import annotations

import html
import importlib
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from specbench_cli import output, registry
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    import pandas

    from specbench_cli.comparison.outcome import Comparison
    from specbench_cli.report.reading import Reading

Named = str | os.PathLike[str]
"""A name, or a path."""

LONGEST_START_S = 3.0


def run(
    target: Named | None = None,
    *,
    methods: Named | Sequence[Any] | None = None,
    tasks: Named | Sequence[Named] | None = None,
    out: Named | None = None,
    config: Named | None = None,
    progress: bool = True,
    trust: bool = False,
    **settings: Any,
) -> Run:
    """Measure methods on prompts, as `specbench run` does; without arguments its short run.

    Args:
        target: short name, hub id, folder or GGUF file; default: the embedded target.
        methods: names; or mappings, each with `name`, `label` and `params`. Vanilla is always run.
        tasks: task names, files of questions (docs/how-to/tasks.md) or .yaml files.
        out: the run's folder, which must be new; default: one in results/runs.
        config: a YAML file with settings.
        progress: whether it is said on stderr how far the run is.
        trust: permit plug-ins that ./specbench.yaml names.
        settings: all others, by the names of a config file's keys, which are those of the options:
            `draft`, `limit` (questions), `temperature`, `seed`, `max_new_tokens` (tokens a turn),
            `timeout_per_prompt` (seconds), `set={"sps": {"length": 7}}`,
            `sweep={"sps": {"length": [3, 5, 7]}}` and the others of `specbench run --help`.

    Returns:
        The run; a wrong output, a failed cell and void times are in it, and in its `exit_code`.
        Of void times a warning is given, too.

    Raises:
        UsageError: a setting is not known or not allowed, or a plug-in or a task file is wrong.
        EnvironmentFault: this machine lacks weights, data, a device or space.
        SpecbenchError: what else the command line would have ended with.
    """
    from specbench_cli.commands._progress import RunProgress, make_progress
    from specbench_cli.commands._running import NOISE, read_settings, show_resume_command
    from specbench_cli.config import permission
    from specbench_cli.config.sources import from_call

    folder, file = (
        None if value is None else Path(_to_name(f"run(): {word}", value))
        for word, value in (("out", out), ("config", config))
    )
    registry.check_shadowing()
    named = {"target": target, "methods": methods, "tasks": tasks}
    given = {key: _plain(value) for key, value in named.items() if value is not None}
    asked, sources = read_settings(
        from_call(given | {key: _plain(value) for key, value in settings.items()}),
        file,
        permission.permit_all if trust else permission.check,
    )
    from specbench_cli.measure import run as execute
    from specbench_cli.plan.matrix import is_matrix
    from specbench_cli.report import outputs
    from specbench_cli.store.run_dir import RunDir, register_run

    if is_matrix(asked):
        raise UsageError(
            "targets and drafts stand for several runs, and a call makes one",
            "[sb.run(target) for target in TARGETS], or specbench run --targets",
        )
    with (
        warnings.catch_warnings(),
        _threads_kept(),
        make_progress(json=False, start_s=_start_s()) if progress else RunProgress() as view,
    ):
        # In a notebook without ipywidgets, on import of transformers; no bar of its is ever drawn.
        warnings.filterwarnings("ignore", message="IProgress not found")
        plan, run_dir = execute.start(asked, sources, folder, view)
        with show_resume_command(run_dir.path, view, part=False):
            result = execute.run(plan, run_dir, view, fresh=True)
            found = Run(outputs.write_outputs(RunDir.open(result.run_dir)))
    register_run(run_dir.path)
    if result.noisy:
        warnings.warn("; ".join(NOISE), stacklevel=2)
    return found


def load(run: Named = "last") -> Run:
    """Read a run that was made.

    Args:
        run: its folder; or "last", the newest one.

    Raises:
        UsageError: there is no run, or its files are damaged.
    """
    from specbench_cli.report.reading import read
    from specbench_cli.store.run_dir import RunDir, find_run

    return Run(read(RunDir.open(find_run(_to_name("load(): run", run)))))


def compare(
    base: Run | Named,
    new: Run | Named,
    *,
    tolerance: float | str | None = None,
    fail_on: str | None = None,
) -> ComparisonResult:
    """Compare two runs, method by method, as `specbench compare` does.

    Args:
        base: a run, or what names one on the command line: its folder, "last", a folder of several
            runs of one program, a baseline's file or name.
        new: the same.
        tolerance: the slowdown that is let pass: 0.05 or "5%", the default.
        fail_on: the outcomes that close the gate, with commas; default:
            "broken,changed-output,mat,slower"; or "none".

    Raises:
        UsageError: a side is no run and no baseline, or they have nothing in common.
    """
    from specbench_cli.comparison.compare import compare as put_together
    from specbench_cli.comparison.outcome import parse_fail_on, parse_tolerance
    from specbench_cli.comparison.reading import load_side
    from specbench_cli.config.commands import CompareOptions

    base, new = (
        str(each.path) if isinstance(each, Run) else _to_name(f"compare(): {word}", each)
        for word, each in (("base", base), ("new", new))
    )
    usual = CompareOptions()
    found = put_together(
        load_side(base),
        load_side(new),
        tolerance=parse_tolerance(str(usual.tolerance if tolerance is None else tolerance)),
        fail_on=parse_fail_on(usual.fail_on if fail_on is None else fail_on),
    )
    return ComparisonResult(found)


def methods() -> pandas.DataFrame:
    """All methods: a row each, by name, with what it needs, guarantees and is about."""
    import pandas

    from specbench_cli.commands._card import brief

    return pandas.DataFrame(map(brief, registry.entries())).set_index("name")


class Run:
    """A run that was made: its records and its figures. Made by `run` and `load`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __str__(self) -> str:
        """The table of a terminal."""
        from specbench_cli.report.terminal.table import run_text

        return run_text(self._reading.summary, self._reading.facts)

    def _repr_html_(self) -> str:
        from specbench_cli.report.html.page import brief

        return brief(self._reading)

    @property
    def path(self) -> Path:
        """Its folder."""
        return self._reading.run.path

    @property
    def manifest(self) -> dict[str, Any]:
        """Settings with their sources, models, versions, machine; results/README.md says more."""
        return self._reading.run.manifest

    @cached_property
    def df(self) -> pandas.DataFrame:
        """A row a record, which is a method's output on a turn of a prompt in a pass.

        The columns of `records.parquet`: times `ns_*` in nanoseconds, a list an entry for steps and
        forwards, parameters and counts of a method's own as JSON text.
        """
        from specbench_cli.store.export import to_frame

        return to_frame(self._reading.run.records())

    @cached_property
    def summary(self) -> pandas.DataFrame:
        """A row a method, by label: lossless ones first, best first.

        `speedup` is a ratio over vanilla with its 95% interval, `speedup_low` and `speedup_high`;
        rows that share one of the `letters` do not differ significantly. Other columns: the figures
        of `summary.csv` (docs/reference/metrics.md).
        """
        from specbench_cli.summary.summary import ALL

        rows = self._rows()
        return rows[rows["family"] == ALL].drop(columns="family").set_index("label")

    @cached_property
    def families(self) -> pandas.DataFrame:
        """The same by task family: a row a family and method."""
        from specbench_cli.summary.summary import ALL

        rows = self._rows()
        return rows[rows["family"] != ALL].set_index(["family", "label"])

    @property
    def exit_code(self) -> ExitCode:
        """What `specbench run` ends with: OK, BAD_ANSWER, or ENVIRONMENT where times are
        void or a method could not run here."""
        from specbench_cli.measure.result import exit_code

        return exit_code(self._reading.records, self.manifest)

    def show(self) -> None:
        """Show the report: in a notebook the whole page, elsewhere the table."""
        if _in_notebook():
            _display({"text/html": self._page(), "text/plain": str(self)})
        else:
            output.data(str(self))

    def _rows(self) -> pandas.DataFrame:
        import pandas

        from specbench_cli.report.export import row_dicts
        from specbench_cli.summary.metrics import NULLABLE_NUMBERS

        rows = pandas.DataFrame(row_dicts(self._reading.summary))
        return rows.astype(dict.fromkeys(NULLABLE_NUMBERS, float))

    def _page(self) -> str:
        """The report in a frame of its own, which keeps its style and script from the notebook."""
        from specbench_cli.report.html.page import write_html

        with TemporaryDirectory() as folder:
            (file,) = write_html(self._reading, Path(folder))
            page = file.read_text(encoding="utf-8")
        return (
            '<div><iframe sandbox="allow-scripts" style="width: 100%; height: 80vh; border: 0"'
            f' srcdoc="{html.escape(page)}"></iframe></div>'
        )


class ComparisonResult:
    """What changed from one run to another. Made by `compare`."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._comparison.base!r}, {self._comparison.new!r})"

    def __str__(self) -> str:
        """The verdict in a line."""
        from specbench_cli.comparison.pages.words import headline

        return output.plain(headline(self._comparison))

    def _repr_markdown_(self) -> str:
        from specbench_cli.comparison.pages.markdown import render

        return render(self._comparison)

    @property
    def passed(self) -> bool:
        """Whether nothing closes the gate."""
        return not self._comparison.failed_rows

    @cached_property
    def df(self) -> pandas.DataFrame:
        """A row a task and method: `outcome`, whether it `fails` the gate, what was `found`, MAT on
        both sides, and `decode_ratio`, NEW's decode time over BASE's (above 1: slower), with its
        simultaneous interval, `decode_low` and `decode_high`."""
        import pandas

        from specbench_cli.comparison.pages.columns import flat_row

        rows = [flat_row(row, self._comparison) for row in self._comparison.rows]
        found = pandas.DataFrame(rows).set_index(["task", "method"])
        return found.assign(fails=found["fails"] == "yes")

    def show(self) -> None:
        """Show what changed: rendered in a notebook, elsewhere as the command prints it."""
        from specbench_cli.comparison.pages import text

        if _in_notebook():
            _display({"text/markdown": self._repr_markdown_(), "text/plain": str(self)})
        else:
            text.print_comparison(self._comparison)


def _start_s() -> float:
    """About as much processor time as a program's start takes: this process' own, of which the rest
    was for other things if it is an old one."""
    return min(time.process_time(), LONGEST_START_S)


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Leave torch with the number of threads that it had, which is the next run's default."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _to_name(what: str, value: Named) -> str:
    """A name, or a path's text. Raises UsageError: it is neither."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise UsageError(f"{what} must be a name or a path, got {value!r}", "help(specbench_cli.run)")


def _plain(value: Any) -> Any:
    """A setting with paths as texts."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs this, which shows what is displayed."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _display(forms: dict[str, str]) -> None:
    importlib.import_module("IPython.display").display(forms, raw=True)
