"""Does a draft that learns while it serves get better, and what does a change of topic cost it?

    python benchmarks/studies/online.py FOLDER --to results/experiments/osd.svg

Streams of 400 prompts of two topics: 200 questions of words (Spec-Bench's translations, questions
on facts, and the first turns of writing, roleplay, stem and humanities) and 200 problems of GSM8K.
In `shift` one topic follows the other, in `back` they take turns, 100 prompts each. Rows: a draft
that stays as it is (`sps`), one that learns (`osd`), and a learning one for each topic. Prints
acceptance over the stream, how long a change of topic costs, the router's guesses and the times,
all with 95% intervals (Bayesian bootstrap over prompts); FOLDER keeps the runs, and a run that was
stopped goes on. Times need a quiet machine; counters do not (--allow-noise).
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
"""Of each topic."""
BLOCKS = {"shift": 1, "back": 2}
"""How often each topic comes in a stream."""
WORDS = ("translation", "qa", "writing", "roleplay", "stem", "humanities")
TOPICS = ("words", "maths")
FROZEN, LEARNING, ROUTED = "frozen", "learning", "routed"
ROWS = [
    {"name": "sps", "label": FROZEN, "params": {"length": 5}},
    {"name": "osd", "label": LEARNING},
    {"name": "osd", "label": ROUTED, "params": {"route": True}},
]
WINDOW = 40
"""Prompts of a moving mean."""
RECOVERY, NEAR = 20, 0.02
"""Prompts of the moving mean that tells when a row is back at its level, and how near that is."""
DRAWS = 4000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """A row's sums by prompt, in the order of the stream, [prompts] each.

    accepted, drafted: tokens. committed, steps: behind the first token, and in how many steps.
    seconds: of the whole output, and what learning before it took of them; nan where they are void.
    """

    accepted: Floats
    drafted: Floats
    committed: Floats
    steps: Floats
    seconds: Floats
    learning: Floats

    @classmethod
    def of(cls, records: Sequence[Record]) -> Row:
        """Of a row's records, a prompt each."""

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
class Stream:
    """A stream that was measured.

    changes: places from which on the topic is another. weights: of each prompt in each draw of the
    bootstrap, [1 + DRAWS, prompts]; the first are all 1.
    """

    name: str
    rows: Mapping[str, Row]
    changes: Sequence[int]
    weights: Floats
    identical: int
    outputs: int
    routed: int

    def moving(self, label: str, width: int = WINDOW) -> Floats:
        """Acceptance of the `width` prompts up to each place, [1 + DRAWS, places]."""
        row = self.rows[label]
        return _moving(self.weights, row.accepted, row.drafted, width)

    def between(self, what: str, label: str, first: int, last: int) -> Floats:
        """Acceptance or MAT of the prompts of some places, [1 + DRAWS]."""
        row, part = self.rows[label], slice(first, last)
        above, below = {
            "acceptance": (row.accepted, row.drafted),
            "MAT": (row.committed, row.steps),
        }[what]
        weights = self.weights[:, part]
        found: Floats = (weights @ above[part]) / (weights @ below[part])
        return found


def _moving(weights: Floats, above: Floats, below: Floats, width: int) -> Floats:
    def sums(values: Floats) -> Floats:
        added = np.cumsum(weights * values, axis=1)
        added = np.concatenate([np.zeros((len(added), 1)), added], axis=1)
        found: Floats = added[:, width:] - added[:, :-width]
        return found

    return sums(above) / sums(below)


def interval(draws: Floats, digits: int = 2) -> str:
    """A figure, the first of its draws, with the interval that the others give it."""
    low, high = np.nanpercentile(draws[1:], [2.5, 97.5])
    return f"{draws[0]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def recovery(gain: Floats, level: Floats) -> Floats:
    """How many prompts behind a change a row's gain is first at a level, [draws].

    Args:
        gain: moving means of the prompts behind the change, [draws, places], of `RECOVERY` each.
        level: [draws].
    """
    there = gain >= level[:, None]
    first = np.where(there.any(1), there.argmax(1), there.shape[1]).astype(float)
    return first + RECOVERY


def composed(name: str, seed: int) -> list[dict[str, object]]:
    """The prompts of a stream, as lines of a task."""
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


