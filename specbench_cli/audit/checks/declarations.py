"""What a method's class declares, held against what its code does.

A wrong declaration is copied with a file, and costs no token: a run refuses models that nobody
uses, or leaves out what a method asks for. It is named as what it is, before anything else is
called a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, get_args

from pydantic import ValidationError

from specbench_cli.audit.cases import RULES, Case, make_sampling
from specbench_cli.audit.checks.conduct import cases
from specbench_cli.audit.finding import DECLARATIONS, Finding, Problem
from specbench_cli.audit.models.table import pair
from specbench_cli.audit.subject import AuditSubject, max_draft_levels
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.method import Method
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Guarantee, Rule
from specbench_cli.store.schema import LOSSLESS

HELPERS = {"target", "draft"}
"""Models of a run that are no head's."""


@dataclass
class Seen:
    """What decodings of a method showed.

    models: those that ran, by name. costs: whether it asked for any. kept: whether something was
    kept in the session's memory. hired: drafters beside the target, at most. bonus: whether a token
    followed a draft that stood as a whole. proposed: whether there was any draft.
    """

    steps: int = 0
    models: set[str] = field(default_factory=set)
    costs: bool = False
    kept: bool = False
    hired: int = 0
    bonus: bool = False
    proposed: bool = False

    def add(self, method: Method, case: Case) -> None:
        """Decode a case. What a method raises is for other checks to say."""
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
                stood = len(step.outcome.path)
                self.proposed |= levels > 0
                self.bonus |= 0 < levels == stood < len(step.outcome.committed)
            self.models |= {forward.model for forward in session.harness.meter.forwards}
            self.hired = max(self.hired, len(session.harness.workers))
            self.kept |= bool(session.memory or session.memory.copies)


