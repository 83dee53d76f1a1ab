"""Compare the rejection rate of `atts` with its nominal rate, by turn and on another task.

    python benchmarks/studies/conformal.py --figure results/experiments/conformal.svg

Calibration and test use different questions in the form of the task `chains`. The n-th line of an
answer is its turn n. The known scores are those of the first chunk of each calibration question.
All figures are counts of decisions; nothing is timed.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from scipy.stats import binomtest
from torch import Tensor
from transformers import AutoTokenizer

from methods.atts import Atts, AttsParams, p_value
from recipes.tasks.rows import chain_rows
from specbench_cli.api import Draft, Segments, Session, Step, mean_log_prob
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.models.resolve import resolve
from specbench_cli.tasks.template import render_prompt
from specbench_cli.training.generated import GeneratedConversation

ALPHAS = (0.1, 0.2, 0.4, 0.6)
SAMPLING = Sampling("rejection", 0.8, seed=1)
SUMS, VERSES = ("more", "sharing", "together"), ("poem_reversed",)
BUDGET = 64
MIN_CHUNKS = 500
"""Minimum number of chunks of a rate that is printed."""
BATCH_SIZE = 8
"""Batch size of the count with a barrier."""


class LoggedAtts(Atts):
    """`atts` that keeps the score of the last judged chunk."""

    def settle(self, session: Session, spans: Segments, draft: Draft, rows: Tensor) -> Step:
        """See `Atts`."""
        if draft.nodes and not spans.is_replacing:
            self.score = -mean_log_prob(rows, draft)
        return super().settle(session, spans, draft, rows)


class EmbeddedModels:
    """The embedded models and their tokenizer."""

    def __init__(self) -> None:
        target = resolve("embedded")
        folders = {"target": target.path, "draft": resolve(target.draft or "").path}
        self.tokenizer = AutoTokenizer.from_pretrained(target.path)
        decoders = {role: load_decoder(path, name=role) for role, path in folders.items()}
        self.workspace = Workspace(decoders, 256, tokenizer=self.tokenizer)
        self.stop = StopRule(frozenset({self.tokenizer.eos_token_id}), BUDGET)

    def request(self, row: GeneratedConversation) -> Request:
        """Return the request of a question."""
        ids = render_prompt(self.tokenizer, [("user", row["turns"][0])], raw=False)
        return Request(row["id"], 1, tuple(ids), self.stop)

    def chunks(
        self,
        rows: Sequence[GeneratedConversation],
        alpha: float,
        known: Sequence[float] = (),
        most: int = BUDGET,
    ) -> Iterator[tuple[int, float, bool]]:
        """Yield turn, score and acceptance of the first chunks of each question."""
        for row in rows:
            session = Session(
                self.workspace, self.request(row), SAMPLING, memory=create_memory(known)
            )
            method, turn = LoggedAtts(AttsParams(alpha=alpha, known=0)), 0
            for step in method.generate(session):
                if "stood" in step.extra:
                    turn += 1
                    yield turn, method.score, bool(step.extra["stood"])
                    if turn == most:
                        break

    def first_scores(self, rows: Sequence[GeneratedConversation]) -> list[float]:
        """Return the sorted scores of the first chunks."""
        return sorted(score for _, score, _ in self.chunks(rows, 0.0, most=1))

    def count_forwards(
        self, rows: Sequence[GeneratedConversation], known: Sequence[float], *, barrier: bool
    ) -> list[int]:
        """Return the numbers of target and draft forwards of batched decoding at alpha 0.4."""
        counts = [0, 0]
        params = AttsParams(alpha=0.4, known=0, barrier=barrier)
        for at in range(0, len(rows), BATCH_SIZE):
            requests = [self.request(row) for row in rows[at : at + BATCH_SIZE]]
            batch = Batch(self.workspace, requests, SAMPLING, memory=create_memory(known))
            for _ in Atts(params).generate_batch(batch):
                pass
            for forward in batch.meter.forwards:
                counts[forward.model != "target"] += 1
        return counts


def create_memory(known: Sequence[float]) -> Memory:
    """Return a memory with calibration scores."""
    memory = Memory()
    memory["scores"] = list(known)
    return memory


def nominal_rate(alpha: float, n: int) -> float:
    """Return the rejection rate of exchangeable chunks, given n known scores without ties."""
    return math.floor(alpha * (n + 1)) / (n + 1)


def format_rate(rejected: int, n: int) -> str:
    """Return a share and its 95% interval (Clopper-Pearson) as text."""
    interval = binomtest(rejected, n).proportion_ci(0.95)
    return f"{rejected / n:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_figure(found: dict[float, dict[int, tuple[int, int]]], to: str) -> None:
    """Draw the rejection rate by turn, one line per alpha; dotted lines are nominal rates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for mark, (alpha, turns) in zip("osD^", found.items(), strict=True):
        places = [turn for turn, (_, n) in turns.items() if n >= MIN_CHUNKS]
        shares = [turns[turn][0] / turns[turn][1] for turn in places]
        ends = [binomtest(*turns[turn]).proportion_ci(0.95) for turn in places]
        low = [share - end.low for share, end in zip(shares, ends, strict=True)]
        high = [end.high - share for share, end in zip(shares, ends, strict=True)]
        line, *_ = axes.errorbar(
            places, shares, yerr=(low, high), marker=mark, capsize=2, label=f"alpha {alpha:g}"
        )
        axes.axhline(alpha, linestyle=":", color=line.get_color())
    axes.set(xlabel="turn (calibrated on turn 1)", ylabel="share rejected (95%)", ylim=(0, 1))
    axes.set_xticks(range(1, 1 + max(map(max, found.values()))))
    axes.legend()
    figure.savefig(to, metadata={"Date": None})


