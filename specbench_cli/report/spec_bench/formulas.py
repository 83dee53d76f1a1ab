"""Results by the formulas of Spec-Bench (Xia et al., 2024), to compare with published numbers.

As in `evaluation/speed.py` of github.com/hemingkx/Spec-Bench:

    tokens/s of a question = tokens of all its turns / wall time of all its turns
    tokens/s               = mean over questions
    speedup                = tokens/s of the method / tokens/s of the baseline, a ratio of means
    mean accepted tokens   = tokens committed by a step, mean over all steps of all questions

Spec-Bench does not use the baseline's generated tokens. It tokenizes the baseline's text again, and
subtracts one token per turn for the BOS token that Llama's tokenizer adds. Several runs are
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from specbench_cli.store.schema import BASELINE, Family, Record
from specbench_cli.summary.pairing import untimed_reason
from specbench_cli.summary.summary import ALL

CountTokens = Callable[[str], int]
"""Function that counts the tokens of a text, including special tokens such as BOS."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one question. Tuples have one entry per turn, except `accept_lengths`.

    Attributes:
        turns: Texts of the turns. None if the token ids could not be decoded.
        wall_time: Seconds.
        accept_lengths: Number of committed tokens of each step, over all turns. None if the method
            does not report its steps.
    """

    question_id: int | str
    category: str
    family: Family
    turns: tuple[str, ...] | None
    decoding_steps: tuple[int, ...] | None
    new_tokens: tuple[int, ...]
    wall_time: tuple[float, ...]
    accept_lengths: tuple[int, ...] | None

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(self.new_tokens) / sum(self.wall_time)


Answers = Mapping[str, Sequence[Answer]]
"""Label -> answers of the method, in one repeat of one run. Includes vanilla."""


@dataclass(frozen=True, slots=True)
class SpecBenchResult:
    """Results of a method by Spec-Bench's formulas, over one task family or over all.

    Attributes:
        mean_accepted: Mean accepted tokens. None if the method does not report its steps.
    """

    label: str
    family: str
    tokens_per_s: float
    baseline_tokens_per_s: float
    speedup: float
    mean_accepted: float | None
    questions: int


def collect_answers(
    records: Iterable[Record], decode: Decode | None
) -> dict[int, dict[str, list[Answer]]]:
    """Return repeat -> label -> answers. Omit questions that lack the time of a turn.

    Args:
        records: Records with token ids.
        decode: Converts token ids to text. None leaves the texts None.
    """
    turns: dict[tuple[int, str, str], list[Record]] = {}
    for record in records:
        turns.setdefault((record.pass_, record.label, record.prompt_id), []).append(record)
    found: dict[int, dict[str, list[Answer]]] = {}
    for (pass_, label, _), own in turns.items():
        own.sort(key=lambda record: record.turn)
        if all(untimed_reason(r) is None and r.n_tokens and r.ns.total for r in own):
            found.setdefault(pass_, {}).setdefault(label, []).append(_answer(own, decode))
    return found


def _answer(turns: Sequence[Record], decode: Decode | None) -> Answer:
    first = turns[0]
    number = first.prompt_id.partition("/")[2]
    steps = [r.steps for r in turns if r.steps is not None]
    complete = len(steps) == len(turns)
    return Answer(
        int(number) if number.isdecimal() else number,
        first.category,
        first.family,
        None if decode is None else tuple(decode(r.output_ids or ()).strip() for r in turns),
        tuple(len(s.committed) for s in steps) if complete else None,
        tuple(r.n_tokens or 0 for r in turns),
        tuple((r.ns.total or 0) / 1e9 for r in turns),
        tuple(n for s in steps for n in s.committed) if complete else None,
    )


def compute_results(
    runs: Sequence[Answers], count_tokens: CountTokens | None, *, baseline: str = BASELINE
) -> list[SpecBenchResult]:
    """Return the results of every method, over all questions and by task family.

    Args:
        runs: Answers of each repeat of each run.
        count_tokens: Counts the tokens of the baseline's texts. None uses the number of generated
            tokens.
        baseline: Label of the baseline method, to which speedups refer.
    """
    families = sorted({a.family for run in runs for own in run.values() for a in own})
    labels = dict.fromkeys(label for run in runs for label in run)
    base_speeds = [
        {a.question_id: _base_speed(a, count_tokens) for a in run.get(baseline, ())} for run in runs
    ]
    found = []
    for label in labels:
        for family in (ALL, *families):
            parts = []
            for run, speeds in zip(runs, base_speeds, strict=True):
                own = [a for a in run.get(label, ()) if family in (ALL, a.family)]
                base = [
                    speeds[a.question_id]
                    for a in run.get(baseline, ())
                    if family in (ALL, a.family)
                ]
                if own and base:
                    parts.append((own, fmean(base)))
            if parts:
                found.append(_compute_result(label, family, parts))
    return found


def _compute_result(
    label: str, family: str, parts: Sequence[tuple[Sequence[Answer], float]]
) -> SpecBenchResult:
    speeds = [fmean(a.speed for a in own) for own, _ in parts]
    bases = [base for _, base in parts]
    lengths: list[int] = []
    complete = True
    for own, _ in parts:
        for answer in own:
            complete = complete and answer.accept_lengths is not None
            lengths += answer.accept_lengths or ()
    return SpecBenchResult(
        label,
        family,
        fmean(speeds),
        fmean(bases),
        fmean(speed / base for speed, base in zip(speeds, bases, strict=True)),
        fmean(lengths) if complete and lengths else None,
        len(parts[0][0]),
    )


def _base_speed(answer: Answer, count_tokens: CountTokens | None) -> float:
    if count_tokens is None or answer.turns is None:
        return answer.speed
    tokens = sum(count_tokens(text) - 1 for text in answer.turns)
    return tokens / sum(answer.wall_time)
