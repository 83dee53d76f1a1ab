"""Real methods with one thing wrong: what the audit must catch."""

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
    """Drafts the likeliest token and hands over the distribution it did not draw it from."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        return draft if draft.q is None else replace(draft, tokens=draft.q.argmax(-1))


class UnwarpedLaw(Sps):
    """Draws under the temperature and hands over the distribution without it."""

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
    """Takes back its last draft token where that turned out unlikely: what is left is biased."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        if draft.q is None or draft.q[-1, draft.tokens[-1]] > 0.3:
            return draft
        return replace(draft, tokens=draft.tokens[:-1], q=draft.q[:-1])


class EmitsUnverified(Verifies, Sps):
    """Where the budget ends within its draft, commits the draft as it is."""

    def verify(self, session, draft, rows, *accept):
        outcome = self.verified(draft, rows, *accept)
        if draft.nodes < session.max_draft_length() or not draft.nodes:
            return outcome
        ids, m = tuple(draft.tokens.tolist()), draft.nodes
        accepted: list[Origin] = ["accepted"] * m
        return Outcome(tuple(range(m)), (*ids, outcome.committed[-1]), (*accepted, "bonus"), m)


class DecidesForItself(Verifies, Sps):
    """Where tokens are chosen, compares its draft with the target's own rows, whatever else the run
    asks of outputs: right without a grammar, which it passes over."""

    def verify(self, session, draft, rows, *accept):
        if session.sampling.draws:
            return self.verified(draft, rows, *accept)
        due = session.scores(rows, len(session.output())).argmax(-1).tolist()
        ids, stand = draft.tokens.tolist(), 0
        while stand < len(ids) and ids[stand] == due[stand]:
            stand += 1
        last: Origin = "recovered" if stand < len(ids) else "bonus" if ids else "plain"
        origin: list[Origin] = ["accepted"] * stand
        return Outcome(
            tuple(range(stand)),
            (*ids[:stand], due[stand]),
            (*origin, last),
            min(stand + 1, len(ids)),
        )


class CallsItselfExact(Sps):
    """Takes an accept rule and promises what it would without."""

    def guarantee(self, sampling):
        return "exact_law" if sampling in ("rejection", "block") else "exact_tokens"


class StopsShort(Sps):
    """Stops where no draft token is of use any more: the token that verification adds is lost."""

    def generate(self, session):
        for step in super().generate(session):
            yield step
            if session.max_draft_length() == 0:
                return


class PadsItsDraft(Verifies, Pld):
    """Fills short drafts up with id 0, compared with the last row again: a 0 there counts twice."""

    def verify(self, session, draft, rows, *accept):
        found = self.verified(draft, rows, *accept)
        short = len(found.path) == draft.nodes < self.params.length
        if not short or found.committed[-1] != 0:
            return found
        return replace(found, committed=(*found.committed, 0), origin=(*found.origin, "bonus"))

    def observe(self, session, outcome):
        """The row of the token that was never fed, so that nothing but the output is wrong."""
        text, n = session.tokens(), session.state.length()
        if n < len(text) - 1:
            missing = torch.tensor([list(text[n:-1])])
            session.target.forward(Tokens(missing), session.state, logits_at=None)
            session.state.commit(0, range(missing.shape[1]))


# ---- what leaves the output right ---------------------------------------------------------------


class ForgetsNothing(Sps):
    """Keeps its draft's rows of rejected tokens."""

    def observe(self, session, outcome):
        pass


class SkipsAToken(Sps):
    """After full acceptance feeds its draft the newest token only."""

    def propose(self, session, limit):
        newest = session.pending_tokens(len(session.tokens()) - 1)
        picks = [session.pick(self.model.forward(newest, self.state))] if limit else []
        return session.chain_of_picks(picks)


class OffByOne(Sps):
    """Feeds its draft positions that are one too high."""

    def start(self, session):
        super().start(session)
        forward = self.model.forward

        def shifted(x, state, **rest):
            first = state.length() + 1
            positions = torch.arange(first, first + x.ids.shape[1])[None]
            return forward(x, state, positions=positions, **rest)

        self.model.forward = shifted


class LosesTheBonus(Verifies, Sps):
    """After full acceptance commits the draft and not the bonus."""

    def verify(self, session, draft, rows, *accept):
        found = self.verified(draft, rows, *accept)
        if found.origin[-1] != "bonus":
            return found
        return replace(found, committed=found.committed[:-1], origin=found.origin[:-1])


