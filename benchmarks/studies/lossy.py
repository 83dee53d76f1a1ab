"""Compare lossy accept rules at four settings each with random controls.

    python benchmarks/studies/lossy.py FOLDER --limit 120 \
        --figure results/experiments/lossy.svg
    python benchmarks/studies/lossy.py FOLDER --limit 240 --rules steps

Run the embedded pair, greedy, once for each kind of rule, and keep the runs in FOLDER/KIND.
Interrupted runs are resumed. Print a Markdown table for each kind: tokens per target forward,
accuracy, accuracy lost against vanilla, and accuracy gained over the random control with the
nearest acceptance rate. Rules over steps also show discarded draft tokens and tokens scored to
judge. Early exits also show the work per token, in target forwards, and the exit rate. Keyword
rules show the share of keywords in the outputs. The last lines list the methods that are more
accurate than random acceptance at about the same rate. Rules over steps run on `chains`, the others
on `mini`. Nothing is timed, so the machine need not be quiet.
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

from specbench_cli.config.sweep import format_params
from specbench_cli.models import resolve
from specbench_cli.report.figures import frontier
from specbench_cli.report.figures.drawing import style
from specbench_cli.report.markdown_table import table
from specbench_cli.report.report_data import read_report_data
from specbench_cli.stats.difference import MeanDifference
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Record
from specbench_cli.summary import formats, metrics
from specbench_cli.summary.evidence import score_difference
from specbench_cli.summary.metrics import MethodSummary
from specbench_cli.summary.summary import Summary

TASKS = {"steps": "chains"}
"""Task of a kind of rule, if not `mini`."""
RULES = {
    "tokens": (
        "typical.epsilon=0.03,0.1,0.2,0.4",
        "lenient.factor=0.03,0.1,0.3,0.6",
        "judge.threshold=0.3,0.5,0.7,0.9",
    ),
    "steps": (
        "specreason.threshold=2,4,6,8",
        "atts.alpha=0.1,0.3,0.5,0.8",
        # Words that occur in the task: the target takes over when a probe contains one.
        "speculative-thinking.reflect=together,has,the,a",
    ),
}
"""Sweeps of rules whose random controls specbench adds."""
WANTED = ("river", "garden")
ROWS = {
    "exits": [
        *({"fill": "copy", "threshold": at} for at in (0.5, 0.7, 0.9, 0.97)),
        *({"fill": "copy", "gate": "random", "rate": at} for at in (0.4, 0.55, 0.7, 0.9)),
    ],
    "words": [{"width": 40, "weight": at, "margin": 0.5} for at in (2.5, 5.0, 10.0, 20.0)],
}
"""Parameters of the other methods, with their controls."""
METHODS = {"exits": "specee", "words": "cdsl"}
HEADINGS = (
    "row", "rate", "tok/fwd", "accuracy", "less vanilla's", "over random", "at its rate of",
    "draft discarded", "scored", "n",
)  # fmt: skip


class RateMatchedComparison(NamedTuple):
    """Comparison of a method with the random control of the nearest acceptance rate.

    Attributes:
        difference: accuracy of the method minus that of the control.
        rate_difference: acceptance rate of the method minus that of the control.
    """

    label: str
    difference: MeanDifference
    rate_difference: float


EXTRA_HEADINGS = {"exits": ("work a token",), "words": ("words held", "looks ahead")}


MAX_RATE_DIFFERENCE = 0.05
"""Maximum difference of acceptance rates for a comparison, as in reports."""


def main() -> None:
    """Run what is missing, print the tables, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rules", choices=(*RULES, *ROWS), action="append", help="default: all")
    parser.add_argument("--limit", default="120")
    parser.add_argument("--figure", type=Path, help="file of the figure, with a panel per kind")
    args = parser.parse_args()
    summaries, matched = dict[str, Summary](), list[RateMatchedComparison]()
    for rules in args.rules or (*RULES, *ROWS):
        run = _run(rules, args.folder / rules, args.limit)
        summaries[rules] = read_report_data(run).summary
        print(f"\n## {rules}: {_describe_prompts(summaries[rules])}\n")
        matched += _print_table(rules, run, summaries[rules])
    print(f"\n{_summarise(matched)}")
    if args.figure:
        _draw_figure(summaries, args.figure)


