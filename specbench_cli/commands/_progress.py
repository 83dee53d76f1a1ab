"""What a person, a log or a program sees of a run while it goes on.

Everything is drawn inside the callbacks, which come between prompts: no thread refreshes anything
while a cell is timed.
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
from specbench_cli.config.sweep import settings
from specbench_cli.measure.eta import estimate_report_seconds
from specbench_cli.measure.quiet import TIMES_VOID
from specbench_cli.measure.repeat_process import TUNING

if TYPE_CHECKING:
    from specbench_cli.measure.view import RunProgress as HowFar
    from specbench_cli.store.schema import Record

BASELINE = "vanilla"
LOSSLESS = ("exact_tokens", "exact_law")
LINE_EVERY_S = 60.0
"""Shortest time between two lines of a log on the same prompts, which may take long."""


BUSY = (
    "other programs are at work, and times taken beside them are void: close them, or interrupt"
    " and begin again with --allow-noise, which keeps such times and labels the run"
)
"""Said while a run lasts: at its end it is too late for a person who waits."""


class Timing(NamedTuple):
    """What of a record counts for a speedup."""

    label: str
    ns: int
    tokens: int


class LiveSpeedups:
    """Speedups of the cells so far; provisional, without intervals.

    Times are paired on prompt, turn and pass, and compared per token, as the report does it. A row
    with a wrong output has none from then on, and a lossy one none: what it costs is not known yet.

    Args:
        bases: the row that another one's speedup is over, where that is not vanilla.
    """

    def __init__(self, bases: Mapping[str, str] | None = None) -> None:
        self._bases = bases or {}
        self._visits: dict[tuple[str, int, int], list[Timing]] = {}
        self._sums: dict[str, tuple[float, float]] = {}
        self._wrong: set[str] = set()

    def add(self, record: Record) -> dict[str, float]:
        """Count a record in; returns the speedup of every row but vanilla's."""
        wrong = record.verdict is not None and record.verdict.kind == "mismatch"
        if wrong or record.guarantee not in LOSSLESS:
            self._wrong.add(record.label)
        if not record.void and record.error is None and record.ns.total and record.n_tokens:
            visit = self._visits.setdefault((record.prompt_id, record.turn, record.pass_), [])
            own = Timing(record.label, record.ns.total, record.n_tokens)
            visit.append(own)
            pairs = [(own, other) for other in visit] + [(other, own) for other in visit[:-1]]
            for base, timing in pairs:
                if base.label == self._base(timing.label):
                    self._pair(base, timing)
        hidden = {*map(self._base, self._sums), *self._wrong}
        return {
            label: base / own for label, (base, own) in self._sums.items() if label not in hidden
        }

    def _base(self, label: str) -> str:
        return self._bases.get(label, BASELINE)

    def _pair(self, base: Timing, own: Timing) -> None:
        expected, taken = self._sums.get(own.label, (0.0, 0.0))
        expected += base.ns * own.tokens / base.tokens
        self._sums[own.label] = (expected, taken + own.ns)


