"""Audit subjects: a method, and the parameter sets with which it is audited."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from specbench_cli.engine.drafting.length_params import LengthParams
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.head import FeatureHead, Head
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Rule
from specbench_cli.store.schema import LOSSLESS

TREE_SIZE_PARAM = "nodes"
"""Name of the parameter for the size of a tree. More nodes do not add outcomes to enumerate."""

MEMORY_PARAM = "memory"
"""Name of the parameter for the memory of earlier prompts. It does not bound the draft length."""

LOOKUP_METHODS = frozenset({"pld", "sam", "suffix"})
"""Lookup methods. They must accept a repeating text in full, whatever its period."""


@dataclass(frozen=True)
class AuditSubject:
    """A method and the parameters to audit it with.

    Attributes:
        name: name of the method on the command line.
        method: class of the method.
        variants: parameter sets: the defaults, then small numbers (for few outcomes), then those
            with which a lossy method is lossless.
        single_changes: further parameter sets: the defaults with one parameter changed to a smaller
            or larger number, a bound, None, or another choice.
    """

    name: str
    method: type[Method]
    variants: tuple[MethodParams, ...]
    single_changes: tuple[MethodParams, ...] = ()

    @classmethod
    def from_method(cls, name: str, method: type[Method]) -> AuditSubject:
        """Return a subject whose variants are derived from the types of the parameters."""
        variants = tuple(_make_variants(method.Params, method.exact_params))
        single_changes = (each for each in _change_one_param(method.Params) if each not in variants)
        return cls(name, method, variants, tuple(single_changes))

    def lossless_params(
        self, rule: Rule, *, few_outcomes: bool = False, single_changes: bool = False
    ) -> Iterator[MethodParams]:
        """Yield the parameters with which the method guarantees to be lossless under a rule.

        Oracle methods (`Method.upper_bound`) are left out under rules that sample, because they
        need vanilla's output.

        Args:
            few_outcomes: yield only parameters with numbers up to 2, so that steps have few
                outcomes.
            single_changes: also yield `single_changes`.
        """
        for params in (*self.variants, *(self.single_changes if single_changes else ())):
            method = self.method(params)
            known = rule not in ("rejection", "block") or not method.upper_bound
            small = not few_outcomes or largest_number(params) <= 2
            if method.guarantee(rule) in LOSSLESS and known and small:
                yield params

    @property
    def code_constants(self) -> Sequence[int]:
        """Sorted integers in the method's code, and in the globals that it reads.

        The method may behave differently above such a number, for example a maximum length. So
        there are cases with longer prompts and outputs.
        """
        own = [kind for kind in self.method.__mro__ if issubclass(kind, Method) and kind != Method]
        module = sys.modules.get(self.method.__module__)
        module_values = () if module is None else tuple(vars(module).values())
        same_file = (
            each for each in module_values if getattr(each, "__module__", "") == own[0].__module__
        )
        helpers = (each for each in same_file if not (isinstance(each, type) and each in own))
        found: set[int] = set()
        for each in (*own, *helpers):
            if isinstance(each, type) and issubclass(each, Method) and each not in own:
                continue  # another method in the same file
            for member in (each, *(vars(each).values() if isinstance(each, type) else ())):
                function = getattr(member, "fget", getattr(member, "__func__", member))
                if isinstance(function, FunctionType):
                    found |= _find_numbers(function.__code__, function.__globals__)
        return sorted(found)

    def exceed_constants(self, at_least: int, at_most: int) -> int:
        """Return a number that is larger than each of `code_constants` below `at_most`."""
        return max([at_least, *(n + 1 for n in self.code_constants if n < at_most)])

    @property
    def uses_draft_model(self) -> bool:
        """True if the method declares a draft model or a head."""
        modelled = self.uses_head or bool({"draft", "head"} & self.method.needs)
        return modelled and self.method.proposes

    @property
    def uses_head(self) -> bool:
        """True if the method has a draft head."""
        artifacts = self.method(self.variants[0]).artifacts()
        return any(issubclass(wanted.kind, Head | FeatureHead) for wanted in artifacts)


def _find_numbers(code: CodeType, names: Mapping[str, Any]) -> set[int]:
    """Return positive integers in a function, in its inner functions and in its globals."""
    values = [*code.co_consts, *(names.get(name) for name in code.co_names)]
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    numbers = {each for each in values if type(each) is int and each > 0}
    return numbers.union(*(_find_numbers(each, names) for each in inner))


def largest_number(params: MethodParams, default: int = 0) -> int:
    """Return the largest integer parameter. The size of a tree and of a memory do not count."""
    if isinstance(params, LengthParams):
        return params.levels
    numbers = [
        n
        for name, n in params.model_dump().items()
        if type(n) is int and name not in (TREE_SIZE_PARAM, MEMORY_PARAM)
    ]
    return max(numbers, default=default)


def max_draft_levels(params: MethodParams, default: int = 0) -> int:
    """Return an upper bound of the number of levels of a method's drafts."""
    depth = getattr(params, "depth", None)
    return depth if type(depth) is int else largest_number(params, default)


def format_params(params: MethodParams) -> str:
    """Return the parameters that differ from the defaults as text, such as "length=2"."""
    changed = params.model_dump(exclude_defaults=True)
    return " ".join(f"{name}={value}" for name, value in changed.items()) or "default parameters"