def _run(rules: str, folder: Path, limit: str) -> RunDir:
    """Return the run of a kind of rule; start or resume it if it is not finished."""
    words = ["run", "--task", TASKS.get(rules, "mini"), "--limit", limit]
    words += ["--threads", "1", "--allow-noise", "--out", str(folder)]
    words += [word for sweep in RULES.get(rules, ()) for word in ("--sweep", sweep)]
    if rules in ROWS:
        words += ["--config", str(_write_config(rules, folder.with_suffix(".yaml")))]
    if (folder / "manifest.json").exists():
        done = RunDir.open(folder).manifest["status"] == "finished"
        words = [] if done else ["run", "--resume", str(folder)]
    if words:
        subprocess.run([sys.executable, "-m", "specbench_cli", *words], check=True)
    return RunDir.open(folder)


def _describe_prompts(summary: Summary) -> str:
    """Return the tasks of a run and their numbers of questions as text."""
    return ", ".join(f"{n} questions of {task}" for task, n in summary.prompts.items())


def _print_table(rules: str, run: RunDir, summary: Summary) -> list[RateMatchedComparison]:
    """Print the table of a kind of rule and return its rate-matched comparisons."""
    records = dict[str, list[Record]]()
    for record in run.records():
        records.setdefault(record.label, []).append(record)
    rates = {row.label: _pass_rate(row, records[row.label]) for row in summary.rows}
    random = [
        row for row in summary.rows if _is_random_control(row) and rates[row.label] is not None
    ]
    lines, matched = [], list[RateMatchedComparison]()
    for row in sorted(summary.rows, key=_sort_key):
        match = _find_rate_match(row, random, rates, records)
        difference = (
            None if match is None else score_difference(records[match.label], records[row.label])
        )
        if difference is not None and match is not None:
            rate_difference = (rates[row.label] or 0) - (rates[match.label] or 0)
            matched.append(RateMatchedComparison(row.label, difference, rate_difference))
        at = None if match is None else rates[match.label]
        lines.append(
            [*_table_cells(row, rates, difference, at), *_extra_cells(rules, records[row.label])]
        )
    print(table((*HEADINGS, *EXTRA_HEADINGS.get(rules, ())), lines))
    return matched


def _sort_key(row: MethodSummary) -> tuple[bool, str, bool]:
    """Return a sort key: lossless methods first, and each random control after its method."""
    control_of = row.params.get("like")
    return (
        not row.lossless or control_of is not None,
        control_of or row.label,
        control_of is not None,
    )


def _summarise(matched: Sequence[RateMatchedComparison]) -> str:
    """Return lines that list which methods are better or worse than random acceptance."""
    match = [each for each in matched if abs(each.rate_difference) <= MAX_RATE_DIFFERENCE]
    kinds = {
        "above random acceptance": [e for e in match if _limit_or_zero(e.difference.low) > 0],
        "below it": [e for e in match if _limit_or_zero(e.difference.high) < 0],
        "neither is shown": [
            e
            for e in match
            if _limit_or_zero(e.difference.low) <= 0 <= _limit_or_zero(e.difference.high)
        ],
        "no random control at about its rate": [
            e for e in matched if abs(e.rate_difference) > MAX_RATE_DIFFERENCE
        ],
    }
    lines = [f"- {kind}: {', '.join(e.label for e in found)}" for kind, found in kinds.items()]
    return "\n".join(line for line in lines if not line.endswith(": "))


def _limit_or_zero(value: float | None) -> float:
    """Return a limit of an interval, or 0 if there is none, so that neither side is shown."""
    return value or 0.0


