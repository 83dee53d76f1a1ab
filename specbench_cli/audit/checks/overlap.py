"""How many draft tokens should stand, by the two laws alone, worked out in plain Python.

At a node a child drawn from d stands in mass sum min(r, d), r being the target's law or what
earlier siblings left of it (Leviathan et al. 2023, arXiv:2211.17192; siblings: Miao et al. 2024,
arXiv:2305.09781; without replacement: Jeon et al. 2024, arXiv:2402.14160). Children that were not
drawn stand with the target's own probability of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench_cli.audit.reference import Reference
from specbench_cli.engine.types import Step

Probabilities = Sequence[float]


def expected_accepted(reference: Reference, before: Sequence[int], step: Step) -> float:
    """How many of the levels that a step tested should stand, in the mean.

    Args:
        before: the text that the draft follows.
    """
    draft, path = step.draft, step.outcome.path
    assert draft is not None
    ids: list[int] = draft.tokens.tolist()
    parents = range(-1, len(ids) - 1) if draft.parents is None else draft.parents
    expected = 0.0
    for level in range(step.outcome.tested):
        node = path[level - 1] if level else -1
        children = [child for child, parent in enumerate(parents) if parent == node]
        p = reference.law(*[*before, *(ids[above] for above in path[:level])][-2:])
        if draft.q is None:
            expected += sum(p[token] for token in {ids[child] for child in children})
        else:
            q = draft.q[children[0]].tolist()
            expected += chance(p, q, len(children), replacement=draft.law == "iid")
    return expected


def chance(
    r: Probabilities,
    q: Probabilities,
    draws: int,
    *,
    replacement: bool,
    drawn: tuple[int, ...] = (),
) -> float:
    """That one of so many children stands, which are drawn from q and tested against r in turn."""
    d = q if replacement else _remaining(q, drawn)
    stands = sum(map(min, r, d))
    lost = [max(b - a, 0.0) for a, b in zip(r, d, strict=True)]  # by each token, drawn and rejected
    mass = sum(lost)
    if draws == 1 or mass <= 0.0:
        return stands
    left = [max(a - b, 0.0) / mass for a, b in zip(r, d, strict=True)]
    if replacement:
        return stands + mass * chance(left, q, draws - 1, replacement=True)
    return stands + sum(
        weight * chance(left, q, draws - 1, replacement=False, drawn=(*drawn, token))
        for token, weight in enumerate(lost)
        if weight > 0.0
    )


def _remaining(q: Probabilities, drawn: tuple[int, ...]) -> Probabilities:
    """The law of the next draw without replacement; any other token where nothing of q is left."""
    left = [0.0 if token in drawn else p for token, p in enumerate(q)]
    if sum(left) <= 0.0:
        left = [float(token not in drawn) for token in range(len(q))]
    total = sum(left)
    return [p / total for p in left]
