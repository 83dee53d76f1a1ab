"""Methods that draft unusually or badly but correctly: the audit must find no fault in them."""

from typing import ClassVar, Literal

import pytest
import torch

from methods.medusa.method import Medusa, MedusaParams
from methods.pld import Pld, PldParams
from methods.sps import Sps, SpsParams
from methods.sps_tree import SpsTree, SpsTreeParams
from specbench_cli.audit.cases import random_cases
from specbench_cli.audit.certificate import certify
from specbench_cli.audit.runner import TABLE_CHECKS, run_checks
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.types import ModelOutput, Tokens
from tests.audit.faults.learning import Learning
from tests.audit.faults.trees import WorstFirst


class Altered(Sps):
    """Method that drafts from changed logits, and reports their q."""

    def propose(self, session, limit):
        picks, x = [], session.pending_tokens(self.state.length())
        for ahead in range(min(self.params.levels, limit)):
            out = self.model.forward(x, self.state)
            picks.append(
                session.pick(ModelOutput(self.altered(session, out.logits), out.hidden), ahead)
            )
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def altered(self, session, logits):
        return logits


class Colder(Altered):
    """Method that drafts at half the temperature."""

    def altered(self, session, logits):
        return logits * 2


class Hotter(Altered):
    """Method that drafts at four times the temperature."""

    def altered(self, session, logits):
        return logits / 4


class WarmsUp(Altered):
    """Method that drafts at another temperature after a rejected draft."""

    def start(self, session):
        super().start(session)
        self.scale = 1.0

    def altered(self, session, logits):
        return logits * self.scale

    def observe(self, session, outcome):
        super().observe(session, outcome)
        self.scale = 1.0 if outcome.path else 0.5


class Biased(Altered):
    """Method that prefers even tokens, so its draft is worse than its model."""

    def altered(self, session, logits):
        return logits + torch.arange(logits.shape[-1]) % 2 * -0.7


class HalfUniform(Altered):
    """Method that mixes the draft distribution with a uniform one."""

    def altered(self, session, logits):
        p = logits.softmax(-1)
        allowed = logits.isfinite().to(p.dtype)
        return (p / 2 + allowed / allowed.sum(-1, keepdim=True) / 2).log()


class Noisy(Altered):
    """Method that adds noise which depends only on the position."""

    def altered(self, session, logits):
        seed = torch.Generator().manual_seed(len(session.tokens()))
        return logits + 0.5 * torch.randn(logits.shape, generator=seed, dtype=logits.dtype)


class Greedy(Sps):
    """Method that drafts the most likely tokens deterministically under every rule."""

    def propose(self, session, limit):
        picks, x = [], session.pending_tokens(self.state.length())
        for _ in range(min(self.params.levels, limit)):
            token = self.model.forward(x, self.state).logits[0, -1:].argmax(-1)
            picks.append((token, None))
            x = Tokens(token[None])
        return session.chain_of_picks(picks)


class SkipsSteps(Sps):
    """Method that drafts nothing in every third step."""

    def propose(self, session, limit):
        return super().propose(session, limit if len(session.output()) % 3 else 0)


class RestsBehindRejections(Sps):
    """Method that drafts nothing in the step after a step without accepted tokens."""

    rests = False

    def start(self, session):
        super().start(session)
        self.rests = False

    def propose(self, session, limit):
        return super().propose(session, 0 if self.rests else limit)

    def observe(self, session, outcome):
        super().observe(session, outcome)
        self.rests = not self.rests and not outcome.path


class RandomLengths(Sps):
    """Method whose draft length depends on the text length."""

    def propose(self, session, limit):
        most = torch.randint(4, (), generator=torch.Generator().manual_seed(len(session.tokens())))
        return super().propose(session, min(limit, int(most)))


class DrawnLengths(Sps):
    """Method that draws its draft length at random."""

    def propose(self, session, limit):
        if session.sampling.draws and limit > 1:
            limit = 1 + int(session.random.categorical(torch.tensor([[0.5, 0.5]])))
        return super().propose(session, limit)


