"""How many draft tokens should stand, by the two distributions alone, worked out in plain Python.

At a node a child drawn from d stands in mass sum min(r, d), r being the target's distribution or
what earlier siblings left of it (Leviathan et al. 2023, arXiv:2211.17192; siblings: Miao et al.
2024, arXiv:2305.09781; without replacement: Jeon et al. 2024, arXiv:2402.14160). Children that were
not drawn stand with the target's own probability of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specbench_cli.audit.reference import Reference
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.tree import ROOT, build_tree

Probabilities = Sequence[float]


def expected_accepted(reference: Reference, before: Sequence[int], step: Step) -> float:
    """How many of the levels that a step tested should stand, in the mean over all its outcomes.

    Of drawn siblings each test counts by what it was likely to end in before its child was drawn:
    how many siblings there are may depend on which the earlier ones are.

    Args:
        before: the text that the draft follows.
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
        stood = children.index(path[level]) if level < len(path) else len(children)
        tested = [ids[child] for child in children[: stood + 1]]
        q = draft.q[children[0]].tolist()
        expected += sum(chances(p, q, tested, replacement=draft.draw_mode == "independent"))
    return expected


def chances(
    p: Probabilities, q: Probabilities, drawn: Sequence[int], *, replacement: bool
) -> Iterator[float]:
    """Of siblings drawn from q and tested against p in turn: how likely each was to stand, before
    it was drawn, once all before it had been rejected."""
    r, d = list(p), list(q)
    for turn, _ in enumerate(drawn):
        if not replacement:
            d = _remaining(q, drawn[:turn])
        yield sum(map(min, r, d))
        left = [max(a - b, 0.0) for a, b in zip(r, d, strict=True)]
        mass = sum(left)
        if mass <= 0.0:  # the last one stood
            return
        r = [a / mass for a in left]


def _remaining(q: Probabilities, drawn: Sequence[int]) -> list[float]:
    """The distribution of the next draw without replacement; any other token where nothing of q is
    left."""
    left = [0.0 if token in drawn else p for token, p in enumerate(q)]
    if sum(left) <= 0.0:
        left = [float(token not in drawn) for token in range(len(q))]
    total = sum(left)
    return [p / total for p in left]
