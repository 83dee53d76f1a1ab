"""Methods of the package, each with one fault. The audit must catch all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from methods.pld import Pld
from methods.sps import Sps
from methods.sps_tree import SpsTree
from specbench_cli.engine.types import Origin, Outcome, Tokens
from tests.audit.faults.verifies import Verifies

# ---- what spoils the output ---------------------------------------------------------------------


class GreedyDraft(Sps):
    """Method that drafts the most likely token, but reports q as if it had drawn the token."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        return draft if draft.q is None else replace(draft, tokens=draft.q.argmax(-1))


class UnwarpedDistribution(Sps):
    """Method that draws with the temperature, and reports q without it."""

    def propose(self, session, limit):
        x, picks = session.pending_tokens(self.state.length()), []
        for ahead in range(min(self.params.levels, limit)):
            out = self.model.forward(x, self.state)
            token, q = session.pick(out, ahead)
            if q is not None and out.logits is not None:
                q = out.logits[:, -1].softmax(-1)
            picks.append((token, q))
            x = Tokens(token[None])
        return session.chain_of_picks(picks)


class DropsTheUnlikely(Sps):
    """Method that removes its last draft token if that is unlikely, which biases the rest."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        if draft.q is None or draft.q[-1, draft.tokens[-1]] > 0.3:
            return draft
        return replace(draft, tokens=draft.tokens[:-1], q=draft.q[:-1])


class EmitsUnverified(Verifies, Sps):
    """Method that commits its draft unverified at the end of the token budget."""

    def verify(self, session, draft, rows, *accept):
        outcome = self.verified(draft, rows, *accept)
        if draft.nodes < session.max_draft_length() or not draft.nodes:
            return outcome
        ids, m = tuple(draft.tokens.tolist()), draft.nodes
        accepted: list[Origin] = ["accepted"] * m
        return Outcome(tuple(range(m)), (*ids, outcome.committed[-1]), (*accepted, "bonus"), m)


class DecidesForItself(Verifies, Sps):
    """Method that compares its draft with the target's logits itself in greedy decoding.

    It ignores a grammar, so it is right only without one.
    """

    def verify(self, session, draft, rows, *accept):
        if session.sampling.draws:
            return self.verified(draft, rows, *accept)
        due = session.scores(rows, len(session.output())).argmax(-1).tolist()
        ids, accepted = draft.tokens.tolist(), 0
        while accepted < len(ids) and ids[accepted] == due[accepted]:
            accepted += 1
        last: Origin = "recovered" if accepted < len(ids) else "bonus" if ids else "plain"
        origin: list[Origin] = ["accepted"] * accepted
        return Outcome(
            tuple(range(accepted)),
            (*ids[:accepted], due[accepted]),
            (*origin, last),
            min(accepted + 1, len(ids)),
        )


class CallsItselfExact(Sps):
    """Lossy method that claims to be exact."""

    def guarantee(self, sampling):
        return "exact_law" if sampling in ("rejection", "block") else "exact_tokens"


class StopsShort(Sps):
    """Method that stops as soon as no draft fits, so that the bonus token is lost."""

    def generate(self, session):
        for step in super().generate(session):
            yield step
            if session.max_draft_length() == 0:
                return


class PadsItsDraft(Verifies, Pld):
    """Method that pads a short draft with token id 0 and verifies the padding with the last logits.

    An accepted 0 in the padding is counted twice.
    """

    def verify(self, session, draft, rows, *accept):
        found = self.verified(draft, rows, *accept)
        short = len(found.path) == draft.nodes < self.params.length
        if not short or found.committed[-1] != 0:
            return found
        return replace(found, committed=(*found.committed, 0), origin=(*found.origin, "bonus"))

    def observe(self, session, outcome):
        """Add a feature for the token that was never fed, so that only the output is wrong."""
        text, n = session.tokens(), session.state.length()
        if n < len(text) - 1:
            missing = torch.tensor([list(text[n:-1])])
            session.target.forward(Tokens(missing), session.state, logits_at=None)
            session.state.commit(0, range(missing.shape[1]))


# ---- what leaves the output right ---------------------------------------------------------------


class ForgetsNothing(Sps):
    """Method that keeps its draft's state of rejected tokens."""

    def observe(self, session, outcome):
        pass


class SkipsAToken(Sps):
    """Method that feeds its draft only the newest token after a fully accepted draft."""

    def propose(self, session, limit):
        newest = session.pending_tokens(len(session.tokens()) - 1)
        picks = [session.pick(self.model.forward(newest, self.state))] if limit else []
        return session.chain_of_picks(picks)


class OffByOne(Sps):
    """Method that feeds its draft positions that are one too high."""

    def start(self, session):
        super().start(session)
        forward = self.model.forward

        def shifted(x, state, **rest):
            first = state.length() + 1
            positions = torch.arange(first, first + x.ids.shape[1])[None]
            return forward(x, state, positions=positions, **rest)

        self.model.forward = shifted


class LosesTheBonus(Verifies, Sps):
    """Method that drops the bonus token after a fully accepted draft."""

    def verify(self, session, draft, rows, *accept):
        found = self.verified(draft, rows, *accept)
        if found.origin[-1] != "bonus":
            return found
        return replace(found, committed=found.committed[:-1], origin=found.origin[:-1])