@torch.inference_mode()
def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--per-template", type=int, default=60, help="9 of sums, 3 of verses")
    parser.add_argument("--figure", help="file of the figure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models, n = EmbeddedModels(), args.per_template
    sums = chain_rows(1, n, SUMS)
    known = models.first_scores(sums)
    print(f"calibrated on {len(known)} first chunks of sums, {len(set(known))} of them different\n")
    tests = chain_rows(2, n, SUMS)
    found: dict[float, dict[int, tuple[int, int]]] = {}
    for alpha in ALPHAS:
        turns: dict[int, list[bool]] = defaultdict(list)
        for turn, _, stood in models.chunks(tests, alpha, known):
            turns[turn].append(not stood)
        found[alpha] = {
            turn: (sum(rejected), len(rejected)) for turn, rejected in sorted(turns.items())
        }
    shown_turns = sorted(
        {turn for by in found.values() for turn, (_, m) in by.items() if m >= MIN_CHUNKS}
    )
    head = ["alpha", "nominal", *(f"turn {turn}" for turn in shown_turns)]
    cells = [
        [
            f"{alpha:g}",
            f"{nominal_rate(alpha, len(known)):.3f}",
            *(format_rate(*by[turn]) for turn in shown_turns),
        ]
        for alpha, by in found.items()
    ]
    print(format_table(head, cells))
    print("chunks:", {alpha: [m for _, m in by.values()] for alpha, by in found.items()})
    verses = chain_rows(2, math.ceil(3 * n), VERSES)
    scores = [score for _, score, _ in models.chunks(verses, 0.0, most=1)]
    by_verses = models.first_scores(chain_rows(1, math.ceil(3 * n), VERSES))
    print(f"\n{len(scores)} first chunks of verses:\n")
    head = ["alpha", "calibrated on sums", f"calibrated on {len(by_verses)} verses"]
    cells = []
    for alpha in ALPHAS:
        rejected = [
            sum(p_value(score, of) <= alpha for score in scores) for of in (known, by_verses)
        ]
        cells.append([f"{alpha:g}", *(format_rate(each, len(scores)) for each in rejected)])
    print(format_table(head, cells))
    subset = tests[:: max(1, len(tests) // 96)][:96]
    counts = {
        barrier: models.count_forwards(subset, known, barrier=barrier) for barrier in (False, True)
    }
    print(f"\n{len(subset)} texts, {BATCH_SIZE} at a time, alpha 0.4:\n")
    head = ["", "forwards of the target", "of the draft"]
    words = {False: "asynchronous", True: "with a barrier"}
    print(format_table(head, [[words[key], *map(str, each)] for key, each in counts.items()]))
    if args.figure:
        draw_figure(found, args.figure)


if __name__ == "__main__":
    main()
