"""Which lossy rules know anything? Each at four settings, beside its controls.

    python benchmarks/studies/lossy.py FOLDER --limit 120 \
        --figure results/experiments/lossy.svg
    python benchmarks/studies/lossy.py FOLDER --limit 240 --rules steps

Runs `specbench run` with the embedded pair, greedy, once for each kind of rule, keeps the runs in
FOLDER/KIND, goes on with those that were interrupted, and prints the rows of each as Markdown:
tokens a target forward, accuracy, what that is less than vanilla's, and by how much it is more
than that of the random row whose rate came nearest; of rules over steps also what the draft wrote
in vain and what the target read to judge; of early exits the work of a token, in whole forwards of
the target, and how many tokens leave early; where words are wanted, how many of them the outputs
hold. Below stands which of all rows are above random acceptance at about their rate. Rules over
steps are run on `chains`, whose answers have some, the others on `mini`. No time is asked of it, so
that the machine need not be quiet, and none is drawn.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import yaml
from transformers import PreTrainedTokenizerFast

from specbench_cli.config.sweep import settings
from specbench_cli.models import resolve
from specbench_cli.report.figures import frontier
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.markdown_table import table
from specbench_cli.report.reading import read
from specbench_cli.stats.difference import MeanDifference
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Record
from specbench_cli.summary import formats, metrics
from specbench_cli.summary.evidence import score_difference
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import Summary

TASKS = {"steps": "chains"}
"""The task of rules, if it is not `mini`."""
RULES = {
    "tokens": (
        "typical.epsilon=0.03,0.1,0.2,0.4",
        "lenient.factor=0.03,0.1,0.3,0.6",
        "judge.threshold=0.3,0.5,0.7,0.9",
    ),
    "steps": (
        "specreason.threshold=2,4,6,8",
        "atts.alpha=0.1,0.3,0.5,0.8",
        # Words of the task's own lines: the target takes over where a probe has them.
        "speculative-thinking.reflect=together,has,the,a",
    ),
}
"""The settings of rules that bring their random rows themselves."""
WANTED = ("river", "garden")
ROWS = {
    "exits": [
        *({"fill": "copy", "threshold": at} for at in (0.5, 0.7, 0.9, 0.97)),
        *({"fill": "copy", "gate": "random", "rate": at} for at in (0.4, 0.55, 0.7, 0.9)),
    ],
    "words": [{"width": 40, "weight": at, "margin": 0.5} for at in (2.5, 5.0, 10.0, 20.0)],
}
"""The settings of the others, with their controls."""
METHODS = {"exits": "specee", "words": "cdsl"}
HEADINGS = (
    "row", "rate", "tok/fwd", "accuracy", "less vanilla's", "over random", "at its rate of",
    "draft discarded", "scored", "n",
)  # fmt: skip


class Told(NamedTuple):
    """A row, what it is over its random row, and by how much its rate is above that of it."""

    label: str
    over: MeanDifference
    apart: float


MORE = {"exits": ("work a token",), "words": ("words held", "looks ahead")}


SURE = 0.05
"""How far a random row's rate may be off for its row to be told beside it: as in the reports."""