class RunProgress:
    """Common to all displays: counts, running speedups, the run's folder. A context manager.

    Args:
        dry_run: the plan is the result and goes to stdout.
        part: this process runs one pass of a run that another process has announced.
        start_s: seconds of processor time that this process took to start, by which those of the
            report after the last prompt are told; 0 for no report.
    """

    def __init__(self, *, dry_run: bool = False, part: bool = False, start_s: float = 0.0) -> None:
        self._start_s, self._report_s = start_s, 0.0
        self.run_dir: Path | None = None
        self.speedups: dict[str, float] = {}
        self._dry_run = dry_run
        self._part = part
        self._cells = self._done = 0
        self._pairs = LiveSpeedups()
        self._bases: dict[str, str] = {}
        self._stage = self._window = ""
        self._told_of_noise = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""

    def planned(self, facts: dict[str, Any]) -> None:
        """The plan, before anything is loaded."""
        self._foresee(facts)
        if self._dry_run:
            output.facts(_readable(facts))

    def _foresee(self, facts: dict[str, Any]) -> None:
        self._report_s = estimate_report_seconds(
            self._start_s, len(facts["methods"]), facts["cells"]
        )
        self._bases = {row["label"]: row["baseline"] for row in facts["methods"]}

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """The run's folder stands; `done` of its `cells` were there already."""
        self.run_dir, self._cells, self._done = run_dir, cells, done
        self._pairs, self.speedups = (
            LiveSpeedups(self._bases),
            {},
        )  # those of a tuning are no result

    def stage(self, text: str) -> None:
        """Something begins that is not a prompt."""
        self._stage = text

    def prompt(self, progress: HowFar) -> None:
        """Prompts were measured."""
        self._stage = how_far(self.to_the_end(progress))

    def to_the_end(self, progress: HowFar) -> HowFar:
        """The same with the report's time in the time left; a tuning has none."""
        if progress.left_s is None or progress.part == TUNING:
            return progress
        return progress._replace(left_s=progress.left_s + self._report_s)

    def window(self, other_cpu: float | None, text: str) -> None:
        """A window was timed; what helps is said at the first whose times are lost."""
        self._window = text
        if text.endswith(TIMES_VOID) and not self._told_of_noise and not self._part:
            self._told_of_noise = True
            self.note(BUSY)

    def show_record(self, record: Record) -> None:
        """A record was written."""
        self._done += 1
        self.speedups = self._pairs.add(record)

    def handed_over(self) -> None:
        """Another process goes on with the run, and shows itself."""

    def note(self, text: str) -> None:
        """Something a person should know."""
        output.note(text)

    def flags(self) -> list[str]:
        """Options that make another process of this run show itself in the same way."""
        return []

    def line(self) -> str:
        """How quiet it is, and the running speedups, best first."""
        ranked = sorted(self.speedups.items(), key=lambda each: -each[1])
        speedups = [f"{label} {ratio:.2f}x" for label, ratio in ranked[:SHOWN]]
        slower = len(ranked) - SHOWN
        more = f"and {slower} slower" if slower > 0 else ""
        return "  ".join(filter(None, [self._window, *speedups, more]))


def how_far(progress: HowFar) -> str:
    """Which prompt it is, and how long the rest takes."""
    part, prompt, prompts, left_s = progress
    place = f"prompt {prompt} of {prompts} done" if prompt else f"prompt 1 of {prompts}"
    done = f"{part + ', ' if part else ''}{place}"
    if left_s is None:
        return done
    return f"{done}, about {duration(left_s)} left{' of tuning' if part == TUNING else ''}"


def duration(seconds: float) -> str:
    """A time as a person says it: 40 s, 12 min, 3 h 10 min."""
    if seconds < MINUTE:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / MINUTE)
    if seconds < 10 * MINUTE:
        return f"{int(seconds // MINUTE)} min {int(seconds % MINUTE)} s"
    return f"{minutes} min" if minutes < MINUTE else f"{minutes // MINUTE} h {minutes % MINUTE} min"


MINUTE = 60
"""Seconds of a minute, and minutes of an hour."""


class _BarAndLine(Progress):
    """A bar, and a line of text under it."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, then the line."""
        yield from super().get_renderables()
        yield output.styled(self.line)


SHOWN = 6
"""Running speedups of a line."""
BAR_WIDTH = 24
"""Columns of the bar: what is said beside it has its place on 80."""


class Bar(RunProgress):
    """A progress bar on stderr with the stage beside it and the running speedups under it."""

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
        """Take the bar away."""
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
        """Say it beside the bar."""
        super().stage(text)
        if self._bar.task_ids:
            self._bar.start()  # another process may have had the terminal
        self._draw()

    def prompt(self, progress: HowFar) -> None:
        """Say how far it is."""
        super().prompt(progress)
        self._draw()

    def window(self, other_cpu: float | None, text: str) -> None:
        """Say how quiet it is."""
        super().window(other_cpu, text)
        self._draw()

    def show_record(self, record: Record) -> None:
        """Move the bar."""
        super().show_record(record)
        self._draw()

    def _draw(self) -> None:
        if self._bar.task_ids:
            self._bar.line = self.line()
            said = output.plain(self._stage)
            self._bar.update(self._task, completed=self._done, description=said, refresh=True)

    def handed_over(self) -> None:
        """Make place for the other process's bar. What comes after it comes after all cells."""
        self._bar.stop()
        self._done = self._cells

    def note(self, text: str) -> None:
        """Say it above the bar."""
        self._bar.console.print(output.styled(text))


