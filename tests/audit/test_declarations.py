"""Declarations of a class that its code contradicts are reported as wrong declarations."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from methods.pearl import Pearl, PearlParams
from methods.sps import Sps, SpsParams
from specbench_cli.api import (
    AcceptRule,
    Draft,
    Field,
    Method,
    MethodParams,
    Session,
    Tokens,
)
from specbench_cli.audit.certificate import certify
from specbench_cli.audit.checks.bookkeeping import check_bookkeeping
from specbench_cli.audit.checks.bounds import check_bounds
from specbench_cli.audit.checks.declarations import check_declarations
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.runner import CHECKS
from specbench_cli.audit.subject import AuditSubject


class RepeatParams(MethodParams):
    times: int = Field(2, ge=1, description="copies")


class Repeat(Method):
    """Repeat last."""

    Params = RepeatParams
    name = "repeat"

    def propose(self, session: Session, limit: int) -> Draft:
        return session.chain(list(session.tokens()[-1:]) * min(self.params.times, limit))


class CopiedHead(Repeat):
    needs = frozenset({"head"})


class CopiedDraft(Repeat):
    needs = frozenset({"draft"})


class UndeclaredDraft(Repeat):
    def start(self, session):
        self.model = session.draft()
        self.model.forward(session.pending_tokens(0), session.new_state(self.model), logits_at=None)

    def propose(self, session, limit):
        token = session.tokens()[-1:]
        state = session.new_state(self.model)
        out = self.model.forward(Tokens(session.pending_tokens(0).ids[:, -1:]), state)
        state.clear()
        return session.chain_of_picks([session.pick(out, 0)] if limit and token else [])


class ForgetsEverything(Repeat):
    state_scope = "run"


class KeepsUndeclared(Repeat):
    def observe(self, session, outcome):
        session.memory["steps"] = session.memory.get("steps", 0) + 1


class LearnsUndeclared(Repeat):
    def learn(self, session):
        session.memory["learnt"] = True


class AsksNothing(Repeat):
    uses_costs = True


class AsksUndeclared(Repeat):
    def propose(self, session, limit):
        return super().propose(session, limit if session.verify_cost(2) else 0)


class NoBonus(Sps):
    bonus = False


class ProposesNothing(Sps):
    proposes = False


class HiresNobody(Repeat):
    workers = 2


class HiresUndeclared(Pearl):
    workers = 1


class TunesNothing(Repeat):
    tunable = frozenset({"length"})


class OfAnotherPaper(Repeat):
    paper_params: ClassVar = {"times": 0}


@dataclass(frozen=True)
class Anything(AcceptRule):
    name: ClassVar[str] = "anything"

    def lets_pass(self, p, tokens):
        return p[:, 0] >= 0


class Promises(Repeat):
    accept = Anything()

    def guarantee(self, sampling):
        return "exact_tokens"


WRONG = {
    CopiedHead: ("needs", "'head', but no head ran in", "remove 'head' from `needs`"),
    CopiedDraft: ("needs", "'draft', but no draft model ran in", "remove 'draft' from `needs`"),
    UndeclaredDraft: ("needs", "not contain 'draft', but the method ran a draft", "frozenset"),
    ForgetsEverything: ("state_scope", "'run', but in", "remove `state_scope`"),
    KeepsUndeclared: ("state_scope", "'prompt', but the method stored something", '= "run"'),
    LearnsUndeclared: ("state_scope", "'prompt', but the method has a `learn`", '= "run"'),
    AsksNothing: ("uses_costs", "True, but no cost was read in", "remove `uses_costs`"),
    AsksUndeclared: ("uses_costs", "False, but the method read the costs", "`uses_costs = True`"),
    HiresNobody: ("workers", "2, but no parallel drafter ran in", "remove `workers`"),
    TunesNothing: ("tunable", "no parameter 'length'", "some of times"),
    OfAnotherPaper: ("paper", "times: Input should be greater than or equal to 1", "values"),
    Promises: ("guarantee", "promises 'exact_tokens', but its accept rule 'anything'", "remove"),
}
OF_OTHERS = {
    NoBonus: (SpsParams(length=2), "bonus", "a token followed a fully accepted draft"),
    HiresUndeclared: (PearlParams(), "workers", "1, but 2 workers computed at once"),
    ProposesNothing: (
        SpsParams(length=2),
        "proposes",
        "it is False, but the method drafted tokens",
    ),
}


@pytest.fixture(autouse=True)
def _short(short_audit):
    pass


@pytest.mark.parametrize("method", WRONG, ids=lambda method: method.__name__)
def test_a_wrong_declaration_is_reported_with_the_observation_and_the_correction(method):
    declared, seen, look = WRONG[method]
    subject = AuditSubject.from_method("copied", method)
    (found,) = check_declarations(subject)
    assert not found.passed
    assert f"`{declared}` of {method.__name__} contradicts what it does" in found.problem.what
    assert seen in found.problem.what
    assert look in found.problem.look
    assert certify(subject, [found], 0.0).verdict == "MISDECLARED"


@pytest.mark.parametrize("method", OF_OTHERS, ids=lambda method: method.__name__)
def test_a_copied_method_with_a_wrong_declaration_is_reported(method):
    params, declared, seen = OF_OTHERS[method]
    (found,) = check_declarations(AuditSubject("copied", method, (params,)))
    assert f"`{declared}` of {method.__name__}" in found.problem.what
    assert seen in found.problem.what


def test_a_correct_method_with_an_unused_declaration_passes_all_other_checks():
    subject = AuditSubject.from_method("copied", CopiedDraft)
    assert check_bounds(subject) == []
    assert all(found.passed for found in check_bookkeeping(subject))


def test_a_correct_declaration_is_not_reported():
    for subject in (
        AuditSubject.from_method("fine", Repeat),
        AuditSubject("sps", Sps, (SpsParams(length=2),)),
        AuditSubject("pearl", Pearl, (PearlParams(),)),
    ):
        (found,) = check_declarations(subject)
        assert found.passed
        assert found.figure["steps"] > 0


def test_a_method_that_raises_is_reported_by_other_checks():
    class Raises(Repeat):
        def propose(self, session, limit):
            raise RuntimeError("no")

    (found,) = check_declarations(AuditSubject.from_method("raises", Raises))
    assert found.passed


def test_a_declaration_is_reported_before_a_fault_and_after_a_wrong_output():
    problem = Problem("what", "where", "look")
    declared, count, distribution = (
        Finding(name, False, {}, problem) for name in ("declarations", "counters", "distribution")
    )
    subject = AuditSubject.from_method("fine", Repeat)
    assert certify(subject, [declared, count], 0.0).verdict == "MISDECLARED"
    assert certify(subject, [count], 0.0).verdict == "FAULTY"
    assert certify(subject, [declared, distribution], 0.0).verdict == "BROKEN"
    assert next(iter(CHECKS)) == "declarations"
