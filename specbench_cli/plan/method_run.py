"""Method with its parameters, as the plan of a run configures it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, get_args

from specbench_cli import registry
from specbench_cli.config import plugin_file
from specbench_cli.errors import UsageError
from specbench_cli.store.schema import GUARANTEES

if TYPE_CHECKING:
    from specbench_cli.engine.method import Method
    from specbench_cli.engine.types import Guarantee, Rule


@dataclass(frozen=True)
class MethodRun:
    """A method with its parameters. It is one row of the result table.

    `method` is the method object that decodes. `declared` has the same parameters and hooks but
    cannot decode. It is enough for a plan and does not import torch.

    Attributes:
        name: Name of the method.
        label: Name of the row in the table. It is unique within the run.
        user_params: Parameters that the user set.
        tuned: Number of candidates from which tuning selected the parameters. None without
            tuning.
    """

    name: str
    label: str
    user_params: Mapping[str, Any]
    tuned: int | None = None

    @classmethod
    def from_method(
        cls, name: str, label: str, method: Method, passed: Mapping[str, Any]
    ) -> MethodRun:
        """Create a `MethodRun` from an existing method object."""
        method_run = cls(name, label, passed)
        vars(method_run)["method"] = method
        return method_run

    @cached_property
    def method(self) -> Method:
        """The method object.

        Raises:
            UsageError: a parameter is unknown, or its value is not allowed.
        """
        return registry.build(self.name, self.user_params)

    @cached_property
    def declared(self) -> Method:
        """The method's declaration. It has parameters and hooks but cannot decode.

        Raises:
            UsageError: a parameter is unknown, or its value is not allowed.
        """
        if "method" in vars(self) or not self.is_built_in:
            return self.method
        return registry.declare(self.name, self.user_params)

    @property
    def is_built_in(self) -> bool:
        """True if the method is part of specbench. False for methods of plug-ins."""
        return self.name in registry.built_in_methods()

    @property
    def needs_draft(self) -> bool:
        """True if the method needs a draft model."""
        return "draft" in self.declared.requirements

    @property
    def acceptance_source(self) -> str | None:
        """Label of the method whose acceptance rate this random control copies.

        None for methods that are not random controls.
        """
        return get_acceptance_source(self.declared)

    @property
    def learns_from_prompts(self) -> bool:
        """True if the method learns from earlier prompts."""
        return bool(self.method.state_scope != "prompt")

    @property
    def is_reproducible(self) -> bool:
        """True if decoding a prompt twice in one process gives the same counters.

        Methods that adapt to forward costs are reproducible, because the costs are measured once
        per run.
        """
        same = self.method.timing_free or self.method.uses_costs
        return same and not self.method.peer and not self.learns_from_prompts

    @property
    def source(self) -> str:
        """Source of the parameters: "paper", "default", "tuned(n)" or "set" (by the user)."""
        if self.tuned is not None:
            return f"tuned({self.tuned})"
        method, params = type(self.declared), self.declared.params
        if method.paper_params and params == method.Params.model_validate(method.paper_params):
            return "paper"
        fields = method.Params.model_fields.items()
        plain = {name: field.get_default(call_default_factory=True) for name, field in fields}
        return "default" if dict(params) == plain else "set"

    @cached_property
    def guarantees(self) -> Mapping[Rule, Guarantee]:
        """Guarantee of the method about its output, under each verification rule.

        Raises:
            UsageError: The method returns an unknown guarantee.
        """
        from specbench_cli.engine.types import Rule

        found = {rule: self.declared.guarantee(rule) for rule in get_args(Rule)}
        for rule, word in found.items():
            if word not in GUARANTEES:
                raise UsageError(
                    f"{self.label}: its guarantee under {rule} is {word!r}, which is not one of"
                    f" {', '.join(GUARANTEES)}",
                    hint="correct its `guarantee(sampling)`, or omit the method",
                )
        return found

    def check_hooks(self) -> None:
        """Raise UsageError if a declaration hook, such as `models`, returns a wrong type."""
        from specbench_cli.engine.verify.hooks import wrong_return

        for hook, what, fits in _declaration_hooks():
            value = getattr(self.method, hook)
            value = value() if callable(value) else value
            if not fits(value):
                fault = wrong_return(self.method, hook, value, what)
                raise UsageError(
                    fault.message, "docs/reference/hooks.md describes what each hook returns"
                )

    @property
    def file_sha256(self) -> str:
        """SHA-256 of the file that defines the method.

        An audit is valid only for this version of the file.
        """
        return sha256(plugin_file.content(inspect.getfile(type(self.method)))).hexdigest()


def get_acceptance_source(method: Method) -> str | None:
    """Return the label of the method whose acceptance rate a random control copies.

    Return None if the method is not such a random control.
    """
    like: str | None = getattr(method.params, "like", None)
    return like


def _declaration_hooks() -> tuple[tuple[str, str, Callable[[Any], bool]], ...]:
    """Return the name, expected type as text, and check function of each declaration hook.

    A declaration hook is a method attribute such as `models`, which a plan reads before the run.
    """
    from specbench_cli.engine.models.artifact import ArtifactSpec
    from specbench_cli.engine.verify.accept import AcceptRule

    def is_list_of(kind: type) -> Callable[[Any], bool]:
        return lambda value: (
            isinstance(value, tuple | list) and all(isinstance(each, kind) for each in value)
        )

    return (
        ("models", "a tuple of names of models", is_list_of(str)),
        ("artifacts", "a tuple of ArtifactSpec modules", is_list_of(ArtifactSpec)),
        ("accept", "an AcceptRule or None", lambda value: isinstance(value, AcceptRule | None)),
        ("requirements", "a set of words", lambda value: isinstance(value, frozenset | set)),
        ("scope", "prompt, run or corpus", lambda value: value in ("prompt", "run", "corpus")),
    )
