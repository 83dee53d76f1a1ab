"""Statistical tests of outputs that cannot be compared with vanilla's token by token.

Under rejection sampling, a lossless method draws from the same distribution as vanilla. So its
outputs have the same expected log-likelihood per token under the target, and the same expected
length. Sign-flip tests compare both (`stats/permutation.py`). They are evidence. Only an audit
(`specbench audit`) proves the distribution.

For a lossy method, the scores of the answers are compared instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specbench_cli.stats.difference import MeanDifference, mean_difference
from specbench_cli.stats.permutation import SignFlipTest, run_sign_flip_test
from specbench_cli.store.schema import Record


@dataclass(frozen=True, slots=True)
class Evidence:
    """Comparison of a method's outputs with vanilla's. Values are None without data.

    likelihood: Test of the difference in mean log-likelihood per token, in nats.
    length: Test of the difference in output length, in tokens.
    score: Difference of the mean score of the answers.
    scored: Number of questions with scores.
    """

    likelihood: SignFlipTest | None = None
    length: SignFlipTest | None = None
    score: MeanDifference | None = None
    scored: int = 0


def compare_outputs(baseline: Iterable[Record], records: Iterable[Record]) -> Evidence:
    """Compare a method's outputs with the baseline's of the same prompt, turn and repeat."""
    paired = _pair_records(baseline, records)
    pairs: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    for base, own in paired:
        if None not in (_per_token(base), _per_token(own)):
            pairs.setdefault((own.task, own.cluster), []).append((base, own))

    def test(figure: Callable[[Record], float | None]) -> SignFlipTest | None:
        return run_sign_flip_test(
            [(figure(own) or 0.0) - (figure(base) or 0.0) for base, own in cluster]
            for cluster in pairs.values()
        )

    return Evidence(
        test(_per_token),
        test(lambda record: record.n_tokens),
        _score(paired),
        len({own.prompt_id for base, own in paired if None not in (base.score, own.score)}),
    )


def score_difference(
    baseline: Iterable[Record], records: Iterable[Record]
) -> MeanDifference | None:
    """Return the mean difference of scores, paired by prompt, turn and repeat, or None."""
    return _score(_pair_records(baseline, records))


def _pair_records(
    baseline: Iterable[Record], records: Iterable[Record]
) -> list[tuple[Record, Record]]:
    reference = {(r.prompt_id, r.turn, r.pass_): r for r in baseline}
    found = ((reference.get((r.prompt_id, r.turn, r.pass_)), r) for r in records)
    return [(base, own) for base, own in found if base is not None]


def _score(paired: Iterable[tuple[Record, Record]]) -> MeanDifference | None:
    known = [
        (own.score - base.score, f"{own.task}/{own.cluster}")
        for base, own in paired
        if own.score is not None and base.score is not None
    ]
    if not known:
        return None
    scores, clusters = zip(*known, strict=True)
    return mean_difference(scores, clusters)


def _per_token(record: Record) -> float | None:
    if record.log_likelihood is None or not record.n_tokens:
        return None
    return record.log_likelihood / record.n_tokens
