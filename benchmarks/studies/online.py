"""Measure a draft that learns while it serves, and the cost of a change of topic.

    python benchmarks/studies/online.py FOLDER --to results/experiments/osd.svg

Streams of 400 prompts of two topics: 200 questions of words (Spec-Bench's translations, questions
on facts, and the first turns of writing, roleplay, stem and humanities) and 200 problems of GSM8K.
In `shift` one topic follows the other; in `back` the topic changes every 100 prompts. The methods
are a fixed draft (`sps`), a learning draft (`osd`), and one learning draft per topic. The script
prints acceptance over the stream, the number of prompts until a method recovers from a change of
topic, the accuracy of the router, and times, all with 95% intervals (Bayesian bootstrap over
prompts). FOLDER keeps the runs, and interrupted runs are resumed. Times need a quiet machine;
counters do not (--allow-noise).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specbench_cli.engine.learning import Topics
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Record
from specbench_cli.tasks.load import load_task

PROMPTS = 200
"""Number of prompts of each topic."""
BLOCKS = {"shift": 1, "back": 2}
"""Number of blocks of each topic in a stream."""
WORDS = ("translation", "qa", "writing", "roleplay", "stem", "humanities")
TOPICS = ("words", "maths")
FROZEN, LEARNING, ROUTED = "frozen", "learning", "routed"
ROWS = [
    {"name": "sps", "label": FROZEN, "params": {"length": 5}},
    {"name": "osd", "label": LEARNING},
    {"name": "osd", "label": ROUTED, "params": {"route": True}},
]
WINDOW = 40
"""Width of the moving mean, in prompts."""
RECOVERY, TOLERANCE = 20, 0.02
"""Width in prompts of the moving mean that detects recovery, and the tolerance around the level."""
DRAWS = 4000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StreamSums:
    """Sums of a method by prompt, in the order of the stream, [prompts] each.

    Attributes:
        accepted, drafted: numbers of tokens.
        committed, steps: tokens after the first token, and number of steps.
        seconds: time of the whole output, nan if noisy.
        learning: time of learning before the output, a part of `seconds`.
    """

    accepted: Floats
    drafted: Floats
    committed: Floats
    steps: Floats
    seconds: Floats
    learning: Floats

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> StreamSums:
        """Return the sums of a method's records, one record per prompt."""

        def sums(name: str) -> Floats:
            return np.array([float(sum(getattr(r.steps, name))) for r in records])

        total = [np.nan if r.ns.total is None else r.ns.total / 1e9 for r in records]
        learn = [(r.ns.learn or 0) / 1e9 for r in records]
        steps = np.array([float(len(r.steps.committed)) for r in records if r.steps])
        return cls(
            sums("accepted"), sums("levels"), sums("committed"), steps, np.array(total),
            np.array(learn),
        )  # fmt: skip


@dataclass(frozen=True)
class MeasuredStream:
    """A measured stream.

    Attributes:
        changes: positions at which the topic changes.
        weights: bootstrap weights of the prompts, [1 + DRAWS, prompts]. The first row is all 1.
        identical: number of outputs that equal vanilla's, of `outputs`.
        routed: number of prompts that the router assigned to the right topic.
    """

    name: str
    rows: Mapping[str, StreamSums]
    changes: Sequence[int]
    weights: Floats
    identical: int
    outputs: int
    routed: int

    def moving_acceptance(self, label: str, width: int = WINDOW) -> Floats:
        """Return the acceptance rate over a moving window, [1 + DRAWS, windows]."""
        row = self.rows[label]
        return _moving_ratio(self.weights, row.accepted, row.drafted, width)

    def mean_between(self, what: str, label: str, first: int, last: int) -> Floats:
        """Return the acceptance rate or MAT of a range of prompts, [1 + DRAWS]."""
        row, part = self.rows[label], slice(first, last)
        above, below = {
            "acceptance": (row.accepted, row.drafted),
            "MAT": (row.committed, row.steps),
        }[what]
        weights = self.weights[:, part]
        found: Floats = (weights @ above[part]) / (weights @ below[part])
        return found


def _moving_ratio(weights: Floats, above: Floats, below: Floats, width: int) -> Floats:
    def sums(values: Floats) -> Floats:
        added = np.cumsum(weights * values, axis=1)
        added = np.concatenate([np.zeros((len(added), 1)), added], axis=1)
        found: Floats = added[:, width:] - added[:, :-width]
        return found

    return sums(above) / sums(below)