class CountsAllAsTested(Verifies, Sps):
    """Reports every drafted level as tested, those behind a rejected one too."""

    def verify(self, session, draft, rows, *accept):
        return replace(self.verified(draft, rows, *accept), tested=draft.nodes)


class TellsWhatStood(Sps):
    """Leaves the rejected tail out of what it tells of its draft: tokens, levels, tested."""

    def generate(self, session):
        for step in super().generate(session):
            stood = len(step.outcome.path)
            yield replace(
                step,
                draft=session.chain(() if step.draft is None else step.draft.tokens[:stood]),
                outcome=replace(step.outcome, tested=stood),
            )


class VerifiesWhatStands(Verifies, Sps):
    """Scores its whole draft, and has as much of it verified as the rows bear out."""

    def verify(self, session, draft, rows, *accept):
        scores = session.scores(rows, len(session.output()))
        ids, said = draft.tokens.tolist(), scores.argmax(-1).tolist()
        wrong = (at for at, token in enumerate(ids) if token != said[at])
        stand = next(wrong, len(ids))
        self.told = session.chain(ids[:stand])
        return self.verified(self.told, rows[: stand + 1], *accept)

    def generate(self, session):
        for step in super().generate(session):
            yield replace(step, draft=self.told)


class AddsWhatIsSaid(Verifies, Sps):
    """Has the token that the target says behind its draft verified as its own last one."""

    def verify(self, session, draft, rows, *accept):
        scores = session.scores(rows, len(session.output()))
        self.told = session.chain([*draft.tokens.tolist(), int(scores[-1].argmax())])
        return self.verified(self.told, rows, *accept)

    def generate(self, session):
        for step in super().generate(session):
            yield replace(step, draft=self.told)


class DrawsForOnePosition(Sps):
    """Draws all draft tokens with the noise of the first one's position."""

    def propose(self, session, limit):
        x, picks = session.pending_tokens(self.state.length()), []
        for _ in range(min(self.params.levels, limit)):
            picks.append(session.pick(self.model.forward(x, self.state)))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)


class ExceedsTheBudget(Sps):
    """Drafts its full length, whatever the budget leaves."""

    def propose(self, session, limit):
        return super().propose(session, self.params.levels)


class PrunesItsTree(SpsTree):
    """Tells its tree without the nodes that do not stand."""

    def generate(self, session):
        for step in super().generate(session):
            path = step.outcome.path
            ids = [] if step.draft is None else step.draft.tokens[list(path)].tolist()
            path = tuple(range(len(ids)))
            outcome = replace(step.outcome, path=path, tested=len(path))
            yield replace(step, draft=session.chain(ids), outcome=outcome)


class DraftsForTheFirst(Sps):
    """Drafts for the first sequence of a batch, and proposes that to all."""

    def propose_batch(self, members):
        drafts = [
            method.propose(session, session.max_draft_length()) for method, session in members
        ]
        fits = [draft.nodes >= drafts[0].nodes for draft in drafts]
        return [drafts[0] if fit else own for fit, own in zip(fits, drafts, strict=True)]


class DraftsByPlace(Sps):
    """Has each sequence of a batch draft from the state of its place among those still decoded."""

    slots: ClassVar[list[Any]] = []

    def propose_batch(self, members):
        if all(len(session.output()) == 1 for _, session in members):
            self.slots[:] = [method.state for method, _ in members]
        for (method, session), state in zip(members, self.slots, strict=False):
            if state.length() < len(session.tokens()):
                method.state = state
        return super().propose_batch(members)


class KeepsItsState(Sps):
    """Keeps one state for all prompts of a pass, cleared by each: and so one for all of a batch."""

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


class KnowsThePassBefore(Sps):
    """Learns for a run, as it says, and keeps that where the next pass finds it."""

    state_scope: ClassVar[Literal["prompt", "run", "corpus"]] = "run"

    def __init__(self, params=None):
        super().__init__(params)
        self.known: dict[str, list[int]] = {}

    def propose(self, session, limit):
        """Its own output of the prompt, where it has one."""
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
    """Takes the text from one token behind the right place on."""

    def propose(self, session, limit):
        found = super().propose(session, limit + 1)
        return session.chain(found.tokens.tolist()[1:][:limit])


class KeepsItsIndex(Pld):
    """Looks up in the prompts before, too."""

    def start(self, session):
        kept = getattr(self, "index", {})
        super().start(session)
        self.index = kept
