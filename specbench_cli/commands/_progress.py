"""Progress displays of a run: a bar on a terminal, lines in a log, or JSON lines for a program.

The run updates its display between prompts. There is no background thread that draws the display,
because it would disturb the measured times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specbench_cli import output
from specbench_cli.config.sweep import format_params
from specbench_cli.measure.eta import estimate_report_seconds
from specbench_cli.measure.quiet import TIMES_NOISY
from specbench_cli.measure.repeat_process import TUNING

if TYPE_CHECKING:
    from specbench_cli.measure.view import PromptProgress
    from specbench_cli.store.schema import Record

BASELINE = "vanilla"
LOSSLESS = ("exact_tokens", "exact_law")
LOG_INTERVAL_S = 60.0
"""Minimum interval in seconds between two log lines about the same prompt."""


NOISE_WARNING = (
    "other programs use the CPU, so current times are noisy and will not be used: close these"
    " programs, or interrupt and run again with --allow-noise, which uses noisy times and labels"
    " the run"
)
"""Message that a run prints once, as soon as it is disturbed."""


class Timing(NamedTuple):
    """Total time and number of tokens of one output."""

    label: str
    ns: int
    tokens: int


class LiveSpeedups:
    """Provisional speedups of methods while a run continues. They have no confidence intervals.

    A method's time per token is compared with its baseline's for the same prompt, turn and repeat,
    as in the report. Lossy methods and methods with a wrong output get no provisional speedup.

    Args:
        baselines: The label of each method's baseline, by the method's label. Methods that are
            missing here are compared with vanilla.
    """

    def __init__(self, baselines: Mapping[str, str] | None = None) -> None:
        self._baselines = baselines or {}
        self._timings: dict[tuple[str, int, int], list[Timing]] = {}
        self._sums: dict[str, tuple[float, float]] = {}
        self._wrong: set[str] = set()

    def add(self, record: Record) -> dict[str, float]:
        """Add the record of one output. Return the current speedups by label of the method.

        Baselines are not among the returned methods.
        """
        wrong = record.verdict is not None and record.verdict.kind == "mismatch"
        if wrong or record.guarantee not in LOSSLESS:
            self._wrong.add(record.label)
        if not record.void and record.error is None and record.ns.total and record.n_tokens:
            visit = self._timings.setdefault((record.prompt_id, record.turn, record.pass_), [])
            own = Timing(record.label, record.ns.total, record.n_tokens)
            visit.append(own)
            pairs = [(own, other) for other in visit] + [(other, own) for other in visit[:-1]]
            for base, timing in pairs:
                if base.label == self._get_baseline(timing.label):
                    self._add_pair(base, timing)
        hidden = {*map(self._get_baseline, self._sums), *self._wrong}
        return {
            label: base / own for label, (base, own) in self._sums.items() if label not in hidden
        }

    def _get_baseline(self, label: str) -> str:
        return self._baselines.get(label, BASELINE)

    def _add_pair(self, base: Timing, own: Timing) -> None:
        expected, taken = self._sums.get(own.label, (0.0, 0.0))
        expected += base.ns * own.tokens / base.tokens
        self._sums[own.label] = (expected, taken + own.ns)


class ProgressDisplay:
    """Base class of the progress displays. It counts outputs and computes provisional speedups.

    The base class itself prints only messages. Subclasses draw a bar or print lines. A display is a
    context manager that restores the terminal at the end.

    Args:
        dry_run: True if the command only prints the plan of the run.
        part: True if this process runs one repeat of a run. Its parent process has then already
            shown the plan.
        start_s: CPU time in seconds that the start of this process took. The display estimates from
            it how long the final report will take. 0 means that no report follows.
    """

    def __init__(self, *, dry_run: bool = False, part: bool = False, start_s: float = 0.0) -> None:
        self._start_s, self._report_s = start_s, 0.0
        self.run_dir: Path | None = None
        self.speedups: dict[str, float] = {}
        self._dry_run = dry_run
        self._part = part
        self._n_outputs = self._n_done = 0
        self._live_speedups = LiveSpeedups()
        self._baselines: dict[str, str] = {}
        self._stage = self._window = ""
        self._warned_of_noise = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""

    def planned(self, facts: dict[str, Any]) -> None:
        """Show the plan, before models are loaded."""
        self._estimate_report(facts)
        if self._dry_run:
            output.facts(_format_plan(facts))

    def _estimate_report(self, facts: dict[str, Any]) -> None:
        self._report_s = estimate_report_seconds(
            self._start_s, len(facts["methods"]), facts["cells"]
        )
        self._baselines = {row["label"]: row["baseline"] for row in facts["methods"]}

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """Start the display of a run with `cells` outputs, of which `done` are already stored."""
        self.run_dir, self._n_outputs, self._n_done = run_dir, cells, done
        self._live_speedups, self.speedups = (
            LiveSpeedups(self._baselines),
            {},
        )  # drop the speedups of a tuning

    def stage(self, text: str) -> None:
        """Show what the run does while it does not decode, e.g. that it loads a model."""
        self._stage = text

    def prompt(self, progress: PromptProgress) -> None:
        """Show the number of measured prompts."""
        self._stage = format_progress(self.add_report_time(progress))

    def add_report_time(self, progress: PromptProgress) -> PromptProgress:
        """Return the progress with the time for the final report added to the time left.

        The progress of tuning (`--tune`) is returned unchanged, because no report follows it.
        """
        if progress.left_s is None or progress.part == TUNING:
            return progress
        return progress._replace(left_s=progress.left_s + self._report_s)

    def window(self, other_cpu: float | None, text: str) -> None:
        """Show the CPU load of other processes during the last timed outputs.

        If this load makes the times noisy, also print a warning, once per run.

        Args:
            other_cpu: CPU load of other processes, or None if it is unknown.
            text: description of the load, to show.
        """
        self._window = text
        if text.endswith(TIMES_NOISY) and not self._warned_of_noise and not self._part:
            self._warned_of_noise = True
            self.note(NOISE_WARNING)

    def show_record(self, record: Record) -> None:
        """Count a stored record."""
        self._n_done += 1
        self.speedups = self._live_speedups.add(record)

    def hand_over(self) -> None:
        """Pause the display while another process continues the run and shows its own."""

    def note(self, text: str) -> None:
        """Print a message for the user."""
        output.note(text)

    def flags(self) -> list[str]:
        """Return the options that give a child process of this run the same display."""
        return []

    def line(self) -> str:
        """Return the status line: the CPU load of other processes, then the speedups, highest
        first.
        """
        ranked = sorted(self.speedups.items(), key=lambda each: -each[1])
        speedups = [f"{label} {ratio:.2f}x" for label, ratio in ranked[:MAX_SPEEDUPS]]
        slower = len(ranked) - MAX_SPEEDUPS
        more = f"and {slower} slower" if slower > 0 else ""
        return "  ".join(filter(None, [self._window, *speedups, more]))


def format_progress(progress: PromptProgress) -> str:
    """Return the progress as text: the number of finished prompts and the time left."""
    part, prompt, prompts, left_s = progress
    place = f"prompt {prompt} of {prompts} done" if prompt else f"prompt 1 of {prompts}"
    done = f"{part + ', ' if part else ''}{place}"
    if left_s is None:
        return done
    return f"{done}, about {format_duration(left_s)} left{' of tuning' if part == TUNING else ''}"


def format_duration(seconds: float) -> str:
    """Return a time as text, e.g. 40 s, 12 min, 3 h 10 min."""
    if seconds < MINUTE:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / MINUTE)
    if seconds < 10 * MINUTE:
        return f"{int(seconds // MINUTE)} min {int(seconds % MINUTE)} s"
    return f"{minutes} min" if minutes < MINUTE else f"{minutes // MINUTE} h {minutes % MINUTE} min"


MINUTE = 60
"""Seconds per minute, and minutes per hour."""


class _BarAndLine(Progress):
    """A progress bar with a line of text below it."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and the line."""
        yield from super().get_renderables()
        yield output.make_text(self.line)