def format_interval(draws: Floats, digits: int = 2) -> str:
    """Return the first draw as the estimate, with the 95% interval of the others."""
    low, high = np.nanpercentile(draws[1:], [2.5, 97.5])
    return f"{draws[0]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def prompts_to_recover(gain: Floats, level: Floats) -> Floats:
    """Return the number of prompts after a change until the gain first reaches a level, [draws].

    Args:
        gain: moving means over `RECOVERY` prompts after the change, [draws, windows].
        level: [draws].
    """
    there = gain >= level[:, None]
    first = np.where(there.any(1), there.argmax(1), there.shape[1]).astype(float)
    return first + RECOVERY


def compose_stream(name: str, seed: int) -> list[dict[str, object]]:
    """Return the prompts of a stream as rows of a task file."""
    chosen: dict[str, list[str]] = {
        "words": [q.turns[0] for q in load_task("spec_bench").questions if q.category in WORDS],
        "maths": [question.turns[0] for question in load_task("gsm8k").questions],
    }
    for topic in TOPICS:
        random.Random(f"{topic}/{seed}").shuffle(chosen[topic])
    size = PROMPTS // BLOCKS[name]
    return [
        {"turns": [text], "category": topic}
        for block in range(BLOCKS[name])
        for topic in TOPICS
        for text in chosen[topic][block * size : (block + 1) * size]
    ]


