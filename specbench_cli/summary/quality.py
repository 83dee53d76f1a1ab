"""How good a model is at a task, from the records of runs: what makes its speedups mean something.

A worse target raises acceptance, so acceptance alone proves nothing: the target must do its tasks,
and its draft must be worse at them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specbench_cli.store.schema import Record

REPETITIVE = 0.5
"""Below this share of distinct 4-grams an output repeats itself."""


@dataclass(frozen=True, slots=True)
class Quality:
    """One label's figures over some outputs.

    Attributes:
        outputs: how many there are.
        accuracy: mean score; None where the task has no scorer.
        ended: share of outputs that end by the EOS within the budget.
        repetitive: share of outputs whose 4-grams repeat (see `REPETITIVE`).
        mat: mean accepted tokens, micro; None where nothing was decoded in steps.
    """

    outputs: int
    accuracy: float | None
    ended: float
    repetitive: float
    mat: float | None


def quality(records: Iterable[Record], label: str) -> dict[str, Quality]:
    """Figures of one row of a run by family, `all` the last; failed cells are left out."""
    families: dict[str, list[Record]] = {}
    for record in records:
        if record.label == label and record.error is None:
            families.setdefault(record.family, []).append(record)
    every = [record for own in families.values() for record in own]
    return {
        family: _figures(own) for family, own in [*sorted(families.items()), ("all", every)] if own
    }


def distinct_4_grams(ids: Sequence[int]) -> float:
    """Distinct 4-grams over all 4-grams of an output; 1 where it has none."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _figures(records: Sequence[Record]) -> Quality:
    scores = [record.score for record in records if record.score is not None]
    outputs = [record.output_ids or [] for record in records]
    steps = sum(len(record.steps.committed) for record in records if record.steps is not None)
    tokens = sum(len(ids) - 1 for ids in outputs)
    return Quality(
        outputs=len(records),
        accuracy=sum(scores) / len(scores) if scores else None,
        ended=sum(record.finish == "eos" for record in records) / len(records),
        repetitive=sum(distinct_4_grams(ids) < REPETITIVE for ids in outputs) / len(records),
        mat=tokens / steps if steps else None,
    )
