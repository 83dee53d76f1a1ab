"""Candidates of a tuning: variants of a method with different parameter values."""

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
"""Ratio between neighbouring candidate values of a number. Two steps are a factor of two."""


def list_candidates(
    method_run: MethodRun, budget: int, rule: Rule, swept: Mapping[str, Sequence[Any]] | None = None
) -> tuple[MethodRun, ...]:
    """Return at most `budget` candidates for the tuning of a method.

    If the user gives values to sweep, the candidates are all combinations of these values.
    Otherwise the candidates are the method itself, and variants with one changed parameter. Nearest
    values come first, and parameters alternate. Parameters that the user has set do not change.

    All candidates have the guarantee and the requirements of the method. So tuning does not make a
    lossless method lossy.

    Args:
        budget: Maximum number of candidates.
        rule: Verification rule of the run.
        swept: Values to sweep, by parameter.

    Raises:
        UsageError: The sweep has more than `budget` combinations, or values that are not
            allowed.
    """
    if swept:
        if sweep.count_combinations(swept) > budget:
            raise UsageError(
                f"the sweep of {method_run.label} has {sweep.count_combinations(swept)}"
                f" combinations, but --tune {budget} tries {budget} per method",
                f"--tune {sweep.count_combinations(swept)}, or fewer values",
            )
        return tuple(_with_params(method_run, point) for point in sweep.list_combinations(swept))
    found = [method_run]
    for name, value in _list_changes(method_run, budget):
        if len(found) == budget:
            break
        try:
            other = _with_params(method_run, {name: value})
        except UsageError:
            continue  # the value is not allowed, or not with these other parameters
        if _keeps_promises(method_run.declared, other.declared, rule):
            found.append(other)
    return tuple(found)


def _with_params(method_run: MethodRun, point: Mapping[str, Any]) -> MethodRun:
    label = " ".join([method_run.label, *sweep.format_params(point)])
    changed = MethodRun(method_run.name, label, {**method_run.user_params, **point})
    changed.declared  # noqa: B018  raises UsageError
    return changed


def _keeps_promises(method: Method, other: Method, rule: Rule) -> bool:
    return (
        other.guarantee(rule) == method.guarantee(rule)
        and other.upper_bound == method.upper_bound
        and other.requirements <= method.requirements
        and set(other.artifacts()) <= set(method.artifacts())
    )


def _list_changes(method_run: MethodRun, budget: int) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a parameter and a new value.

    First yield the nearest other value of each parameter, then the second nearest value, and so
    on.
    """
    method = type(method_run.declared)
    columns = [
        [(name, value) for value in islice(_other_values(field.annotation, now), 2 * budget)]
        for name, field in method.Params.model_fields.items()
        if name not in method_run.user_params
        and (method.tunable is None or name in method.tunable)
        and (now := getattr(method_run.declared.params, name)) is not None
    ]
    for line in zip_longest(*columns):
        yield from (change for change in line if change is not None)


def _other_values(annotation: Any, now: Any) -> Iterator[Any]:
    """Yield values that differ from `now` and have an allowed type.

    Nearby numbers and literals alternate.

    Args:
        annotation: Type annotation of the parameter.
        now: Current value of the parameter.
    """
    numbers: Iterator[Any] = iter(())
    if isinstance(now, (int, float)) and not isinstance(now, bool):
        numbers = _nearby_numbers(now)
    words = (word for word in _literal_values(annotation) if word != now)
    for pair in zip_longest(numbers, words):
        yield from (value for value in pair if value is not None)


def _literal_values(annotation: Any) -> list[Any]:
    """Return all values of a Literal or bool type, also inside a union. Other types have no values.

    Args:
        annotation: Type annotation of a parameter.
    """
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
    """Yield numbers alternately below and above `now`, at growing distance.

    If `now` is an integer, all numbers are integers. If `now` is 0, yield only the integers above
    0.
    """
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
