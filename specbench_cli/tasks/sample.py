"""A balanced, seeded sample of questions."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from specbench_cli.errors import UsageError
from specbench_cli.tasks.schema import Question


def sample(questions: Sequence[Question], limit: int | None, seed: int) -> list[Question]:
    """At most `limit` questions, spread evenly over families, then over categories in a family.

    Counts differ by at most one wherever there are enough questions. The draw depends on the seed
    and the prompt ids alone, and a smaller sample is part of every larger one with the same seed.
    A question that is asked several times counts once, and comes with all its samples.

    Args:
        limit: number of questions; None for all.

    Returns:
        The chosen questions in the order given.

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
            ranked = sorted(in_category, key=lambda q: _rank(seed, q.asked))
            chosen.update(question.asked for question in ranked[:n])
    return [question for question in questions if question.asked in chosen]


def _split(
    questions: Sequence[Question], key: Callable[[Question], str], limit: int, seed: int
) -> list[tuple[list[Question], int]]:
    """Groups of questions with the same key, and how many to take of each."""
    groups: defaultdict[str, list[Question]] = defaultdict(list)
    for question in questions:
        groups[key(question)].append(question)
    shares = _shares({name: len(group) for name, group in groups.items()}, limit, seed)
    return [(groups[name], n) for name, n in shares.items()]


def _shares(supply: Mapping[str, int], limit: int, seed: int) -> dict[str, int]:
    """Deal `limit` places out one at a time, round by round, passing over whoever has no more."""
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
    """A pseudo-random place in line that depends on nothing but the seed and the key."""
    return hashlib.sha256(f"{seed}\n{key}".encode()).digest()
