"""Python API, `import specbench_cli as sb`: runs, results and comparisons in scripts and notebooks.

Settings, results and errors are the same as on the command line. A setting has the name of its
option, e.g. `max_new_tokens=64`. The value of a missing setting comes from the environment,
`./specbench.yaml`, a profile or the defaults, in this order.
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
    from specbench_cli.report.report_data import ReportData

Named = str | os.PathLike[str]
"""A name or a path."""

MAX_START_S = 3.0


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
    """Measure methods on prompts, like `specbench run`. Without arguments, run a short benchmark.

    Args:
        target: Short name, Hugging Face id, folder or GGUF file. Default: the embedded target.
        methods: Names, or mappings with `name`, `label` and `params`. Vanilla is always measured.
        tasks: Task names, question files (docs/how-to/tasks.md) or .yaml files.
        out: Folder of the run, which must not exist. Default: a new folder in results/runs.
        config: A YAML file with settings.
        progress: True shows progress on stderr.
        trust: Permit plug-ins that ./specbench.yaml names.
        settings: All other settings, named like the keys of a config file and the options: `draft`,
            `limit` (questions), `temperature`, `seed`, `max_new_tokens` (tokens per turn),
            `timeout_per_prompt` (seconds), `set={"sps": {"length": 7}}`, `sweep={"sps": {"length":
            [3, 5, 7]}}` and the others of `specbench run --help`.

    Returns:
        The run. Wrong outputs, failed outputs and noisy times raise no exception: the run contains
        them, and `exit_code` reports them. Noisy times also cause a warning.

    Raises:
        UsageError: A setting is unknown or not allowed, or a plug-in or a task file is invalid.
        EnvironmentFault: This machine lacks weights, data, a device or disk space.
        SpecbenchError: Any other error of the command line.
    """
    from specbench_cli.commands._progress import ProgressDisplay, make_progress
    from specbench_cli.commands._running import NOISE_ERROR, read_settings, show_resume_command
    from specbench_cli.config import permission
    from specbench_cli.config.sources import from_call

    folder, file = (
        None if value is None else Path(_to_name(f"run(): {word}", value))
        for word, value in (("out", out), ("config", config))
    )
    registry.check_shadowing()
    named = {"target": target, "methods": methods, "tasks": tasks}
    given = {key: _paths_to_text(value) for key, value in named.items() if value is not None}
    run_config, sources = read_settings(
        from_call(given | {key: _paths_to_text(value) for key, value in settings.items()}),
        file,
        permission.permit_all if trust else permission.check,
    )
    from specbench_cli.measure.run import measure_run, start_run
    from specbench_cli.plan.matrix import is_matrix
    from specbench_cli.report import outputs
    from specbench_cli.store.run_dir import RunDir, register_run

    if is_matrix(run_config):
        raise UsageError(
            "targets and drafts describe several runs, but a call makes one run",
            "[sb.run(target) for target in TARGETS], or specbench run --targets",
        )
    with (
        warnings.catch_warnings(),
        _keep_thread_count(),
        make_progress(json=False, start_s=_start_s()) if progress else ProgressDisplay() as view,
    ):
        # In notebooks without ipywidgets, transformers warns that it cannot show its progress bar.
        # specbench does not use this bar, so hide the warning.
        warnings.filterwarnings("ignore", message="IProgress not found")
        plan, run_dir = start_run(run_config, sources, folder, view)
        with show_resume_command(run_dir.path, view, is_repeat=False):
            result = measure_run(plan, run_dir, view, fresh=True)
            found = Run(outputs.write_outputs(RunDir.open(result.run_dir)))
    register_run(run_dir.path)
    if result.noisy:
        warnings.warn("; ".join(NOISE_ERROR), stacklevel=2)
    return found


def load(run: Named = "last") -> Run:
    """Load a stored run.

    Args:
        run: Folder of the run, or "last" for the newest one.

    Raises:
        UsageError: There is no run, or its files are damaged.
    """
    from specbench_cli.report.report_data import read_report_data
    from specbench_cli.store.run_dir import RunDir, find_run

    return Run(read_report_data(RunDir.open(find_run(_to_name("load(): run", run)))))


def compare(
    base: Run | Named,
    new: Run | Named,
    *,
    tolerance: float | str | None = None,
    fail_on: str | None = None,
) -> ComparisonResult:
    """Compare two runs, method by method, like `specbench compare`.

    Args:
        base: A run, or its name as on the command line: a folder, "last", a folder of several runs
            of the same program version, or the file or name of a baseline.
        new: The run to compare with `base`, in the same forms.
        tolerance: Accepted slowdown, e.g. 0.05 or "5%". Default: 5%.
        fail_on: Outcomes that fail the gate, separated by commas, or "none". Default:
            "broken,changed-output,mat,slower".

    Raises:
        UsageError: A side is neither a run nor a baseline, or the sides have nothing in common.
    """
    from specbench_cli.comparison.compare import compare as put_together
    from specbench_cli.comparison.outcome import parse_fail_on, parse_tolerance
    from specbench_cli.comparison.side_sources import load_side
    from specbench_cli.config.commands import CompareOptions

    base, new = (
        str(each.path) if isinstance(each, Run) else _to_name(f"compare(): {word}", each)
        for word, each in (("base", base), ("new", new))
    )
    defaults = CompareOptions()
    found = put_together(
        load_side(base),
        load_side(new),
        tolerance=parse_tolerance(str(defaults.tolerance if tolerance is None else tolerance)),
        fail_on=parse_fail_on(defaults.fail_on if fail_on is None else fail_on),
    )
    return ComparisonResult(found)


def methods() -> pandas.DataFrame:
    """Return all methods, one row per method: requirements, guarantee and description."""
    import pandas

    from specbench_cli.commands._card import describe_entry

    return pandas.DataFrame(map(describe_entry, registry.entries())).set_index("name")


class Run:
    """Records and results of a run. `run` and `load` return it."""

    def __init__(self, reading: ReportData) -> None:
        self._reading = reading

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __str__(self) -> str:
        """Return the table that the terminal shows."""
        from specbench_cli.report.terminal.table import run_text

        return run_text(self._reading.summary, self._reading.facts)

    def _repr_html_(self) -> str:
        from specbench_cli.report.html.page import brief

        return brief(self._reading)

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self._reading.run.path

    @property
    def manifest(self) -> dict[str, Any]:
        """Settings with their sources, models, versions and machine. See results/README.md."""
        return self._reading.run.manifest

    @cached_property
    def df(self) -> pandas.DataFrame:
        """Records, one row per output (method, prompt, turn and repeat).

        The columns are those of `records.parquet`. Times `ns_*` are in nanoseconds. Steps and
        forwards are lists with one entry each. A method's own parameters and counters are JSON
        text.
        """
        from specbench_cli.store.export import to_frame

        return to_frame(self._reading.run.records())

    @cached_property
    def summary(self) -> pandas.DataFrame:
        """Results, one row per method, indexed by label. Lossless methods come first, by speed.

        `speedup` is the ratio to vanilla, with its 95% interval `speedup_low` to `speedup_high`.
        Methods that share one of the `letters` do not differ significantly. The other columns are
        those of `summary.csv` (docs/reference/metrics.md).
        """
        from specbench_cli.summary.summary import ALL

        rows = self._rows()
        return rows[rows["family"] == ALL].drop(columns="family").set_index("label")

    @cached_property
    def families(self) -> pandas.DataFrame:
        """Results by task family, one row per family and method."""
        from specbench_cli.summary.summary import ALL

        rows = self._rows()
        return rows[rows["family"] != ALL].set_index(["family", "label"])

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of `specbench run`: OK, BAD_ANSWER, or ENVIRONMENT.

        ENVIRONMENT means that times are noisy, or that a method could not run on this machine.
        """
        from specbench_cli.measure.result import exit_code

        return exit_code(self._reading.records, self.manifest)

    def show(self) -> None:
        """Show the report page in a notebook. Elsewhere, print the table."""
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
        """Return the report in an iframe, which isolates its style and script from the notebook."""
        from specbench_cli.report.html.page import write_html

        with TemporaryDirectory() as folder:
            (file,) = write_html(self._reading, Path(folder))
            page = file.read_text(encoding="utf-8")
        return (
            '<div><iframe sandbox="allow-scripts" style="width: 100%; height: 80vh; border: 0"'
            f' srcdoc="{html.escape(page)}"></iframe></div>'
        )