def _draw_figure(summaries: Mapping[str, Summary], file: Path) -> None:
    """Draw accuracy against tokens per forward, a panel per kind of rule."""
    rows = -(-len(summaries) // 2)
    with style.figure_style():
        figure = style.new_figure(style.PAGE_IN, 3.4 * rows, layout="constrained")
        for place, (rules, summary) in enumerate(summaries.items(), 1):
            axes = figure.add_subplot(rows, min(2, len(summaries)), place)
            lossy = tuple(replace(row, speedup=None) for row in summary.lossy)
            frontier.panel(replace(summary, lossy=lossy)).draw(axes)
            axes.set_title(f"{rules}: {_describe_prompts(summary)}", fontsize=7)
            axes.legend(
                fontsize=5.5, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2)
            )
        figure.savefig(file, metadata={"Date": None})


def _write_config(rules: str, file: Path) -> Path:
    """Write a configuration with the methods of a kind of rule and return its path."""
    name = METHODS[rules]
    rows = [
        {"name": name, "label": " ".join([name, *format_params(params)]), "params": params}
        for params in ROWS[rules]
    ]
    if rules == "words":
        rows = [{**row, "params": {**row["params"], "words": list(WANTED)}} for row in rows]
    file.write_text(yaml.safe_dump({"methods": [*rows, "sps"]}))
    return file


def _is_random_control(row: MethodSummary) -> bool:
    """Return True if the method accepts at random."""
    return row.control or "gate=random" in row.label


def _pass_rate(row: MethodSummary, records: Sequence[Record]) -> float | None:
    """Return the acceptance rate of a rule, or the exit rate of a method with early exits."""
    exits = [(record.extra or {}).get("exits") for record in records]
    if None in exits or not records:
        return row.rule_rate
    return sum(map(float, filter(None, exits))) / sum((r.n_tokens or 0) - 1 for r in records)


def _fill(records: Sequence[Record]) -> object:
    """Return how the KV cache of skipped layers is filled after an early exit."""
    return records[0].params.effective.get("fill")


def _extra_cells(rules: str, records: Sequence[Record]) -> list[object]:
    """Return the table cells that only this kind of rule has."""
    if rules == "exits":
        prompts = len(records)  # the prefill of each prompt is one whole forward
        work = sum(record.target_equivalents or 0 for record in records) - prompts
        if not sum(record.target_forwards or 0 for record in records):
            return [formats.NONE]
        return [formats.number(work / (sum(record.n_tokens or 0 for record in records) - prompts))]
    if rules == "words":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("embedded").path)
        outputs = [tokenizer.decode(record.output_ids).lower() for record in records]
        n_found = sum(word in output for output in outputs for word in WANTED)
        ahead = sum((record.extra or {}).get("lookaheads", 0) for record in records)
        return [
            formats.percent(n_found / len(WANTED) / len(outputs)),
            formats.number(float(ahead), 0),
        ]
    return []


def _find_rate_match(
    row: MethodSummary,
    random: Sequence[MethodSummary],
    rates: Mapping[str, float | None],
    records: Mapping[str, list[Record]],
) -> MethodSummary | None:
    """Return the random control with the nearest acceptance rate, or None if there is none.

    It belongs to the same method for rules over steps, and fills the KV cache in the same way for
    early exits.
    """
    rate, fill = rates[row.label], _fill(records[row.label])
    own = [other for other in random if other.method == row.method] or random
    own = [other for other in own if _fill(records[other.label]) == fill] or own
    if rate is None or not own or _is_random_control(row) or row.lossless:
        return None
    return min(own, key=lambda other: abs((rates[other.label] or 0) - rate))


def _table_cells(
    row: MethodSummary,
    rates: Mapping[str, float | None],
    difference: MeanDifference | None,
    at: float | None,
) -> list[object]:
    """Return the table cells of a method."""
    ends = (
        (None, None, None)
        if difference is None
        else (difference.mean, difference.low, difference.high)
    )
    comparison = (
        (formats.NONE, formats.NONE)
        if difference is None
        else (formats.points(*ends), formats.percent(at))
    )
    figures = formats.percent(rates[row.label]), formats.number(row.per_forward)
    discarded = (formats.number(row.draft_discarded, 0), formats.number(row.scored, 0))
    accuracy = (formats.percent(row.score, 1), metrics.accuracy_loss(row))
    return [row.label, *figures, *accuracy, *comparison, *discarded, row.n_prompts]


if __name__ == "__main__":
    main()
