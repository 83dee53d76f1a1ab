"""What a run itself says of outputs that no token verdict can be given on.

Under rejection a lossless method draws from vanilla's own law. Then its outputs are as likely under
the target as vanilla's, token for token, and as long. Both are compared pair by pair, the pairs of
a cluster together (`stats.permutation`). This is evidence and no proof: the proof is the audit.

A lossy method's outputs are other outputs: what counts is what its answers lose in score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specbench_cli.stats.difference import Difference, mean_difference
from specbench_cli.stats.permutation import Paired, sign_flip
from specbench_cli.store.schema import Record


@dataclass(frozen=True, slots=True)
class Evidence:
    """A method's outputs against vanilla's; null where there is nothing to compare.

    likelihood: difference of the mean log-likelihood per token, in nats. length: of the tokens.
    score: difference of the mean score.
    """

    likelihood: Paired | None = None
    length: Paired | None = None
    score: Difference | None = None


def compare(baseline: Iterable[Record], cells: Iterable[Record]) -> Evidence:
    """Compare a method's outputs with the baseline's of the same prompt, turn and pass."""
    reference = {(r.prompt_id, r.turn, r.pass_): r for r in baseline}
    pairs: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    scores: list[float] = []
    clusters: list[str] = []
    for record in cells:
        base = reference.get((record.prompt_id, record.turn, record.pass_))
        if base is None:
            continue
        if None not in (_per_token(base), _per_token(record)):
            pairs.setdefault((record.task, record.cluster), []).append((base, record))
        if base.score is not None and record.score is not None:
            scores.append(record.score - base.score)
            clusters.append(f"{record.task}/{record.cluster}")

    def test(figure: Callable[[Record], float | None]) -> Paired | None:
        return sign_flip(
            [(figure(own) or 0.0) - (figure(base) or 0.0) for base, own in cluster]
            for cluster in pairs.values()
        )

    return Evidence(
        test(_per_token),
        test(lambda record: record.n_tokens),
        mean_difference(scores, clusters) if scores else None,
    )


def _per_token(record: Record) -> float | None:
    if record.log_likelihood is None or not record.n_tokens:
        return None
    return record.log_likelihood / record.n_tokens
