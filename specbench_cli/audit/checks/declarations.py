"""Check of the declarations of a method's class against what its code does.

Declarations are class attributes such as `needs` and `workers`. A wrong one often comes from
copying a file. It changes no token, but a run may then load a model that is not used, or lack a
model that the method needs. It is reported before other faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, get_args

from pydantic import ValidationError

from specbench_cli.audit.cases import RULES, Case, make_sampling
from specbench_cli.audit.checks.bookkeeping import decoding_cases
from specbench_cli.audit.finding import DECLARATIONS, Finding, Problem
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.audit.subject import AuditSubject, max_draft_levels
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.method import Method
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Guarantee, Rule
from specbench_cli.store.schema import LOSSLESS

SHARED_MODELS = {"target", "draft"}
"""Models of a run other than heads."""


@dataclass
class MethodUsage:
    """Observed behaviour of a method.

    Attributes:
        steps: number of steps.
        models: names of the models that ran.
        costs: whether it read costs of forwards.
        uses_memory: whether it stored something in the session's memory.
        drafters: maximum number of parallel drafters.
        has_bonus: whether a bonus token followed a fully accepted draft.
        proposes: whether it drafted tokens.
    """

    steps: int = 0
    models: set[str] = field(default_factory=set)
    costs: bool = False
    uses_memory: bool = False
    drafters: int = 0
    has_bonus: bool = False
    proposes: bool = False

    def decode(self, method: Method, case: Case) -> None:
        """Decode a case. Exceptions are ignored here, because other checks report them."""
        workspace, memory = case.create_workspace(), Memory()
        nominal = workspace.costs

        def costs(model: str, rows: int, *step: int) -> float:
            self.costs = True
            assert nominal is not None
            return nominal(model, rows, *step)

        workspace.costs = costs
        with suppress(Exception):
            own = workspace.decode_alone(method.decodes)
            kept: dict[str, Any] = {"workspace": own, "memory": memory}
            kept |= case.warm_up(method)
            session = case.open(**kept)
            for step in method.generate(session):
                self.steps += 1
                levels = step.draft.levels if step.draft is not None else 0
                n_accepted = len(step.outcome.path)
                self.proposes |= levels > 0
                self.has_bonus |= 0 < levels == n_accepted < len(step.outcome.committed)
            self.models |= {forward.model for forward in session.harness.meter.forwards}
            self.drafters = max(self.drafters, len(session.harness.workers))
            self.uses_memory |= bool(session.memory or session.memory.copies)


def check_declarations(subject: AuditSubject) -> list[Finding]:
    """Check the declarations of the class and report the first contradiction."""
    usages = [(subject.method(params), MethodUsage()) for params in subject.variants]
    for method, usage in usages:
        for case in _predictable_cases(method.params):
            usage.decode(method, case)
    contradiction = next(
        chain(
            _find_class_contradictions(subject),
            _find_undeclared(usages),
            _find_unused(subject, usages),
        ),
        None,
    )
    problem = None if contradiction is None else contradiction.to_problem(subject)
    steps = sum(usage.steps for _, usage in usages)
    return [Finding(DECLARATIONS, problem is None, {"steps": steps}, problem)]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A wrong declaration of a method: its name, the behaviour that contradicts it, and the fix."""

    name: str
    observed: str
    look: str

    def to_problem(self, subject: AuditSubject) -> Problem:
        """Return the problem to report."""
        owner = subject.method.__name__
        return Problem(
            f"the declaration `{self.name}` of {owner} contradicts what it does: {self.observed}",
            f"class attribute `{self.name}`, {subject.name}",
            self.look,
        )


ObservedMethods = Sequence[tuple[Method, MethodUsage]]
"""A method with each of its parameters, and its observed behaviour."""


def _predictable_cases(params: MethodParams) -> Iterator[Case]:
    """Yield cases under every rule in which the draft model is right always or nearly always."""
    levels = max_draft_levels(params, default=5)
    for rule in RULES:
        for turn, kind in enumerate(("equal", "near")):
            yield Case(
                kind,
                make_table_pair(kind, 5),
                make_sampling(rule, turn),
                budget=min(4 * levels, 40) + 1,
            )


def _find_class_contradictions(subject: AuditSubject) -> Iterator[Contradiction]:
    """Yield declarations of the class that contradict each other. No decoding is needed to find
    them.
    """
    method = subject.method
    fields = method.Params.model_fields
    for name in sorted((method.tunable or frozenset()) - fields.keys()):
        yield Contradiction(
            "tunable", f"there is no parameter {name!r}", f"name some of {', '.join(fields)}"
        )
    try:
        method.Params.model_validate(dict(method.paper_params))
    except ValidationError as refused:
        where = ".".join(map(str, refused.errors()[0]["loc"]))
        yield Contradiction(
            "paper",
            f"{where}: {refused.errors()[0]['msg']}",
            "`paper` must contain valid values of the method's parameters",
        )
    if method.learn is not Method.learn and method.state_scope == "prompt":
        yield Contradiction(
            "state_scope",
            "it is 'prompt', but the method has a `learn`, which keeps state between prompts",
            'set `state_scope = "run"` in the class',
        )
    if method.exact_params:
        exact = method(method.Params.model_validate(dict(method.exact_params)))
        found = {exact.guarantee(sampling) for sampling in get_args(Rule)} - set(LOSSLESS)
        if found:
            yield Contradiction(
                "off",
                f"with these parameters the method promises {', '.join(sorted(found))}",
                "`off` must contain the parameters with which the method is lossless",
            )
    words = get_args(Guarantee)
    for params in subject.variants:
        variant = method(params)
        rule = variant.accept
        for sampling in get_args(Rule) if rule is not None and not rule.is_exact else ():
            promised = variant.guarantee(sampling)
            if rule is not None and words.index(promised) < words.index(rule.guarantee):
                yield Contradiction(
                    "guarantee",
                    f"under {sampling} it promises {promised!r}, but its accept rule"
                    f" {rule.name!r} only guarantees {rule.guarantee!r}",
                    "remove `guarantee`: it follows from the accept rule",
                )


