"""What a run itself says of outputs that no token verdict can be given on.

Under rejection a lossless method draws from vanilla's own distribution. Then its outputs are as
likely under the target as vanilla's, token for token, and as long. Both are compared pair by pair,
the pairs of a cluster together (`stats.permutation`). This is evidence and no proof: the proof is
the audit.

A lossy method's outputs are other outputs: what counts is what its answers lose in score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specbench_cli.stats.difference import MeanDifference, mean_difference
from specbench_cli.stats.permutation import SignFlipTest, run_sign_flip_test
from specbench_cli.store.schema import Record


@dataclass(frozen=True, slots=True)
class Evidence:
    """A method's outputs against vanilla's; null where there is nothing to compare.

    likelihood: difference of the mean log-likelihood per token, in nats. length: of the tokens.
    score: difference of the mean score; scored: on how many questions.
    """

    likelihood: SignFlipTest | None = None
    length: SignFlipTest | None = None
    score: MeanDifference | None = None
    scored: int = 0


def compare(baseline: Iterable[Record], cells: Iterable[Record]) -> Evidence:
    """Compare a method's outputs with the baseline's of the same prompt, turn and pass."""
    paired = _pair_records(baseline, cells)
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


def score_difference(baseline: Iterable[Record], cells: Iterable[Record]) -> MeanDifference | None:
    """The mean difference of the scores of the same prompts, turns and passes."""
    return _score(_pair_records(baseline, cells))


def _pair_records(
    baseline: Iterable[Record], cells: Iterable[Record]
) -> list[tuple[Record, Record]]:
    reference = {(r.prompt_id, r.turn, r.pass_): r for r in baseline}
    found = ((reference.get((r.prompt_id, r.turn, r.pass_)), r) for r in cells)
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
