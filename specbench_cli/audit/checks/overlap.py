"""Expected number of accepted draft tokens from target and draft distributions, in plain Python.

A child drawn from d is accepted with probability sum min(r, d), where r is the target's
distribution or its residual after rejected siblings (Leviathan et al. 2023, arXiv:2211.17192;
siblings: Miao et al. 2024, arXiv:2305.09781; without replacement: Jeon et al. 2024,
arXiv:2402.14160). Deterministic children are accepted with their probability under the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specbench_cli.audit.reference import Reference
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.tree import ROOT, build_tree

Probabilities = Sequence[float]


def expected_accepted(reference: Reference, before: Sequence[int], step: Step) -> float:
    """Return the expected number of accepted tokens over the levels that a step verified.

    Each test of a drawn sibling counts with its acceptance probability before the draw, because the
    number of siblings may depend on the earlier ones.

    Args:
        before: text before the draft.
    """
    draft, path = step.draft, step.outcome.path
    assert draft is not None
    ids: list[int] = draft.tokens.tolist()
    parents = tuple(range(-1, len(ids) - 1)) if draft.parents is None else draft.parents
    siblings = build_tree(parents, draft.order).children
    expected = 0.0
    for level in range(step.outcome.tested):
        children = siblings[path[level - 1] if level else ROOT]
        p = reference.distribution(*[*before, *(ids[above] for above in path[:level])][-2:])
        if draft.q is None:
            expected += sum(p[token] for token in {ids[child] for child in children})
            continue
        accepted_index = children.index(path[level]) if level < len(path) else len(children)
        tested = [ids[child] for child in children[: accepted_index + 1]]
        q = draft.q[children[0]].tolist()
        expected += sum(
            acceptance_probabilities(
                p, q, tested, with_replacement=draft.draw_mode == "independent"
            )
        )
    return expected


def acceptance_probabilities(
    p: Probabilities, q: Probabilities, drawn: Sequence[int], *, with_replacement: bool
) -> Iterator[float]:
    """Yield the acceptance probability of each sibling, given that all earlier ones were rejected.

    Args:
        p: distribution of the target.
        q: distribution of the draft.
        drawn: the siblings in the order of their tests.
    """
    r, d = list(p), list(q)
    for turn, _ in enumerate(drawn):
        if not with_replacement:
            d = _remaining_distribution(q, drawn[:turn])
        yield sum(map(min, r, d))
        left = [max(a - b, 0.0) for a, b in zip(r, d, strict=True)]
        mass = sum(left)
        if mass <= 0.0:  # the last sibling was accepted for certain
            return
        r = [a / mass for a in left]


def _remaining_distribution(q: Probabilities, drawn: Sequence[int]) -> list[float]:
    """Return the distribution of the next draw without replacement, uniform if q is exhausted."""
    left = [0.0 if token in drawn else p for token, p in enumerate(q)]
    if sum(left) <= 0.0:
        left = [float(token not in drawn) for token in range(len(q))]
    total = sum(left)
    return [p / total for p in left]
