"""Which parameters a method is tried with when a run is tuned."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from specbench_cli.config import sweep
from specbench_cli.errors import UsageError
from specbench_cli.plan.method_run import MethodRun

if TYPE_CHECKING:
    from specbench_cli.engine.method import Method
    from specbench_cli.engine.types import Rule

_STEP = math.sqrt(2)
"""Between neighbouring values of a number that is tried: half as much, as much, twice as much are
two steps apart."""


def candidates(
    method_run: MethodRun, budget: int, rule: Rule, swept: Mapping[str, Sequence[Any]] | None = None
) -> tuple[MethodRun, ...]:
    """At most `budget` ways to run a row.

    With `swept` those are all its combinations. Else: the row as it is, and with one parameter
    changed, nearest values first, every parameter in turn. What the user set stays; and none needs
    or promises anything else than the row, so tuning never trades away exactness.

    Raises:
        UsageError: more combinations than `budget`, or one with values that are not allowed.
    """
    if swept:
        if sweep.size(swept) > budget:
            raise UsageError(
                f"the sweep gives {method_run.label} {sweep.size(swept)} candidates,"
                f" and --tune {budget}"
                f" gives every method {budget}",
                f"--tune {sweep.size(swept)}, or fewer values",
            )
        return tuple(_with_params(method_run, point) for point in sweep.points(swept))
    found = [method_run]
    for name, value in _changes(method_run, budget):
        if len(found) == budget:
            break
        try:
            other = _with_params(method_run, {name: value})
        except UsageError:
            continue  # out of bounds, or not with the row's other parameters
        if _keeps_promises(method_run.declared, other.declared, rule):
            found.append(other)
    return tuple(found)


def _with_params(method_run: MethodRun, point: Mapping[str, Any]) -> MethodRun:
    label = " ".join([method_run.label, *sweep.settings(point)])
    changed = MethodRun(method_run.name, label, {**method_run.passed, **point})
    changed.declared  # noqa: B018  raises UsageError
    return changed


def _keeps_promises(own: Method, other: Method, rule: Rule) -> bool:
    return (
        other.guarantee(rule) == own.guarantee(rule)
        and other.upper_bound == own.upper_bound
        and other.requirements <= own.requirements
        and set(other.artifacts()) <= set(own.artifacts())
    )


def _changes(method_run: MethodRun, budget: int) -> Iterator[tuple[str, Any]]:
    """Parameters with other values than the row's: the first of each, the second of each, ..."""
    method = type(method_run.declared)
    columns = [
        [(name, value) for value in islice(_other_values(field.annotation, now), 2 * budget)]
        for name, field in method.Params.model_fields.items()
        if name not in method_run.passed
        and (method.tunable is None or name in method.tunable)
        and (now := getattr(method_run.declared.params, name)) is not None
    ]
    for line in zip_longest(*columns):
        yield from (change for change in line if change is not None)


def _other_values(annotation: Any, now: Any) -> Iterator[Any]:
    """Values of a type other than `now`: numbers near it and words in turn."""
    numbers: Iterator[Any] = iter(())
    if isinstance(now, (int, float)) and not isinstance(now, bool):
        numbers = _nearby_numbers(now)
    words = (word for word in _literal_values(annotation) if word != now)
    for pair in zip_longest(numbers, words):
        yield from (value for value in pair if value is not None)


def _literal_values(annotation: Any) -> list[Any]:
    """What a type spells out: the words of a Literal, yes and no of a bool."""
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return list(chain.from_iterable(map(_literal_values, get_args(annotation))))
    if get_origin(annotation) is Annotated:
        return _literal_values(get_args(annotation)[0])
    return []


def _nearby_numbers(now: float) -> Iterator[float]:
    """Numbers below and above in turn, ever further away, on a scale of ratios; whole ones if it is
    whole. Of 0 there are no ratios: whole numbers upwards."""
    seen = {now}
    for distance in range(1, 64):
        for sign in (-1, 1):
            if isinstance(now, int):
                other: float = round(now * _STEP ** (sign * distance)) if now else distance
            else:
                other = float(f"{now * _STEP ** (sign * distance):.2g}")
            if other not in seen:
                seen.add(other)
                yield other