def time_of_day() -> str:
    """The local time, which logs are read by."""
    return time.strftime("%H:%M:%S")


class Lines(RunProgress):
    """A line on stderr for each stage and each prompt, for logs: each with its time."""

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
        self._said = clock()
        self._prompt = -1

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """Say how much there is to do."""
        super().started(cells, done, run_dir)
        if not self._part:
            there = f", {done} of them done already" if done else ""
            self._line(f"{cells} cells (a prompt by a method each){there}, in {run_dir}")

    def stage(self, text: str) -> None:
        """Say it."""
        super().stage(text)
        self._line(text)

    def prompt(self, progress: HowFar) -> None:
        """Say how far it is, if that was not said just now."""
        super().prompt(progress)
        now = self._clock()
        if progress.prompt != self._prompt or now - self._said >= LINE_EVERY_S:
            self._prompt, self._said = progress.prompt, now
            self._line("  ".join(filter(None, [self._stage, self.line()])))

    def _line(self, text: str) -> None:
        output.note(f"{self._stamp()} {text}")


class JsonLines(RunProgress):
    """An event a line on stdout, for programs."""

    def planned(self, facts: dict[str, Any]) -> None:
        """{"event": "plan", ...}"""
        self._foresee(facts)
        if not self._part:
            output.json_line({"event": "plan", **facts})

    def started(self, cells: int, done: int, run_dir: Path) -> None:
        """{"event": "start", ...}"""
        super().started(cells, done, run_dir)
        if not self._part:
            output.json_line({"event": "start", "run": run_dir, "cells": cells, "done": done})

    def stage(self, text: str) -> None:
        """{"event": "stage", ...}"""
        output.json_line({"event": "stage", "stage": text})

    def prompt(self, progress: HowFar) -> None:
        """{"event": "prompt", ...}"""
        output.json_line({"event": "prompt", **self.to_the_end(progress)._asdict()})

    def window(self, other_cpu: float | None, text: str) -> None:
        """{"event": "window", ...}"""
        output.json_line({"event": "window", "other_cpu": other_cpu, "says": text})

    def show_record(self, record: Record) -> None:
        """{"event": "cell", ...}: the record without its bulk."""
        super().show_record(record)
        output.json_line(
            {
                "event": "cell",
                "done": self._done,
                "cells": self._cells,
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
        """JSON there as well."""
        return ["--json"]


def make_progress(
    *, json: bool, dry_run: bool = False, part: bool = False, start_s: float = 0.0
) -> RunProgress:
    """The display for today's stdout and stderr; see `RunProgress`."""
    text = Bar if output.console(stderr=True).is_terminal else Lines
    return (JsonLines if json else text)(dry_run=dry_run, part=part, start_s=start_s)


@contextmanager
def count_rounds(rounds: int, *, json: bool) -> Iterator[Callable[[int], None]]:
    """Shows how many of a probe's rounds are done: a bar, a line now and then, or JSON lines."""
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


def _readable(facts: dict[str, Any]) -> dict[str, Any]:
    """A plan's facts with its tables in words."""
    methods = (
        " ".join([m["label"], *(s for s in settings(m["params"]) if s not in m["label"].split())])
        for m in facts["methods"]
    )
    tasks = (
        f"{t['name']}: {t['questions']} questions, {t['prompts']} prompts" for t in facts["tasks"]
    )
    sentences: dict[str, str] = {
        name: "; ".join(facts[name]) for name in ("not_asked", "left_out") if name in facts
    }
    return {**facts, "methods": "; ".join(methods), "tasks": "; ".join(tasks), **sentences}