def main() -> None:
    """Run what is lacking, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rules", choices=(*RULES, *ROWS), action="append", help="default: all")
    parser.add_argument("--limit", default="120")
    parser.add_argument("--figure", type=Path, help="where to draw them, a panel a kind")
    args = parser.parse_args()
    summaries, told = dict[str, Summary](), list[Told]()
    for rules in args.rules or (*RULES, *ROWS):
        run = _run(rules, args.folder / rules, args.limit)
        summaries[rules] = read(run).summary
        print(f"\n## {rules}: {_asked(summaries[rules])}\n")
        told += _table(rules, run, summaries[rules])
    print(f"\n{_verdicts(told)}")
    if args.figure:
        _draw(summaries, args.figure)


def _run(rules: str, folder: Path, limit: str) -> RunDir:
    """The run of such rules, done as far as it is lacking."""
    words = ["run", "--task", TASKS.get(rules, "mini"), "--limit", limit]
    words += ["--threads", "1", "--allow-noise", "--out", str(folder)]
    words += [word for sweep in RULES.get(rules, ()) for word in ("--sweep", sweep)]
    if rules in ROWS:
        words += ["--config", str(_written(rules, folder.with_suffix(".yaml")))]
    if (folder / "manifest.json").exists():
        done = RunDir.open(folder).manifest["status"] == "finished"
        words = [] if done else ["run", "--resume", str(folder)]
    if words:
        subprocess.run([sys.executable, "-m", "specbench_cli", *words], check=True)
    return RunDir.open(folder)


def _asked(summary: Summary) -> str:
    """Its task, and how many questions of it were asked."""
    return ", ".join(f"{n} questions of {task}" for task, n in summary.prompts.items())


def _table(rules: str, run: RunDir, summary: Summary) -> list[Told]:
    """Print the rows; what is to be told of them at the end."""
    cells = dict[str, list[Record]]()
    for record in run.records():
        cells.setdefault(record.label, []).append(record)
    rates = {row.label: _rate(row, cells[row.label]) for row in summary.rows}
    random = [row for row in summary.rows if _tossed(row) and rates[row.label] is not None]
    lines, told = [], list[Told]()
    for row in sorted(summary.rows, key=_place):
        near = _nearest(row, random, rates, cells)
        over = None if near is None else score_difference(cells[near.label], cells[row.label])
        if over is not None and near is not None:
            apart = (rates[row.label] or 0) - (rates[near.label] or 0)
            told.append(Told(row.label, over, apart))
        at = None if near is None else rates[near.label]
        lines.append([*_line(row, rates, over, at), *_more(rules, cells[row.label])])
    print(table((*HEADINGS, *MORE.get(rules, ())), lines))
    return told


def _place(row: MethodSummary) -> tuple[bool, str, bool]:
    """Lossless rows first, a random row behind that which it is like: no order of speed."""
    like = row.params.get("like")
    return not row.lossless or like is not None, like or row.label, like is not None


def _verdicts(told: Sequence[Told]) -> str:
    """Which rows are above random acceptance, below it, neither, and which cannot be told."""
    near = [each for each in told if abs(each.apart) <= SURE]
    kinds = {
        "above random acceptance": [e for e in near if _end(e.over.low) > 0],
        "below it": [e for e in near if _end(e.over.high) < 0],
        "neither is shown": [e for e in near if _end(e.over.low) <= 0 <= _end(e.over.high)],
        "no random row at about its rate": [e for e in told if abs(e.apart) > SURE],
    }
    lines = [f"- {kind}: {', '.join(e.label for e in found)}" for kind, found in kinds.items()]
    return "\n".join(line for line in lines if not line.endswith(": "))


def _end(value: float | None) -> float:
    """An end of an interval; of one without ends 0, which is neither above nor below."""
    return value or 0.0


def _draw(summaries: Mapping[str, Summary], file: Path) -> None:
    """A panel a kind: accuracy against speed, by counters alone."""
    rows = -(-len(summaries) // 2)
    with style.applied():
        figure = style.blank(style.PAGE_IN, 3.4 * rows, layout="constrained")
        for place, (rules, summary) in enumerate(summaries.items(), 1):
            axes = figure.add_subplot(rows, min(2, len(summaries)), place)
            lossy = tuple(replace(row, speedup=None) for row in summary.lossy)
            frontier.panel(replace(summary, lossy=lossy)).draw(axes)
            axes.set_title(f"{rules}: {_asked(summary)}", fontsize=7)
            axes.legend(
                fontsize=5.5, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2)
            )
        figure.savefig(file, metadata={"Date": None})


def _written(rules: str, file: Path) -> Path:
    """A configuration with the rows of such rules."""
    name = METHODS[rules]
    rows = [
        {"name": name, "label": " ".join([name, *settings(params)]), "params": params}
        for params in ROWS[rules]
    ]
    if rules == "words":
        rows = [{**row, "params": {**row["params"], "words": list(WANTED)}} for row in rows]
    file.write_text(yaml.safe_dump({"methods": [*rows, "sps"]}))
    return file


def _tossed(row: MethodSummary) -> bool:
    """Whether a coin stands in its rule's place."""
    return row.control or "gate=random" in row.label


def _rate(row: MethodSummary, cells: Sequence[Record]) -> float | None:
    """Of what a rule was asked about the share that passed; of early exits the tokens that left."""
    left = [(record.extra or {}).get("exits") for record in cells]
    if None in left or not cells:
        return row.rule_rate
    return sum(map(float, filter(None, left))) / sum((r.n_tokens or 0) - 1 for r in cells)


def _fill(cells: Sequence[Record]) -> object:
    """How rows are filled that tokens which leave early do not have."""
    return cells[0].params.effective.get("fill")


def _more(rules: str, cells: Sequence[Record]) -> list[object]:
    """What only such rules have."""
    if rules == "exits":
        prompts = len(cells)  # each is one whole forward
        work = sum(record.target_equivalents or 0 for record in cells) - prompts
        if not sum(record.target_forwards or 0 for record in cells):
            return [formats.NONE]
        return [formats.number(work / (sum(record.n_tokens or 0 for record in cells) - prompts))]
    if rules == "words":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("embedded").path)
        outputs = [tokenizer.decode(record.output_ids).lower() for record in cells]
        held = sum(word in output for output in outputs for word in WANTED)
        ahead = sum((record.extra or {}).get("lookaheads", 0) for record in cells)
        return [formats.percent(held / len(WANTED) / len(outputs)), formats.number(float(ahead), 0)]
    return []


def _nearest(
    row: MethodSummary,
    random: Sequence[MethodSummary],
    rates: Mapping[str, float | None],
    cells: Mapping[str, list[Record]],
) -> MethodSummary | None:
    """The random row that let about as many pass: of its own method, where rules decide on steps,
    and which fills missing rows alike, where tokens leave early."""
    rate, fill = rates[row.label], _fill(cells[row.label])
    own = [other for other in random if other.method == row.method] or random
    own = [other for other in own if _fill(cells[other.label]) == fill] or own
    if rate is None or not own or _tossed(row) or row.lossless:
        return None
    return min(own, key=lambda other: abs((rates[other.label] or 0) - rate))


def _line(
    row: MethodSummary,
    rates: Mapping[str, float | None],
    over: MeanDifference | None,
    at: float | None,
) -> list[object]:
    """A row's figures."""
    ends = (None, None, None) if over is None else (over.mean, over.low, over.high)
    beside = (
        (formats.NONE, formats.NONE)
        if over is None
        else (formats.points(*ends), formats.percent(at))
    )
    figures = formats.percent(rates[row.label]), formats.number(row.per_forward)
    ledger = (formats.number(row.draft_discarded, 0), formats.number(row.scored, 0))
    lost = (formats.percent(row.score, 1), metrics.lost(row))
    return [row.label, *figures, *lost, *beside, *ledger, row.n_prompts]


if __name__ == "__main__":
    main()
