"""What is audited: a method's real code, with the parameters that reach its every branch."""

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
"""The parameter that is a tree's size: of the likeliest nodes, which adds no outcomes."""

MEMORY_PARAM = "memory"
"""The parameter that says how much is kept of earlier prompts, which no draft is as long as."""

LOOKUP_METHODS = frozenset({"pld", "sam", "suffix"})
"""Methods that draft what followed an earlier occurrence: a text that repeats itself, with whatever
period, must be accepted in full."""


@dataclass(frozen=True)
class AuditSubject:
    """A method and the parameters to audit it with.

    Attributes:
        name: its name on the command line.
        method: its class.
        variants: parameters, the defaults first, then short ones whose outcomes can be walked, and
            those at which a lossy method is exact.
        varied: more parameters, each the defaults with one parameter changed: numbers in both
            directions and to their bounds, what may be left out left out or given, every choice.
    """

    name: str
    method: type[Method]
    variants: tuple[MethodParams, ...]
    single_changes: tuple[MethodParams, ...] = ()

    @classmethod
    def from_method(cls, name: str, method: type[Method]) -> AuditSubject:
        """A subject with variants worked out from the types of the method's parameters."""
        variants = tuple(_make_variants(method.Params, method.exact_params))
        single_changes = (each for each in _change_one_param(method.Params) if each not in variants)
        return cls(name, method, variants, tuple(single_changes))

    def lossless_params(
        self, rule: Rule, *, few_outcomes: bool = False, single_changes: bool = False
    ) -> Iterator[MethodParams]:
        """The variants that promise to be lossless under a rule.

        Under a rule that draws there is no vanilla output for an upper bound to read.

        Args:
            walkable: only those with numbers of at most 2, so that a step has few outcomes.
            varied: those of `varied` too.
        """
        for params in (*self.variants, *(self.single_changes if single_changes else ())):
            method = self.method(params)
            known = rule not in ("rejection", "block") or not method.upper_bound
            small = not few_outcomes or largest_number(params) <= 2
            if method.guarantee(rule) in LOSSLESS and known and small:
                yield params

    @property
    def code_constants(self) -> Sequence[int]:
        """The whole numbers in the method's own code and the globals that it reads, in order: what
        it may do something else beyond."""
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
        """A number above each of the method's thresholds that is less than `at_most`."""
        return max([at_least, *(n + 1 for n in self.code_constants if n < at_most)])

    @property
    def uses_draft_model(self) -> bool:
        """Whether a model or a head drafts for it, as far as it says."""
        modelled = self.uses_head or bool({"draft", "head"} & self.method.needs)
        return modelled and self.method.proposes

    @property
    def uses_head(self) -> bool:
        """Whether a head drafts for it."""
        artifacts = self.method(self.variants[0]).artifacts()
        return any(issubclass(wanted.kind, Head | FeatureHead) for wanted in artifacts)


def _find_numbers(code: CodeType, names: Mapping[str, Any]) -> set[int]:
    """Whole numbers among the constants of a function, of those inside it, and of its globals."""
    values = [*code.co_consts, *(names.get(name) for name in code.co_names)]
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    numbers = {each for each in values if type(each) is int and each > 0}
    return numbers.union(*(_find_numbers(each, names) for each in inner))


def largest_number(params: MethodParams, default: int = 0) -> int:
    """The largest whole number among the parameters, but for the sizes of trees and of memory."""
    if isinstance(params, LengthParams):
        return params.levels
    numbers = [
        n
        for name, n in params.model_dump().items()
        if type(n) is int and name not in (TREE_SIZE_PARAM, MEMORY_PARAM)
    ]
    return max(numbers, default=default)


def max_draft_levels(params: MethodParams, default: int = 0) -> int:
    """A bound on the levels of a draft."""
    depth = getattr(params, "depth", None)
    return depth if type(depth) is int else largest_number(params, default)


def format_params(params: MethodParams) -> str:
    """The parameters that differ from the defaults, as they are typed: "length=2"."""
    changed = params.model_dump(exclude_defaults=True)
    return " ".join(f"{name}={value}" for name, value in changed.items()) or "default parameters"


def _make_variants(kind: type[MethodParams], off: Mapping[str, Any]) -> Iterator[MethodParams]:
    """Defaults; whole numbers at most 2, then 1, then 1 but for one of them; with these, every
    other choice of a parameter. Trees get twice as many nodes."""
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
    # Where a lossy method is exact, it is audited as an exact one.
    exact = [{**numbers, **off} for numbers in ({}, *reduced[:2])] if off else []
    for values in ({}, *reduced, *choices, *exact):
        params = kind(**values)
        # A number for a length leaves the rules' parameters unread, and of one there is no choice.
        fixed = isinstance(params, LengthParams) and params.levels in (params.length, 1)
        counts = (largest_number(params), getattr(params, "rule", None)) if fixed else params
        if counts not in seen:
            seen.append(counts)
            yield params


def _change_one_param(kind: type[MethodParams]) -> Iterator[MethodParams]:
    """The defaults with one parameter changed, in every way there is; and every choice of another
    one with each number switched off, or as low as it goes: a choice may be what reads it."""
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
            continue  # a rule reads them
        if len(kept) == len(values) and params.model_dump() not in seen:
            seen.append(params.model_dump())
            yield params


def _other_numbers(field: FieldInfo) -> list[Any]:
    """Other values of a number: less and more, its bounds, and none."""
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
    """Other values of a list: its ends; of one that is left out, a short one of numbers."""
    default = field.default
    if isinstance(default, tuple):
        return [default[at:] for at in range(1, len(default))]
    lists = any(get_origin(kind) is tuple for kind in _unwrap_annotations(field))
    return [(2, 2, 1, 1, 1)] if default is None and lists else []


def _annotation_types(field: FieldInfo) -> tuple[Any, ...]:
    """A parameter's type, or those of a union."""
    return (field.annotation, *get_args(field.annotation))


def _unwrap_annotations(field: FieldInfo) -> Iterator[Any]:
    for kind in _annotation_types(field):
        yield kind
        yield from get_args(kind)[:1]  # of what is annotated


def _limit_numbers(kind: type[MethodParams], most: int) -> dict[str, Any]:
    """The whole numbers of a method's parameters, cut down."""
    numbers = {
        name: f.default
        for name, f in kind.model_fields.items()
        if type(f.default) is int and name != MEMORY_PARAM
    }
    bounds = {name: 2 * most if name == TREE_SIZE_PARAM else most for name in numbers}
    return {name: bounds[name] for name, default in numbers.items() if default > bounds[name]}


def _other_choices(field: FieldInfo) -> list[Any]:
    """The values of a parameter that has few, but for its default."""
    values: list[Any] = []
    for kind in _annotation_types(field):
        if kind is bool:
            values += [True, False]
        elif get_origin(kind) is Literal:
            values += get_args(kind)
    return [value for value in values if value != field.default]


def _drop_invalid(kind: type[MethodParams], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that the method does not allow."""
    try:
        kind(**values)
    except ValidationError as refused:
        wrong = {str(error["loc"][0]) for error in refused.errors() if error["loc"]}
        kept = {name: value for name, value in values.items() if name not in wrong}
        return _drop_invalid(kind, kept) if len(kept) < len(values) else {}
    return dict(values)
