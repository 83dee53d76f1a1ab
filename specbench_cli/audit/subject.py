"""What is audited: a method's real code, with the parameters that reach its every branch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from specbench_cli.engine.drafting.lengths import LengthParams
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.head import FeatureHead, Head
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.verify.sampling import Rule

LOSSLESS = ("exact_tokens", "exact_law")

NODES = "nodes"
"""The parameter that is a tree's size: of the likeliest nodes, which adds no outcomes."""

MEMORY = "memory"
"""The parameter that says how much is kept of earlier prompts, which no draft is as long as."""

COPIES = frozenset({"pld", "sam", "suffix"})
"""Methods that draft what followed an earlier occurrence: a text that repeats itself, with whatever
period, must be accepted in full."""


@dataclass(frozen=True)
class Subject:
    """A method and the parameters to audit it with.

    Attributes:
        name: its name on the command line.
        method: its class.
        variants: parameters, the defaults first, then short ones whose outcomes can be walked.
    """

    name: str
    method: type[Method]
    variants: tuple[MethodParams, ...]

    @classmethod
    def of(cls, name: str, method: type[Method]) -> Subject:
        """A subject with variants worked out from the types of the method's parameters."""
        return cls(name, method, tuple(_variants(method.Params)))

    def promising(self, rule: Rule, *, walkable: bool = False) -> Iterator[MethodParams]:
        """The variants that promise to be lossless under a rule.

        Under a rule that draws there is no vanilla output for an upper bound to read.

        Args:
            walkable: only those with numbers of at most 2, so that a step has few outcomes.
        """
        for params in self.variants:
            method = self.method(params)
            known = rule not in ("rejection", "block") or not method.upper_bound
            small = not walkable or largest(params) <= 2
            if method.guarantee(rule) in LOSSLESS and known and small:
                yield params

    @property
    def drafts(self) -> bool:
        """Whether a model or a head drafts for it, as far as it says."""
        asked = self.method(self.variants[0]).artifacts()
        heads = any(issubclass(wanted.kind, Head | FeatureHead) for wanted in asked)
        return heads or bool({"draft", "head"} & self.method.needs)


def largest(params: MethodParams, otherwise: int = 0) -> int:
    """The largest whole number among the parameters, but for the sizes of trees and of memory."""
    if isinstance(params, LengthParams):
        return params.levels
    numbers = [
        n
        for name, n in params.model_dump().items()
        if type(n) is int and name not in (NODES, MEMORY)
    ]
    return max(numbers, default=otherwise)


def longest(params: MethodParams, otherwise: int = 0) -> int:
    """A bound on the levels of a draft."""
    depth = getattr(params, "depth", None)
    return depth if type(depth) is int else largest(params, otherwise)


def passed(params: MethodParams) -> str:
    """The parameters that differ from the defaults, as they are typed: "length=2"."""
    changed = params.model_dump(exclude_defaults=True)
    return " ".join(f"{name}={value}" for name, value in changed.items()) or "default parameters"


def _variants(kind: type[MethodParams]) -> Iterator[MethodParams]:
    """Defaults; whole numbers at most 2, then 1, then 1 but for one of them; with these, every
    other choice of a parameter. Trees get twice as many nodes."""
    fields = kind.model_fields
    small = [_fitting(kind, _at_most(kind, most)) for most in (2, 1)]
    small += [_fitting(kind, {**small[1], name: 2}) for name in small[1] if len(small[1]) > 1]
    choices = [
        _fitting(kind, {**numbers, name: choice})
        for name, field in fields.items()
        for choice in _choices(field)
        for numbers in (small[0], *small[2:3])
    ]
    seen: list[object] = []
    for values in ({}, *small, *choices):
        params = kind(**values)
        # A number for a length leaves the rules' parameters unread, and of one there is no choice.
        fixed = isinstance(params, LengthParams) and params.levels in (params.length, 1)
        counts = (largest(params), getattr(params, "rule", None)) if fixed else params
        if counts not in seen:
            seen.append(counts)
            yield params


def _at_most(kind: type[MethodParams], most: int, only: str | None = None) -> dict[str, Any]:
    """The whole numbers of a method's parameters, or one of them, cut down."""
    numbers = {name: f.default for name, f in kind.model_fields.items() if type(f.default) is int}
    bounds = {name: 2 * most if name == NODES else most for name in numbers}
    cut = {name: bounds[name] for name, default in numbers.items() if default > bounds[name]}
    return {name: bound for name, bound in cut.items() if only in (None, name)}


def _choices(field: FieldInfo) -> list[Any]:
    """The values of a parameter that has few, but for its default."""
    values: list[Any] = []
    for kind in (field.annotation, *get_args(field.annotation)):  # a union's members too
        if kind is bool:
            values += [True, False]
        elif get_origin(kind) is Literal:
            values += get_args(kind)
    return [value for value in values if value != field.default]


def _fitting(kind: type[MethodParams], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that the method does not allow."""
    try:
        kind(**values)
    except ValidationError as refused:
        wrong = {str(error["loc"][0]) for error in refused.errors() if error["loc"]}
        kept = {name: value for name, value in values.items() if name not in wrong}
        return _fitting(kind, kept) if len(kept) < len(values) else {}
    return dict(values)