def _make_variants(kind: type[MethodParams], off: Mapping[str, Any]) -> Iterator[MethodParams]:
    """Yield the parameter sets of `AuditSubject.variants`.

    These are the defaults, small integers, and each other choice of a parameter with small
    integers. Integers are reduced to at most 2, to at most 1, and to 1 except for one of them. The
    size of a tree is reduced to twice that number.

    Args:
        off: values with which a lossy method is lossless.
    """
    fields = kind.model_fields
    reduced = [_drop_invalid(kind, _limit_numbers(kind, most)) for most in (2, 1)]
    reduced += [
        _drop_invalid(kind, {**reduced[1], name: 2}) for name in reduced[1] if len(reduced[1]) > 1
    ]
    choices = [
        _drop_invalid(kind, {**numbers, name: choice})
        for name, field in fields.items()
        for choice in _other_choices(field)
        for numbers in (reduced[0], *reduced[2:3])
    ]
    seen: list[object] = []
    # With these values a lossy method is lossless, and must pass the checks of lossless methods.
    exact = [{**numbers, **off} for numbers in ({}, *reduced[:2])] if off else []
    for values in ({}, *reduced, *choices, *exact):
        params = kind(**values)
        # With a fixed draft length, the parameters of the other length rules have no effect.
        fixed = isinstance(params, LengthParams) and params.levels in (params.length, 1)
        counts = (largest_number(params), getattr(params, "rule", None)) if fixed else params
        if counts not in seen:
            seen.append(counts)
            yield params


def _change_one_param(kind: type[MethodParams]) -> Iterator[MethodParams]:
    """Yield the defaults with one parameter changed.

    Each choice is also combined with each number at its minimum, because the choice may decide
    whether the number is used.
    """
    fields = kind.model_fields
    choices = [(name, choice) for name, field in fields.items() for choice in _other_choices(field)]
    changed: list[dict[str, Any]] = [
        {name: value}
        for name, field in fields.items()
        for value in (*_other_numbers(field), *_other_choices(field), *_other_lists(field))
    ]
    changed += [
        {name: choice, other: lowest}
        for name, choice in choices
        for other, field in fields.items()
        for lowest in [n for n in _other_numbers(field) if _drop_invalid(kind, {other: n})][-1:]
        if other != name
    ]
    default = kind()
    seen = [default.model_dump()]
    for values in changed:
        kept = _drop_invalid(kind, values)
        params = kind(**kept)
        fixed = isinstance(getattr(params, "length", None), int)
        if fixed and isinstance(params, LengthParams) and {"max", "threshold"} & kept.keys():
            continue  # only a length rule uses them
        if len(kept) == len(values) and params.model_dump() not in seen:
            seen.append(params.model_dump())
            yield params


def _other_numbers(field: FieldInfo) -> list[Any]:
    """Return other values for a number parameter: smaller, larger, its bounds, and None."""
    default, kinds = field.default, _annotation_types(field)
    if type(default) is int:
        nearer: list[Any] = [default // 2, 2 * default, *((1, 0) if field.metadata else (1,))]
    elif isinstance(default, float):
        nearer = [default / 2, 2 * default, 1.0, 0.0]
    elif default is None and int in kinds:
        nearer = [1, 2]
    elif default is None and float in kinds:
        nearer = [0.3, 1.0, 0.0]
    else:
        nearer = []
    return [*nearer, *([None] if type(None) in kinds and default is not None else [])]


def _other_lists(field: FieldInfo) -> list[Any]:
    """Return other values for a list parameter: its suffixes, or a short list if the default is
    None.
    """
    default = field.default
    if isinstance(default, tuple):
        return [default[at:] for at in range(1, len(default))]
    lists = any(get_origin(kind) is tuple for kind in _unwrap_annotations(field))
    return [(2, 2, 1, 1, 1)] if default is None and lists else []


def _annotation_types(field: FieldInfo) -> tuple[Any, ...]:
    """Return a parameter's type, or the types of a union."""
    return (field.annotation, *get_args(field.annotation))


def _unwrap_annotations(field: FieldInfo) -> Iterator[Any]:
    for kind in _annotation_types(field):
        yield kind
        yield from get_args(kind)[:1]  # the type inside Annotated


def _limit_numbers(kind: type[MethodParams], most: int) -> dict[str, Any]:
    """Return the integer parameters that are larger than `most`, with the value `most` instead."""
    numbers = {
        name: f.default
        for name, f in kind.model_fields.items()
        if type(f.default) is int and name != MEMORY_PARAM
    }
    bounds = {name: 2 * most if name == TREE_SIZE_PARAM else most for name in numbers}
    return {name: bounds[name] for name, default in numbers.items() if default > bounds[name]}


def _other_choices(field: FieldInfo) -> list[Any]:
    """Return the values of a boolean or Literal parameter, except its default."""
    values: list[Any] = []
    for kind in _annotation_types(field):
        if kind is bool:
            values += [True, False]
        elif get_origin(kind) is Literal:
            values += get_args(kind)
    return [value for value in values if value != field.default]


def _drop_invalid(kind: type[MethodParams], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that the validation of the parameters accepts."""
    try:
        kind(**values)
    except ValidationError as refused:
        wrong = {str(error["loc"][0]) for error in refused.errors() if error["loc"]}
        kept = {name: value for name, value in values.items() if name not in wrong}
        return _drop_invalid(kind, kept) if len(kept) < len(values) else {}
    return dict(values)