class ComparisonResult:
    """Comparison of two runs. `compare` returns it."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._comparison.base!r}, {self._comparison.new!r})"

    def __str__(self) -> str:
        """Return the verdict in one line."""
        from specbench_cli.comparison.pages.words import headline

        return output.escape_hidden(headline(self._comparison))

    def _repr_markdown_(self) -> str:
        from specbench_cli.comparison.pages.markdown import render

        return render(self._comparison)

    @property
    def passed(self) -> bool:
        """True if the comparison has no outcome of `fail_on`."""
        return not self._comparison.failed_rows

    @cached_property
    def df(self) -> pandas.DataFrame:
        """Comparison, one row per task and method.

        Columns include `outcome`, `fails` (True if the outcome is in `fail_on`), `found`, MAT of
        both runs, and `decode_ratio`. The latter is NEW's decode time divided by BASE's, so above 1
        means slower. Its simultaneous interval is `decode_low` to `decode_high`.
        """
        import pandas

        from specbench_cli.comparison.pages.columns import flat_row

        rows = [flat_row(row, self._comparison) for row in self._comparison.rows]
        found = pandas.DataFrame(rows).set_index(["task", "method"])
        return found.assign(fails=found["fails"] == "yes")

    def show(self) -> None:
        """Show the comparison as a table in a notebook. Elsewhere, print it."""
        from specbench_cli.comparison.pages import text

        if _in_notebook():
            _display({"text/markdown": self._repr_markdown_(), "text/plain": str(self)})
        else:
            text.print_comparison(self._comparison)


def _start_s() -> float:
    """Return an estimate of the CPU time in seconds that the start of a process takes.

    The estimate is the CPU time of this process so far. It is limited, because the process may have
    done
    other work before.
    """
    return min(time.process_time(), MAX_START_S)


@contextmanager
def _keep_thread_count() -> Iterator[None]:
    """Restore torch's number of threads after the `with` block. A run may change it."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _to_name(what: str, value: Named) -> str:
    """Return a name unchanged, or a path as text.

    Args:
        what: description of the argument for the error message.

    Raises:
        UsageError: The value is neither a name nor a path.
    """
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise UsageError(f"{what} must be a name or a path, got {value!r}", "help(specbench_cli.run)")


def _paths_to_text(value: Any) -> Any:
    """Return a setting with all paths in it converted to text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_paths_to_text(each) for each in value] if isinstance(value, list | tuple) else value


def _in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _display(forms: dict[str, str]) -> None:
    importlib.import_module("IPython.display").display(forms, raw=True)