MAX_SPEEDUPS = 6
"""Maximum number of speedups in the status line."""
BAR_WIDTH = 24
"""Width of the bar in columns, which leaves space for text on a terminal with 80 columns."""


class BarDisplay(ProgressDisplay):
    """Progress bar on stderr, with the stage next to it and provisional speedups below it."""

    def __init__(self, *, dry_run: bool = False, part: bool = False, start_s: float = 0.0) -> None:
        super().__init__(dry_run=dry_run, part=part, start_s=start_s)
        self._bar = _BarAndLine(
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.description}", markup=False),
            console=output.console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.stop()

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """Show the bar."""
        super().started(cells, done, run_dir)
        for before in self._bar.task_ids:
            self._bar.remove_task(before)
        self._task = self._bar.add_task("", total=cells, completed=done)
        self._bar.start()
        self._draw()

    def stage(self, text: str) -> None:
        """Show the stage next to the bar."""
        super().stage(text)
        if self._bar.task_ids:
            self._bar.start()  # another process may have used the terminal
        self._draw()

    def prompt(self, progress: PromptProgress) -> None:
        """Show the number of measured prompts and the time left."""
        super().prompt(progress)
        self._draw()

    def window(self, other_cpu: float | None, text: str) -> None:
        """Show the CPU load of other processes during the last timed outputs."""
        super().window(other_cpu, text)
        self._draw()

    def show_record(self, record: Record) -> None:
        """Advance the bar."""
        super().show_record(record)
        self._draw()

    def _draw(self) -> None:
        if self._bar.task_ids:
            self._bar.line = self.line()
            said = output.escape_hidden(self._stage)
            self._bar.update(self._task, completed=self._n_done, description=said, refresh=True)

    def hand_over(self) -> None:
        """Remove the bar while a child process measures all missing outputs and shows its own
        bar.
        """
        self._bar.stop()
        self._n_done = self._n_outputs

    def note(self, text: str) -> None:
        """Print a message above the bar."""
        self._bar.console.print(output.make_text(text))


def time_of_day() -> str:
    """Return the local time for log lines."""
    return time.strftime("%H:%M:%S")


