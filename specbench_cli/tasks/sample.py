"""Balanced, seeded sample of questions."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from specbench_cli.errors import UsageError
from specbench_cli.tasks.schema import Question


def sample_questions(questions: Sequence[Question], limit: int | None, seed: int) -> list[Question]:
    """Draw at most `limit` questions at random, balanced over families, then over their categories.

    The numbers per family differ by at most one if each family has enough questions. The draw
    depends only on the seed and the prompt ids. With the same seed, a small sample is part of every
    larger one. A question with several samples counts once, and all its samples are drawn.

    Args:
        limit: number of questions; None for all.

    Returns:
        The drawn questions in their original order.

    Raises:
        UsageError: `limit` is below 1.
    """
    if limit is None:
        return list(questions)
    if limit < 1:
        raise UsageError(f"--limit {limit}: must be at least 1")
    chosen: set[str] = set()
    once = [question for question in questions if question.sample <= 1]
    for in_family, n_family in _split(once, lambda q: q.family, limit, seed):
        for in_category, n in _split(in_family, lambda q: q.category, n_family, seed):
            ranked = sorted(in_category, key=lambda q: _rank(seed, q.base_id))
            chosen.update(question.base_id for question in ranked[:n])
    return [question for question in questions if question.base_id in chosen]


def _split(
    questions: Sequence[Question], key: Callable[[Question], str], limit: int, seed: int
) -> list[tuple[list[Question], int]]:
    """Group questions by a key. Return each group with the number of questions to draw from it."""
    groups: defaultdict[str, list[Question]] = defaultdict(list)
    for question in questions:
        groups[key(question)].append(question)
    shares = _shares({name: len(group) for name, group in groups.items()}, limit, seed)
    return [(groups[name], n) for name, n in shares.items()]


def _shares(supply: Mapping[str, int], limit: int, seed: int) -> dict[str, int]:
    """Return how many questions to draw from each group.

    The groups get one question each, in turns, until `limit` questions are distributed. A group
    without further questions is skipped.

    Args:
        supply: number of questions in each group.
    """
    shares = dict.fromkeys(sorted(supply, key=lambda name: _rank(seed, name)), 0)
    left = min(limit, sum(supply.values()))
    while left:
        open_names = [name for name in shares if shares[name] < supply[name]]
        room = min(supply[name] - shares[name] for name in open_names)
        rounds = max(1, min(left // len(open_names), room))
        for name in open_names[:left]:
            shares[name] += rounds
            left -= rounds
    return shares


def _rank(seed: int, key: str) -> bytes:
    """Return a pseudo-random sort key for a name. It depends only on the seed and the name."""
    return hashlib.sha256(f"{seed}\n{key}".encode()).digest()
