"""Exact distribution of a method's output on table models, by enumerating all its draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbench_cli.audit.cases import Case
from specbench_cli.audit.enumeration import Distribution, compute_distribution, total_variation
from specbench_cli.audit.reference import Reference
from specbench_cli.engine.method import Method
from specbench_cli.engine.types import Step
from specbench_cli.engine.verify.random import Random


def target_distribution(case: Case) -> Distribution:
    """Return the distribution of the target's own first `case.length` tokens."""
    return Reference(case.tables[0], case.sampling).joint_distribution(
        case.prompt, case.eos, case.length
    )


def distance_from_target(
    method: Method,
    case: Case,
    seen: Callable[[Step], object] = lambda step: None,
    memory: Callable[[], Any] = lambda: None,
    **session: Any,
) -> float:
    """Return how far a method's first `case.length` tokens are from the target's distribution.

    Args:
        seen: called with each step.
        memory: makes the memory that each decoding begins with.
        session: arguments of `Case.open`.
    """

    def decode(random: Random) -> tuple[int, ...]:
        opened = case.open(random=random, memory=memory(), **session)
        for step in method.generate(opened):
            seen(step)
            if len(opened.output()) >= case.length:
                break
        return tuple(opened.output()[: case.length])

    return total_variation(compute_distribution(decode), target_distribution(case))
