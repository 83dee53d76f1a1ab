"""Checks of the values that a method's hooks (`propose`, `observe`, ...) return.

A value of a wrong type is reported as an error of the method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, TypeVar

from specbench_cli.engine.types import Draft, Step
from specbench_cli.errors import MethodFault

T = TypeVar("T")

_MAX_SHOWN = 60
"""Maximum number of characters of a wrong value that an error shows."""


def check_return(method: object, hook: str, value: T, kind: type[Any], what: str) -> T:
    """Return the value that a hook returned. Raise MethodFault if its type is wrong.

    Args:
        kind: The expected type.
        what: The expected type in words, such as "a Draft".
    """
    if isinstance(value, kind):
        return value
    raise wrong_return(method, hook, value, what)


def wrong_return(method: object, hook: str, value: object, what: str) -> MethodFault:
    """Return the error for a hook that returned a wrong value."""
    owner = method if isinstance(method, type) else type(method)
    name = getattr(owner, "name", owner.__name__)
    hint = "create it with `session.chain(ids)` or `session.tree(...)`" if "Draft" in what else None
    return MethodFault(f"{name}: {hook} must return {what}, got {_shorten(value)}", hint)


def check_drafts(method: object, value: Any, n: int) -> list[Draft]:
    """Return the drafts that `propose_batch` returned. Raise MethodFault unless they
    are n drafts."""
    what = f"a list of {n} Drafts, one for each member"
    drafts: list[Draft] = check_return(method, "propose_batch", value, list, what)
    if len(drafts) != n or not all(isinstance(each, Draft) for each in value):
        raise wrong_return(method, "propose_batch", drafts, what)
    return drafts


def check_counts(method: object, value: Any) -> Mapping[str, float]:
    """Return the counts that `observe` returned. Raise MethodFault unless they map names to
    numbers.
    """
    if value is None:
        return {}
    what = "None or a dict of finite numbers by name"
    counts: Mapping[str, float] = check_return(method, "observe", value, Mapping, what)
    for name, count in value.items():
        if not isinstance(name, str) or not isinstance(count, Real) or not isfinite(count):
            raise wrong_return(method, "observe", value, what)
    return counts


def check_members(method: object, value: Any) -> Sequence[tuple[Any, Any]]:
    """Return the pairs that `schedule` returned. Raise MethodFault unless all of them are pairs.

    A pair is a method object and its session.
    """
    what = "a list of its members"
    chosen: Sequence[tuple[Any, Any]] = check_return(method, "schedule", value, Sequence, what)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in value):
        raise wrong_return(method, "schedule", chosen, what)
    return chosen


def check_steps(
    method: object, hook: str, value: Iterable[Step], sequences: int = 1
) -> Iterator[Step]:
    """Yield the steps that `generate` or `generate_batch` yields, after checking each of them.

    Args:
        sequences: Number of sequences in the batch.

    Raises:
        MethodFault: A value is not a step, or the step's sequence is not in the batch.
    """
    what = "an iterator of Steps (`yield session.step(draft, outcome)`)"
    if not hasattr(value, "__iter__"):
        raise wrong_return(method, hook, value, what)
    for step in value:
        if not isinstance(step, Step):
            raise wrong_return(method, hook, step, what)
        if step.seq not in range(sequences):
            raise wrong_return(method, hook, step.seq, f"steps of sequences 0 to {sequences - 1}")
        yield step


def _shorten(value: object) -> str:
    """Return the type of a value and the beginning of its `repr`, for messages."""
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    return (
        f"{type(value).__name__} {text if len(text) <= _MAX_SHOWN else f'{text[:_MAX_SHOWN]}...'}"
    )