def _find_undeclared(usages: ObservedMethods) -> Iterator[Contradiction]:
    """Yield observed behaviour of a method that its class does not declare."""
    for method, usage in usages:
        if "draft" in usage.models and "draft" not in method.requirements:
            yield Contradiction(
                "needs",
                "it does not contain 'draft', but the method ran a draft model",
                'set `needs = frozenset({"draft"})` in the class, or a run may have no draft model',
            )
        if usage.costs and not method.uses_costs:
            yield Contradiction(
                "uses_costs",
                "it is False, but the method read the costs of forwards",
                "set `uses_costs = True` in the class: only then does a run measure the costs",
            )
        if usage.uses_memory and method.state_scope == "prompt":
            yield Contradiction(
                "state_scope",
                "it is 'prompt', but the method stored something in `session.memory`, which is then"
                " empty for every prompt",
                'set `state_scope = "run"` in the class, or store it in an attribute in `start`',
            )
        if usage.has_bonus and not method.bonus:
            yield Contradiction(
                "bonus",
                "it is False, but a token followed a fully accepted draft",
                "remove `bonus`",
            )
        if usage.proposes and not method.proposes:
            yield Contradiction(
                "proposes",
                "it is False, but the method drafted tokens",
                "remove `proposes`: methods that draft have more checks",
            )
        if usage.drafters and usage.drafters + 1 > method.workers:
            yield Contradiction(
                "workers",
                f"it is {method.workers}, but {usage.drafters + 1} workers computed at once",
                f"set `workers = {usage.drafters + 1}` in the class",
            )


def _find_unused(subject: AuditSubject, usages: ObservedMethods) -> Iterator[Contradiction]:
    """Yield declarations whose behaviour was not observed, even in additional cases."""
    method = subject.method
    models = {*SHARED_MODELS, *method(subject.variants[0]).models()}
    is_used: dict[str, Callable[[MethodUsage], bool]] = {
        "'draft'": lambda usage: "draft" in usage.models,
        "'head'": lambda usage: bool(usage.models - models),
        "state_scope": lambda usage: usage.uses_memory,
        "uses_costs": lambda usage: usage.costs,
        "workers": lambda usage: usage.drafters > 0,
    }
    is_declared = {
        "'draft'": "draft" in method.needs,
        "'head'": "head" in method.needs,
        "state_scope": any(variant.scope != "prompt" for variant, _ in usages),
        "uses_costs": all(variant.uses_costs for variant, _ in usages),
        "workers": method.workers > 1,
    }
    unused = [
        name
        for name, done in is_used.items()
        if is_declared[name] and not any(done(usage) for _, usage in usages)
    ]
    more = MethodUsage()
    for params, case in decoding_cases(subject) if unused else ():
        more.decode(method(params), case)
        unused = [name for name in unused if not is_used[name](more)]
        if not unused:
            return
    steps = more.steps + sum(usage.steps for _, usage in usages)
    for name in unused:
        yield Contradiction(*_UNUSED_MESSAGES[name](steps, method))


_UNUSED_MESSAGES: Mapping[str, Callable[[int, type[Method]], tuple[str, str, str]]] = {
    "'draft'": lambda steps, _: (
        "needs",
        f"it contains 'draft', but no draft model ran in {steps} steps",
        "remove 'draft' from `needs`: a run without a draft model is rejected otherwise",
    ),
    "'head'": lambda steps, _: (
        "needs",
        f"it contains 'head', but no head ran in {steps} steps",
        "remove 'head' from `needs` if the method has no head. A head must be a `Head` or a"
        " `FeatureHead`, be listed in `artifacts()`, come from `session.artifact(...)`, and be"
        " called directly, because only its call is metered",
    ),
    "state_scope": lambda steps, method: (
        "state_scope",
        f"it is {method.state_scope!r}, but in {steps} steps nothing was stored in"
        " `session.memory`",
        "remove `state_scope`: reports would say that the method depends on the prompt order. If"
        " the method keeps state between prompts, store it in `session.memory`",
    ),
    "uses_costs": lambda steps, _: (
        "uses_costs",
        f"it is True, but no cost was read in {steps} steps",
        "remove `uses_costs`: reports would say that its counters depend on times",
    ),
    "workers": lambda steps, method: (
        "workers",
        f"it is {method.workers}, but no parallel drafter ran in {steps} steps",
        "remove `workers`: a run would divide the CPU cores for it",
    ),
}