def measured(folder: Path, name: str, seed: int, words: Sequence[str]) -> RunDir:
    """The run of a stream, made or gone on with where it is not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    task, config, run = folder / f"{name}.jsonl", folder / f"{name}.json", folder / name
    if not RunDir.holds_run(run):
        task.write_text("".join(json.dumps(line) + "\n" for line in composed(name, seed)))
        config.write_text(json.dumps({"methods": ROWS, "tasks": [str(task)], "threads": 1}))
        told = ["--config", str(config), "--out", str(run), "--max-new-tokens", "48", *words]
        subprocess.check_call([sys.executable, "-m", "specbench_cli", "run", *told])
    elif RunDir.open(run).manifest["status"] != "finished":
        subprocess.check_call([sys.executable, "-m", "specbench_cli", "run", "--resume", str(run)])
    return RunDir.open(run)


def stream(name: str, run: RunDir) -> Stream:
    """What a run came to."""
    of: dict[str, list[Record]] = {}
    for record in run.records():
        of.setdefault(record.label, []).append(record)
    asked, topics, right = list(run.prompts()), Topics(), 0
    for prompt in asked:
        right += topics.classify(prompt.ids) == prompt.category
        topics.learn(prompt.ids, prompt.category)
    drafting = {label: records for label, records in of.items() if label != "vanilla"}
    weights = np.random.default_rng(0).exponential(size=(DRAWS, len(asked)))
    verdicts = [r.verdict.kind for records in drafting.values() for r in records if r.verdict]
    return Stream(
        name,
        {label: Row.of(records) for label, records in of.items()},
        [at for at in range(1, len(asked)) if asked[at].category != asked[at - 1].category],
        np.concatenate([np.ones((1, len(asked))), weights]),
        verdicts.count("identical"),
        sum(map(len, drafting.values())),
        right,
    )


def told(found: Stream) -> str:
    """Its tables, as Markdown."""
    labels, prompts = (FROZEN, LEARNING, ROUTED), found.weights.shape[1]
    lines = [
        f"## {found.name}",
        f"{found.identical} of {found.outputs} outputs are vanilla's; the router was right of"
        f" {found.routed} of {prompts} prompts",
    ]
    for what in ("acceptance", "MAT"):
        over = [f"{label} over {FROZEN}" for label in labels[1:]]
        lines += ["", _line([f"{what}, prompts", *labels, *over]), _line(["---"] * 6)]
        for first in range(0, prompts, WINDOW):
            last = min(first + WINDOW, prompts)
            of = {label: found.between(what, label, first, last) for label in labels}
            more = [interval(of[label] - of[FROZEN], 3) for label in labels[1:]]
            lines.append(
                _line([f"{first + 1} to {last}", *(interval(of[label]) for label in labels), *more])
            )
    lines += ["", *_recoveries(found), "", *_times(found)]
    return "\n".join(lines)


def _recoveries(found: Stream) -> list[str]:
    """Prompts behind each change until a row's gain over the frozen draft is back."""
    ends = [*found.changes[1:], found.weights.shape[1]]
    lines = [
        _line(["change at", "row", f"its first {RECOVERY} over frozen",
               "no worse than frozen after", f"within {NEAR} of its level after",
               "its level over frozen"]),
        _line(["---"] * 6),
    ]  # fmt: skip
    for change, end in zip(found.changes, ends, strict=True):
        for label in (LEARNING, ROUTED):
            gain = found.moving(label, RECOVERY) - found.moving(FROZEN, RECOVERY)
            gain = gain[:, change : end - RECOVERY + 1]  # of prompts behind the change alone
            level = found.between("acceptance", label, end - WINDOW, end)
            level = level - found.between("acceptance", FROZEN, end - WINDOW, end)
            back = recovery(gain, np.zeros(len(gain))), recovery(gain, level - NEAR)
            figures = interval(gain[:, 0], 3), *(interval(each, 0) for each in back)
            lines.append(_line([str(change), label, *figures, interval(level, 3)]))
    return lines


def _times(found: Stream) -> list[str]:
    """Seconds of each row, what learning took of them, and how much faster it is than others."""
    known = np.all([np.isfinite(row.seconds) for row in found.rows.values()], axis=0)
    weights = found.weights[:, known]
    total = {label: weights @ row.seconds[known] for label, row in found.rows.items()}
    lines = [
        f"times of the {int(known.sum())} prompts of which all rows have them",
        "",
        _line(["row", "seconds", "of them learning", "speedup over vanilla", "over frozen"]),
        _line(["---"] * 5),
    ]
    for label, row in found.rows.items():
        share = weights @ row.learning[known] / total[label]
        speedups = [interval(total[other] / total[label]) for other in ("vanilla", FROZEN)]
        lines.append(_line([label, f"{total[label][0]:.1f}", interval(share, 3), *speedups]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(streams: Sequence[Stream], to: Path) -> None:
    """Acceptance of the last `WINDOW` prompts at each place, a panel a stream."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.9 * len(streams)), layout="constrained")
    panels = figure.subplots(len(streams), 1, squeeze=False)[:, 0]
    for axes, found in zip(panels, streams, strict=True):
        for label, colour in ((FROZEN, "0.4"), (LEARNING, "C0"), (ROUTED, "C1")):
            moving = found.moving(label)
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
    """Measure what lacks, print the tables, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--streams", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--seed", type=int, default=0, help="of the order of the prompts")
    parser.add_argument("--allow-noise", action="store_true", help="keep times of a busy machine")
    parser.add_argument("--to", type=Path, help="file for the figure")
    args = parser.parse_args()
    words = ["--allow-noise"] if args.allow_noise else []
    runs = {name: measured(args.folder, name, args.seed, words) for name in args.streams}
    found = [stream(name, run) for name, run in runs.items()]
    sys.stdout.write("\n\n".join(map(told, found)) + "\n")
    if args.to:
        draw(found, args.to)


if __name__ == "__main__":
    main()
