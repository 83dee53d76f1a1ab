"""Which lossy rules know anything? Each at four settings, beside its controls.

    python tests/benchmarks/lossy.py FOLDER --limit 120
    python tests/benchmarks/lossy.py FOLDER --rules steps --limit 240

Runs `specbench run` with the embedded pair, greedy, keeps it in FOLDER and prints its lossy rows as
Markdown: tokens a target forward, accuracy, what that is less than vanilla's, and by how much it is
more than that of the random row whose rate came nearest; of rules over steps also what the draft
wrote in vain and what the target read to judge. Rules over tokens are run on `mini`, rules over
steps on `chains`, whose answers have some. No time is asked of it, so that the machine need not be
quiet.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from specbench_cli.report.markdown_table import table
from specbench_cli.report.numbers.evidence import score_over
from specbench_cli.report.numbers.row import Row
from specbench_cli.report.reading import read
from specbench_cli.report.terminal import text
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Record

RULES = {
    "tokens": (
        "mini",
        (
            "typical.epsilon=0.03,0.1,0.2,0.4",
            "lenient.factor=0.03,0.1,0.3,0.6",
            "judge.threshold=0.3,0.5,0.7,0.9",
        ),
    ),
    "steps": (
        "chains",
        (
            "specreason.threshold=2,4,6,8",
            "atts.alpha=0.1,0.3,0.5,0.8",
            # Words of the task's own lines: the target takes over where a probe has them.
            "speculative-thinking.reflect=together,has,the,a",
        ),
    ),
}
"""The task and the settings of each kind of rules."""
HEADINGS = (
    "row", "rate", "tok/fwd", "accuracy", "less vanilla's", "over random", "at its rate of",
    "draft discarded", "scored", "n",
)  # fmt: skip


def main() -> None:
    """Run what is lacking, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rules", choices=RULES, default="tokens")
    parser.add_argument("--limit", default="120")
    parser.add_argument("--sweep", action="append", help="in place of the settings of --rules")
    args = parser.parse_args()
    task, usual = RULES[args.rules]
    sweeps = [word for sweep in args.sweep or usual for word in ("--sweep", sweep)]
    words = ["run", *sweeps, "--task", task, "--limit", args.limit, "--threads", "1"]
    again = ["run", "--resume", str(args.folder)]
    begun = (args.folder / "manifest.json").exists()
    words = again if begun else [*words, "--allow-noise", "--out", str(args.folder)]
    subprocess.run([sys.executable, "-m", "specbench_cli", *words], check=True)
    run = RunDir.open(args.folder)
    summary, cells = read(run).summary, dict[str, list[Record]]()
    for record in run.records():
        cells.setdefault(record.label, []).append(record)
    random = [row for row in summary.rows if row.control and row.rule_rate is not None]
    print(table(HEADINGS, (_line(row, random, cells) for row in summary.rows)))


def _line(row: Row, random: Sequence[Row], cells: Mapping[str, list[Record]]) -> list[object]:
    """A row's figures, against the random one that let about as many pass: of its own method, where
    rules decide on steps."""
    rate = row.rule_rate
    over, at = text.NONE, text.NONE
    own = [other for other in random if other.method == row.method] or random
    if rate is not None and own and not row.control:
        near = min(own, key=lambda other: abs((other.rule_rate or 0) - rate))
        found = score_over(cells[near.label], cells[row.label])
        ends = (None, None, None) if found is None else (found.mean, found.low, found.high)
        over, at = text.points(*ends), text.percent(near.rule_rate)
    figures = text.percent(rate), text.number(row.per_forward), text.percent(row.score, 1)
    ledger = (text.number(row.draft_discarded, 0), text.number(row.scored, 0))
    return [row.label, *figures, text.lost(row), over, at, *ledger, row.n_prompts]


if __name__ == "__main__":
    main()
