"""What a run itself says of sampled outputs, which no token verdict can be given on.

Under rejection a lossless method draws from vanilla's own law. Then its outputs are as likely under
the target as vanilla's, token for token, and as long. Both are compared pair by pair, the pairs of
a cluster together (`stats.permutation`). This is evidence and no proof: the proof is the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specbench_cli.stats.permutation import Paired, sign_flip
from specbench_cli.store.schema import Record


@dataclass(frozen=True, slots=True)
class Evidence:
    """A method's outputs against vanilla's; null where there is nothing to compare.

    likelihood: difference of the mean log-likelihood per token, in nats. length: of the tokens.
    """

    likelihood: Paired | None = None
    length: Paired | None = None


def compare(baseline: Iterable[Record], cells: Iterable[Record]) -> Evidence:
    """Compare a method's sampled outputs with the baseline's of the same prompt, turn and pass."""
    reference = {(r.prompt_id, r.turn, r.pass_): r for r in baseline}
    pairs: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    for record in cells:
        base = reference.get((record.prompt_id, record.turn, record.pass_))
        if base is not None and None not in (_per_token(base), _per_token(record)):
            pairs.setdefault((record.task, record.cluster), []).append((base, record))

    def test(figure: Callable[[Record], float | None]) -> Paired | None:
        return sign_flip(
            [(figure(own) or 0.0) - (figure(base) or 0.0) for base, own in cluster]
            for cluster in pairs.values()
        )

    return Evidence(test(_per_token), test(lambda record: record.n_tokens))


def _per_token(record: Record) -> float | None:
    if record.log_likelihood is None or not record.n_tokens:
        return None
    return record.log_likelihood / record.n_tokens