def check_declarations(subject: AuditSubject) -> list[Finding]:
    """Whether the class declares what its code does; the first contradiction is told."""
    watched = [(subject.method(params), Seen()) for params in subject.variants]
    for method, seen in watched:
        for case in _few(method.params):
            seen.add(method, case)
    said = next(chain(_words(subject), _undeclared(watched), _unused(subject, watched)), None)
    problem = None if said is None else said.problem(subject)
    steps = sum(seen.steps for _, seen in watched)
    return [Finding(DECLARATIONS, problem is None, {"steps": steps}, problem)]


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A declaration by its name, what was seen instead, and what to write."""

    name: str
    seen: str
    look: str

    def problem(self, subject: AuditSubject) -> Problem:
        """What the audit says of it."""
        owner = subject.method.__name__
        return Problem(
            f"the declaration `{self.name}` of {owner} contradicts what it does: {self.seen}",
            f"class attribute `{self.name}`, {subject.name}",
            self.look,
        )


Watched = Sequence[tuple[Method, Seen]]
"""A method with each of its parameters, and what it did with these."""


def _few(params: MethodParams) -> Iterator[Case]:
    """Requests under every rule that a draft model foresees in full, or nearly."""
    levels = max_draft_levels(params, default=5)
    for rule in RULES:
        for turn, kind in enumerate(("equal", "near")):
            yield Case(
                kind, pair(kind, 5), make_sampling(rule, turn), budget=min(4 * levels, 40) + 1
            )


def _words(subject: AuditSubject) -> Iterator[Contradiction]:
    """What contradicts the class itself, whatever is decoded."""
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
            "`paper` holds values that the method's own parameters may have",
        )
    if method.learn is not Method.learn and method.state_scope == "prompt":
        yield Contradiction(
            "state_scope",
            "it is 'prompt', and there is a `learn`, which outlives a prompt",
            'give the class `state_scope = "run"`',
        )
    if method.exact_params:
        exact = method(method.Params.model_validate(dict(method.exact_params)))
        found = {exact.guarantee(sampling) for sampling in get_args(Rule)} - set(LOSSLESS)
        if found:
            yield Contradiction(
                "off",
                f"with these parameters it promises {', '.join(sorted(found))}",
                "`off` holds the parameters at which nothing passes but what is exact",
            )
    words = get_args(Guarantee)
    for params in subject.variants:
        made = method(params)
        rule = made.accept
        for sampling in get_args(Rule) if rule is not None and not rule.is_exact else ():
            promised = made.guarantee(sampling)
            if rule is not None and words.index(promised) < words.index(rule.guarantee):
                yield Contradiction(
                    "guarantee",
                    f"under {sampling} it promises {promised!r}, and its accept rule"
                    f" {rule.name!r} lets pass what is {rule.guarantee!r}",
                    "leave `guarantee` out: it follows from the accept rule",
                )


def _undeclared(watched: Watched) -> Iterator[Contradiction]:
    """What was done and is not declared."""
    for method, seen in watched:
        if "draft" in seen.models and "draft" not in method.requirements:
            yield Contradiction(
                "needs",
                "it does not name 'draft', and a draft model was run",
                'give the class `needs = frozenset({"draft"})`: without it a run may have none',
            )
        if seen.costs and not method.uses_costs:
            yield Contradiction(
                "uses_costs",
                "it is False, and costs of forwards were asked for",
                "give the class `uses_costs = True`: a run measures them for those that say so",
            )
        if seen.kept and method.state_scope == "prompt":
            yield Contradiction(
                "state_scope",
                "it is 'prompt', and something was kept in `session.memory`, which every prompt"
                " finds empty then",
                'give the class `state_scope = "run"`, or keep it on the object in `start`',
            )
        if seen.bonus and not method.bonus:
            yield Contradiction(
                "bonus",
                "it is False, and a token followed a draft that stood as a whole",
                "leave `bonus` out",
            )
        if seen.proposed and not method.proposes:
            yield Contradiction(
                "proposes",
                "it is False, and tokens were drafted",
                "leave `proposes` out: what drafts is held to more than what does not",
            )
        if seen.hired and seen.hired + 1 > method.workers:
            yield Contradiction(
                "workers",
                f"it is {method.workers}, and {seen.hired + 1} computed at once",
                f"give the class `workers = {seen.hired + 1}`",
            )


def _unused(subject: AuditSubject, watched: Watched) -> Iterator[Contradiction]:
    """What is declared and was never done. One that was not seen at once is looked for further."""
    method = subject.method
    models = {*HELPERS, *method(subject.variants[0]).models()}
    declared: dict[str, Callable[[Seen], bool]] = {
        "'draft'": lambda seen: "draft" in seen.models,
        "'head'": lambda seen: bool(seen.models - models),
        "state_scope": lambda seen: seen.kept,
        "uses_costs": lambda seen: seen.costs,
        "workers": lambda seen: seen.hired > 0,
    }
    said = {
        "'draft'": "draft" in method.needs,
        "'head'": "head" in method.needs,
        "state_scope": any(made.scope != "prompt" for made, _ in watched),
        "uses_costs": all(made.uses_costs for made, _ in watched),
        "workers": method.workers > 1,
    }
    open_ = [
        name
        for name, done in declared.items()
        if said[name] and not any(done(seen) for _, seen in watched)
    ]
    further = Seen()
    for params, case in cases(subject) if open_ else ():
        further.add(method(params), case)
        open_ = [name for name in open_ if not declared[name](further)]
        if not open_:
            return
    steps = further.steps + sum(seen.steps for _, seen in watched)
    for name in open_:
        yield Contradiction(*_UNUSED[name](steps, method))


_UNUSED: Mapping[str, Callable[[int, type[Method]], tuple[str, str, str]]] = {
    "'draft'": lambda steps, _: (
        "needs",
        f"it names 'draft', and in none of {steps} steps was one run",
        "take 'draft' out of `needs`: a run would be refused for want of a draft model that the"
        " method does not use",
    ),
    "'head'": lambda steps, _: (
        "needs",
        f"it names 'head', and in none of {steps} steps was one run",
        "take 'head' out of `needs`, if no head drafts. One that does is a `Head` or a"
        " `FeatureHead` which `artifacts()` names, comes from `session.artifact(...)`, and is"
        " called itself: what else it computes is not metered",
    ),
    "state_scope": lambda steps, method: (
        "state_scope",
        f"it is {method.state_scope!r}, and in {steps} steps nothing was kept in `session.memory`",
        "leave `state_scope` out: its rows would be told to depend on the order of the prompts; or"
        " keep in `session.memory` what shall outlive a prompt",
    ),
    "uses_costs": lambda steps, _: (
        "uses_costs",
        f"it is True, and in none of {steps} steps was a cost asked for",
        "leave `uses_costs` out: its counters would be told to depend on times",
    ),
    "workers": lambda steps, method: (
        "workers",
        f"it is {method.workers}, and in none of {steps} steps was a drafter hired",
        "leave `workers` out: a run would divide the machine for it",
    ),
}