class CountsAllAsTested(Verifies, Sps):
    """Method that reports every draft level as tested, also those after a rejected token."""

    def verify(self, session, draft, rows, *accept):
        return replace(self.verified(draft, rows, *accept), tested=draft.nodes)


class ReportsOnlyAccepted(Sps):
    """Method that leaves its rejected tokens out of the reported step."""

    def generate(self, session):
        for step in super().generate(session):
            accepted = len(step.outcome.path)
            yield replace(
                step,
                draft=session.chain(() if step.draft is None else step.draft.tokens[:accepted]),
                outcome=replace(step.outcome, tested=accepted),
            )


class VerifiesOnlyMatchingTokens(Verifies, Sps):
    """Method that verifies only the draft tokens that match the target, and drops the others."""

    def verify(self, session, draft, rows, *accept):
        scores = session.scores(rows, len(session.output()))
        ids, target = draft.tokens.tolist(), scores.argmax(-1).tolist()
        wrong = (at for at, token in enumerate(ids) if token != target[at])
        matching = next(wrong, len(ids))
        self.reported = session.chain(ids[:matching])
        return self.verified(self.reported, rows[: matching + 1], *accept)

    def generate(self, session):
        for step in super().generate(session):
            yield replace(step, draft=self.reported)


class DraftsTheBonusToo(Verifies, Sps):
    """Method that appends the target's next token to its draft before verification."""

    def verify(self, session, draft, rows, *accept):
        scores = session.scores(rows, len(session.output()))
        self.reported = session.chain([*draft.tokens.tolist(), int(scores[-1].argmax())])
        return self.verified(self.reported, rows, *accept)

    def generate(self, session):
        for step in super().generate(session):
            yield replace(step, draft=self.reported)


class DrawsForOnePosition(Sps):
    """Method that draws all draft tokens with the noise of the first draft position."""

    def propose(self, session, limit):
        x, picks = session.pending_tokens(self.state.length()), []
        for _ in range(min(self.params.levels, limit)):
            picks.append(session.pick(self.model.forward(x, self.state)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)


class ExceedsTheBudget(Sps):
    """Method that drafts its full length beyond the token budget."""

    def propose(self, session, limit):
        return super().propose(session, self.params.levels)


class PrunesItsTree(SpsTree):
    """Tree method that leaves the rejected nodes out of the reported step."""

    def generate(self, session):
        for step in super().generate(session):
            path = step.outcome.path
            ids = [] if step.draft is None else step.draft.tokens[list(path)].tolist()
            path = tuple(range(len(ids)))
            outcome = replace(step.outcome, path=path, tested=len(path))
            yield replace(step, draft=session.chain(ids), outcome=outcome)


class DraftsForTheFirst(Sps):
    """Method that drafts for the first sequence of a batch, and proposes that draft to all."""

    def propose_batch(self, members):
        drafts = [
            method.propose(session, session.max_draft_length()) for method, session in members
        ]
        fits = [draft.nodes >= drafts[0].nodes for draft in drafts]
        return [drafts[0] if fit else own for fit, own in zip(fits, drafts, strict=True)]


class DraftsByPlace(Sps):
    """Method that drafts from the state of the sequence's place among those not finished."""

    slots: ClassVar[list[Any]] = []

    def propose_batch(self, members):
        if all(len(session.output()) == 1 for _, session in members):
            self.slots[:] = [method.state for method, _ in members]
        for (method, session), state in zip(members, self.slots, strict=False):
            if state.length() < len(session.tokens()):
                method.state = state
        return super().propose_batch(members)


class KeepsItsState(Sps):
    """Method that reuses one state for all prompts, and so for all sequences of a batch."""

    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def start(self, session):
        super().start(session)
        if "state" not in session.memory:
            session.memory["state"] = session.new_state(self.model)
        self.state = session.memory["state"]
        self.state.rollback(0, 0)
        self.model.forward(session.pending_tokens(0), self.state, logits_at=None)

    def propose(self, session, limit):
        self.state.rollback(0, min(self.state.length(), len(session.tokens()) - 1))
        return super().propose(session, limit)


class UsesThePreviousPass(Sps):
    """Method that declares state for one run, and keeps it across passes."""

    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def __init__(self, params=None):
        super().__init__(params)
        self.known: dict[str, list[int]] = {}

    def propose(self, session, limit):
        """Return the method's stored output of this prompt as the draft, if there is one."""
        before = self.known.get(session.requests[0].prompt_id)
        if before is None:
            return super().propose(session, limit)
        at = len(session.output())
        return session.chain(before[at : at + min(limit, self.params.levels)])

    def observe(self, session, outcome):
        super().observe(session, outcome)
        if session.finish is not None:
            self.known[session.requests[0].prompt_id] = list(session.output())


class OneTokenLate(Pld):
    """Method that copies from one token after the matching position."""

    def propose(self, session, limit):
        found = super().propose(session, limit + 1)
        return session.chain(found.tokens.tolist()[1:][:limit])


class KeepsItsIndex(Pld):
    """Method that also looks up in earlier prompts."""

    def start(self, session):
        earlier = getattr(self, "index", {})
        super().start(session)
        self.index = earlier
