"""Which lossy rules know anything? Each at four settings, beside its controls.

    python tests/benchmarks/lossy.py FOLDER --limit 120
    python tests/benchmarks/lossy.py FOLDER --rules steps --limit 240
    python tests/benchmarks/lossy.py FOLDER --rules exits --limit 120
    python tests/benchmarks/lossy.py FOLDER --rules words --limit 24

Runs `specbench run` with the embedded pair, greedy, keeps it in FOLDER and prints its lossy rows as
Markdown: tokens a target forward, accuracy, what that is less than vanilla's, and by how much it is
more than that of the random row whose rate came nearest; of rules over steps also what the draft
wrote in vain and what the target read to judge; of early exits the work of a token, in whole
forwards of the target, and how many tokens leave early; where words are wanted, how many of them
the outputs hold. Rules over steps are run on `chains`, whose answers have some, the others on
`mini`. No time is asked of it, so that the machine need not be quiet.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import yaml
from transformers import PreTrainedTokenizerFast

from specbench_cli.config.sweep import settings
from specbench_cli.models import resolve
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
"""The task and the settings of rules that bring their random rows themselves."""
WANTED = ("river", "garden")
ROWS = {
    "exits": [
        {"fill": fill, **gate}
        for fill, gate in product(
            ("copy", "none"),
            (
                *({"threshold": at} for at in (0.5, 0.7, 0.9, 0.97)),
                *({"gate": "random", "rate": at} for at in (0.4, 0.55, 0.7, 0.9)),
            ),
        )
    ],
    "words": [
        *({"width": 40, "weight": at, "margin": 0.5} for at in (2.5, 5.0, 10.0, 20.0)),
        *({"width": 40, "weight": at, "mode": "cdlh"} for at in (5.0, 20.0)),
    ],
}
"""The settings of the others, with their controls."""
METHODS = {"exits": "specee", "words": "cdsl"}
HEADINGS = (
    "row", "rate", "tok/fwd", "accuracy", "less vanilla's", "over random", "at its rate of",
    "draft discarded", "scored", "n",
)  # fmt: skip
MORE = {"exits": ("work a token",), "words": ("words held", "looks ahead")}


def main() -> None:
    """Run what is lacking, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rules", choices=(*RULES, *ROWS), default="tokens")
    parser.add_argument("--limit", default="120")
    parser.add_argument("--sweep", action="append", help="in place of the settings of --rules")
    args = parser.parse_args()
    task, usual = RULES.get(args.rules, ("mini", ()))
    words = ["run", "--task", task, "--limit", args.limit, "--threads", "1", "--allow-noise"]
    words += [word for sweep in args.sweep or usual for word in ("--sweep", sweep)]
    if args.rules in ROWS and not args.sweep:
        words += ["--config", str(_written(args.rules, args.folder.with_suffix(".yaml")))]
    again = ["run", "--resume", str(args.folder)]
    begun = (args.folder / "manifest.json").exists()
    words = again if begun else [*words, "--out", str(args.folder)]
    subprocess.run([sys.executable, "-m", "specbench_cli", *words], check=True)
    run = RunDir.open(args.folder)
    summary, cells = read(run).summary, dict[str, list[Record]]()
    for record in run.records():
        cells.setdefault(record.label, []).append(record)
    rates = {row.label: _rate(row, cells[row.label]) for row in summary.rows}
    random = [row for row in summary.rows if _tossed(row) and rates[row.label] is not None]
    lines = [
        [*_line(row, random, rates, cells), *_more(args.rules, cells[row.label])]
        for row in summary.rows
    ]
    print(table((*HEADINGS, *MORE.get(args.rules, ())), lines))


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


def _tossed(row: Row) -> bool:
    """Whether a coin stands in its rule's place."""
    return row.control or "gate=random" in row.label


def _rate(row: Row, cells: Sequence[Record]) -> float | None:
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
            return [text.NONE]
        return [text.number(work / (sum(record.n_tokens or 0 for record in cells) - prompts))]
    if rules == "words":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("embedded").path)
        outputs = [tokenizer.decode(record.output_ids).lower() for record in cells]
        held = sum(word in output for output in outputs for word in WANTED)
        ahead = sum((record.extra or {}).get("lookaheads", 0) for record in cells)
        return [text.percent(held / len(WANTED) / len(outputs)), text.number(float(ahead), 0)]
    return []


def _line(
    row: Row,
    random: Sequence[Row],
    rates: Mapping[str, float | None],
    cells: Mapping[str, list[Record]],
) -> list[object]:
    """A row's figures, against the random one that let about as many pass: of its own method, where
    rules decide on steps, and which fills missing rows alike, where tokens leave early."""
    rate = rates[row.label]
    over, at = text.NONE, text.NONE
    own = [other for other in random if other.method == row.method] or random
    fill = _fill(cells[row.label])
    own = [other for other in own if _fill(cells[other.label]) == fill] or own
    if rate is not None and own and not _tossed(row):
        near = min(own, key=lambda other: abs((rates[other.label] or 0) - rate))
        found = score_over(cells[near.label], cells[row.label])
        ends = (None, None, None) if found is None else (found.mean, found.low, found.high)
        over, at = text.points(*ends), text.percent(rates[near.label])
    figures = text.percent(rate), text.number(row.per_forward), text.percent(row.score, 1)
    ledger = (text.number(row.draft_discarded, 0), text.number(row.scored, 0))
    return [row.label, *figures, text.lost(row), over, at, *ledger, row.n_prompts]


if __name__ == "__main__":
    main()