def run_stream(folder: Path, name: str, seed: int, extra_options: Sequence[str]) -> RunDir:
    """Return the run of a stream; start or resume it if it is not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    task, config, run = folder / f"{name}.jsonl", folder / f"{name}.json", folder / name
    if not RunDir.holds_run(run):
        task.write_text("".join(json.dumps(line) + "\n" for line in compose_stream(name, seed)))
        config.write_text(json.dumps({"methods": ROWS, "tasks": [str(task)], "threads": 1}))
        options = [
            "--config",
            str(config),
            "--out",
            str(run),
            "--max-new-tokens",
            "48",
            *extra_options,
        ]
        subprocess.check_call([sys.executable, "-m", "specbench_cli", "run", *options])
    elif RunDir.open(run).manifest["status"] != "finished":
        subprocess.check_call([sys.executable, "-m", "specbench_cli", "run", "--resume", str(run)])
    return RunDir.open(run)


def read_stream(name: str, run: RunDir) -> MeasuredStream:
    """Return the results of a run."""
    by_label: dict[str, list[Record]] = {}
    for record in run.records():
        by_label.setdefault(record.label, []).append(record)
    prompts, topics, n_correct = list(run.prompts()), Topics(), 0
    for prompt in prompts:
        n_correct += topics.classify(prompt.ids) == prompt.category
        topics.learn(prompt.ids, prompt.category)
    drafting = {label: records for label, records in by_label.items() if label != "vanilla"}
    weights = np.random.default_rng(0).exponential(size=(DRAWS, len(prompts)))
    verdicts = [r.verdict.kind for records in drafting.values() for r in records if r.verdict]
    return MeasuredStream(
        name,
        {label: StreamSums.from_records(records) for label, records in by_label.items()},
        [at for at in range(1, len(prompts)) if prompts[at].category != prompts[at - 1].category],
        np.concatenate([np.ones((1, len(prompts))), weights]),
        verdicts.count("identical"),
        sum(map(len, drafting.values())),
        n_correct,
    )


def format_stream(found: MeasuredStream) -> str:
    """Return the tables of a stream as Markdown."""
    labels, prompts = (FROZEN, LEARNING, ROUTED), found.weights.shape[1]
    lines = [
        f"## {found.name}",
        f"{found.identical} of {found.outputs} outputs equal vanilla's; the router was right for"
        f" {found.routed} of {prompts} prompts",
    ]
    for what in ("acceptance", "MAT"):
        over = [f"{label} over {FROZEN}" for label in labels[1:]]
        lines += ["", _table_row([f"{what}, prompts", *labels, *over]), _table_row(["---"] * 6)]
        for first in range(0, prompts, WINDOW):
            last = min(first + WINDOW, prompts)
            means = {label: found.mean_between(what, label, first, last) for label in labels}
            more = [format_interval(means[label] - means[FROZEN], 3) for label in labels[1:]]
            lines.append(
                _table_row(
                    [
                        f"{first + 1} to {last}",
                        *(format_interval(means[label]) for label in labels),
                        *more,
                    ]
                )
            )
    lines += ["", *_recoveries(found), "", *_times(found)]
    return "\n".join(lines)


def _recoveries(found: MeasuredStream) -> list[str]:
    """Return a table of the prompts until each method recovers from each change of topic."""
    ends = [*found.changes[1:], found.weights.shape[1]]
    lines = [
        _table_row(["change at", "row", f"its first {RECOVERY} over frozen",
               "no worse than frozen after", f"within {TOLERANCE} of its level after",
               "its level over frozen"]),
        _table_row(["---"] * 6),
    ]  # fmt: skip
    for change, end in zip(found.changes, ends, strict=True):
        for label in (LEARNING, ROUTED):
            gain = found.moving_acceptance(label, RECOVERY) - found.moving_acceptance(
                FROZEN, RECOVERY
            )
            gain = gain[:, change : end - RECOVERY + 1]  # only windows after the change
            level = found.mean_between("acceptance", label, end - WINDOW, end)
            level = level - found.mean_between("acceptance", FROZEN, end - WINDOW, end)
            recoveries = (
                prompts_to_recover(gain, np.zeros(len(gain))),
                prompts_to_recover(gain, level - TOLERANCE),
            )
            figures = (
                format_interval(gain[:, 0], 3),
                *(format_interval(each, 0) for each in recoveries),
            )
            lines.append(_table_row([str(change), label, *figures, format_interval(level, 3)]))
    return lines


def _times(found: MeasuredStream) -> list[str]:
    """Return a table of seconds, the share of learning, and speedups."""
    known = np.all([np.isfinite(row.seconds) for row in found.rows.values()], axis=0)
    weights = found.weights[:, known]
    total = {label: weights @ row.seconds[known] for label, row in found.rows.items()}
    lines = [
        f"times of the {int(known.sum())} prompts of which all rows have them",
        "",
        _table_row(["row", "seconds", "of them learning", "speedup over vanilla", "over frozen"]),
        _table_row(["---"] * 5),
    ]
    for label, row in found.rows.items():
        share = weights @ row.learning[known] / total[label]
        speedups = [format_interval(total[other] / total[label]) for other in ("vanilla", FROZEN)]
        lines.append(
            _table_row([label, f"{total[label][0]:.1f}", format_interval(share, 3), *speedups])
        )
    return lines


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw_figure(streams: Sequence[MeasuredStream], to: Path) -> None:
    """Draw the acceptance rate of the last `WINDOW` prompts, a panel per stream."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.9 * len(streams)), layout="constrained")
    panels = figure.subplots(len(streams), 1, squeeze=False)[:, 0]
    for axes, found in zip(panels, streams, strict=True):
        for label, colour in ((FROZEN, "0.4"), (LEARNING, "C0"), (ROUTED, "C1")):
            moving = found.moving_acceptance(label)
            places = np.arange(WINDOW, WINDOW + moving.shape[1])
            low, high = np.percentile(moving[1:], [2.5, 97.5], axis=0)
            axes.fill_between(places, low, high, color=colour, alpha=0.2, lw=0)
            axes.plot(places, moving[0], color=colour, lw=1, label=label)
        for change in found.changes:
            axes.axvline(change, color="0.7", lw=0.8, ls="--")
        axes.set(title=found.name, ylabel=f"accepted of drafted, last {WINDOW}")
        axes.set_xlabel("prompts served")
        axes.legend(fontsize="x-small", loc="upper left")
    figure.savefig(to)


def main() -> None:
    """Run what is missing, print the tables, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--seed", type=int, default=0, help="random seed of the order of prompts")
    parser.add_argument("--allow-noise", action="store_true", help="keep times of a busy machine")
    parser.add_argument("--to", type=Path, help="file for the figure")
    args = parser.parse_args()
    extra_options = ["--allow-noise"] if args.allow_noise else []
    runs = {name: run_stream(args.folder, name, args.seed, extra_options) for name in args.streams}
    found = [read_stream(name, run) for name, run in runs.items()]
    sys.stdout.write("\n\n".join(map(format_stream, found)) + "\n")
    if args.to:
        draw_figure(found, args.to)


if __name__ == "__main__":
    main()