class GrowsAndShrinks(Sps):
    """Method that increases the draft length after a fully accepted draft, else decreases it."""

    most = 1

    def start(self, session):
        super().start(session)
        self.most = 1

    def propose(self, session, limit):
        return super().propose(session, min(limit, self.most))

    def observe(self, session, outcome):
        super().observe(session, outcome)
        whole = outcome.origin[-1] == "bonus"
        self.most = max(1, min(self.params.levels, self.most + (1 if whole else -1)))


class TwoLevels(SpsTree):
    """Method that drafts a tree with two levels, and sometimes leaves out the second."""

    def propose(self, session, limit):
        return super().propose(session, min(limit, 1 + len(session.tokens()) % 2))


class SkipsHeads(Medusa):
    """Method that does not run its heads in every other step."""

    def propose(self, session, limit):
        return super().propose(session, limit) if limit % 2 else session.chain(())


class LearnsSlowly(Learning):
    """Method that learns between requests, with half the draft length."""

    def propose(self, session, limit):
        return super().propose(session, (limit + 1) // 2)


class CopiesOrDrafts(Sps):
    """Method that copies the token after the last occurrence of the newest token, or drafts."""

    def propose(self, session, limit):
        text = session.tokens()
        at = next((i for i in range(len(text) - 2, -1, -1) if text[i] == text[-1]), None)
        if at is None or len(text) % 2 or not limit:
            return super().propose(session, limit)
        return session.chain([text[at + 1]])


class LooksUpLess(Pld):
    """Method without lookups while the output is short, and with shorter ones later."""

    def propose(self, session, limit):
        found = super().propose(session, limit)
        return session.chain(found.tokens[: max(0, found.nodes - 1)])


class Lists(Sps):
    """Method that stores all its drafts and does not use them."""

    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        session.memory.setdefault("drafts", []).append(draft.tokens.tolist())
        return draft


SHORT = (SpsParams(length=5), SpsParams(length=2), SpsParams(length=1))
TREES = (SpsTreeParams(widths=(2, 2), width=2, depth=2),)
HARMLESS = {
    **dict.fromkeys((Colder, Hotter, WarmsUp, Biased, HalfUniform, Noisy, Greedy), SHORT),
    **dict.fromkeys((SkipsSteps, RestsBehindRejections, RandomLengths, DrawnLengths), SHORT),
    **dict.fromkeys((GrowsAndShrinks, LearnsSlowly, CopiesOrDrafts, Lists), SHORT),
    TwoLevels: TREES,
    SkipsHeads: (MedusaParams(nodes=4),),
    LooksUpLess: (PldParams(ngram=2, length=2),),
}


@pytest.mark.usefixtures("short_audit")
@pytest.mark.parametrize("method", HARMLESS, ids=lambda method: method.__name__)
def test_a_harmless_method_is_not_called_faulty(method):
    subject = AuditSubject(method.name, method, HARMLESS[method])
    found = run_checks(subject, TABLE_CHECKS)
    assert [finding for finding in found if not finding.passed] == []
    assert certify(subject, found, 0.0).verdict == "PASSED"


def traces(method, params):
    """Return the drafts of each step, their q, and the memory, of requests under two rules."""
    found = []
    for rule in ("greedy", "rejection"):
        for case in random_cases(rule, 12, levels=5):
            memory = Memory()
            session = case.open(memory=memory)
            drafts = [step.draft for step in method(params).generate(session)]
            found += [(each.tokens.tolist(), each.parents, rounded(each.q)) for each in drafts]
            found.append(sorted(memory))
    return found


def rounded(q):
    return None if q is None else q.double().numpy().round(9).tolist()


@pytest.mark.parametrize("method", HARMLESS, ids=lambda method: method.__name__)
def test_a_harmless_method_differs_from_its_base_in_drafts_or_memory(method):
    published = next(base for base in method.__mro__ if base.__module__ != __name__)
    params = HARMLESS[method][0]
    assert traces(method, params) != traces(published, params)


@pytest.mark.usefixtures("short_audit")
def test_a_draft_worse_than_a_random_guess_is_faulty():
    subject = AuditSubject("sps-tree", WorstFirst, TREES)
    found = run_checks(subject, {"twin draft": TABLE_CHECKS["twin draft"]})
    assert "twin draft" in {finding.check for finding in found if not finding.passed}