class LogDisplay(ProgressDisplay):
    """Progress as log lines on stderr. Each line has the time of day."""

    def __init__(
        self,
        *,
        dry_run: bool = False,
        part: bool = False,
        start_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        stamp: Callable[[], str] = time_of_day,
    ) -> None:
        super().__init__(dry_run=dry_run, part=part, start_s=start_s)
        self._clock, self._stamp = clock, stamp
        self._printed_at = clock()
        self._prompt = -1

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """Print the number of outputs to measure."""
        super().started(cells, done, run_dir)
        if not self._part:
            there = f", {done} of them already measured" if done else ""
            self._line(f"{cells} outputs (prompts x methods x repeats){there}, in {run_dir}")

    def stage(self, text: str) -> None:
        """Print the stage."""
        super().stage(text)
        self._line(text)

    def prompt(self, progress: PromptProgress) -> None:
        """Print the number of measured prompts and the time left.

        For the same prompt, the line is printed at most once in `LOG_INTERVAL_S` seconds.
        """
        super().prompt(progress)
        now = self._clock()
        if progress.prompt != self._prompt or now - self._printed_at >= LOG_INTERVAL_S:
            self._prompt, self._printed_at = progress.prompt, now
            self._line("  ".join(filter(None, [self._stage, self.line()])))

    def _line(self, text: str) -> None:
        output.note(f"{self._stamp()} {text}")


class JsonDisplay(ProgressDisplay):
    """JSON lines on stdout, one per event, for programs."""

    def planned(self, facts: dict[str, Any]) -> None:
        """Print {"event": "plan", ...}."""
        self._estimate_report(facts)
        if not self._part:
            output.json_line({"event": "plan", **facts})

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """Print {"event": "start", ...}."""
        super().started(cells, done, run_dir)
        if not self._part:
            output.json_line({"event": "start", "run": run_dir, "cells": cells, "done": done})

    def stage(self, text: str) -> None:
        """Print {"event": "stage", ...}."""
        output.json_line({"event": "stage", "stage": text})

    def prompt(self, progress: PromptProgress) -> None:
        """Print {"event": "prompt", ...}."""
        output.json_line({"event": "prompt", **self.add_report_time(progress)._asdict()})

    def window(self, other_cpu: float | None, text: str) -> None:
        """Print {"event": "window", ...}."""
        output.json_line({"event": "window", "other_cpu": other_cpu, "says": text})

    def show_record(self, record: Record) -> None:
        """Print {"event": "cell", ...} with the main fields of an output's record."""
        super().show_record(record)
        output.json_line(
            {
                "event": "cell",
                "done": self._n_done,
                "cells": self._n_outputs,
                "prompt_id": record.prompt_id,
                "turn": record.turn,
                "label": record.label,
                "method": record.method,
                "pass": record.pass_,
                "n_tokens": record.n_tokens,
                "finish": record.finish,
                "ns": record.ns,
                "peak_bytes": record.peak_bytes,
                "verdict": record.verdict,
                "void": record.void,
                "error": record.error,
                "speedups": self.speedups,
            }
        )

    def flags(self) -> list[str]:
        """Return the option with which a child process of this run also prints JSON lines."""
        return ["--json"]


def make_progress(
    *, json: bool, dry_run: bool = False, part: bool = False, start_s: float = 0.0
) -> ProgressDisplay:
    """Return the progress display of a run.

    The display prints JSON lines if `json` is true. Otherwise it is a bar if stderr is a terminal,
    and log lines if not. The other arguments are those of `ProgressDisplay`.
    """
    text = BarDisplay if output.console(stderr=True).is_terminal else LogDisplay
    return (JsonDisplay if json else text)(dry_run=dry_run, part=part, start_s=start_s)


@contextmanager
def count_rounds(rounds: int, *, json: bool) -> Iterator[Callable[[int], None]]:
    """Show how many rounds of `specbench predict --probe` are finished.

    Yields:
        A function to call after each round, with the number of finished rounds.
    """
    if json:
        yield lambda done: output.json_line({"event": "round", "done": done, "rounds": rounds})
    elif output.console(stderr=True).is_terminal:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("rounds,"), TimeRemainingColumn()
        talk = output.console(stderr=True)
        with Progress(*columns, console=talk, auto_refresh=False, transient=True) as bar:
            task = bar.add_task("", total=rounds)
            yield lambda done: bar.update(task, completed=done, refresh=True)
    else:
        output.note(f"{rounds} rounds")
        yield lambda done: None


def _format_plan(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a run's plan. The lists of methods and tasks are converted to text."""
    methods = (
        " ".join(
            [m["label"], *(s for s in format_params(m["params"]) if s not in m["label"].split())]
        )
        for m in facts["methods"]
    )
    tasks = (
        f"{t['name']}: {t['questions']} questions, {t['prompts']} prompts" for t in facts["tasks"]
    )
    sentences: dict[str, str] = {
        name: "; ".join(facts[name]) for name in ("not_asked", "left_out") if name in facts
    }
    return {**facts, "methods": "; ".join(methods), "tasks": "; ".join(tasks), **sentences}
