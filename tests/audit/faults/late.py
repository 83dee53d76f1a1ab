"""Faults that are hard to catch, which the audit must find.

They act only late in a draft or a text, only after a rejection, only on ties, or only on several
nodes of one level.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from methods.medusa.method import Medusa
from methods.sps import Sps
from methods.sps_tree import SpsTree
from methods.stand import Stand
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify import chain as verify
from tests.audit.faults.distributions import WrongDistribution
from tests.audit.faults.verifies import Verifies

LATE = 40
"""Number of output tokens after which the late faults begin."""


# ---- random numbers and distributions -----------------------------------------------------------

_rejection = verify.rejection


def third_with_the_first_number(tokens, q, p, random):
    """Test the third draft token with the random number of the first test.

    That number is below the first ratio once the first token is accepted.
    """
    if q is None or len(tokens) < 3:
        return _rejection(tokens, q, p, random)
    q, chances = verify._acceptance_probs(tokens, q, p)
    first, third = float(chances[0]), float(chances[2])
    if first > 0.0:
        chances = chances.clone()
        chances[2] = min(first, third) / first
    accepted = random.bernoulli(chances).sum()
    return accepted, verify._draw_next(accepted, q, p, random)


class DrawsOnceMore(WrongDistribution):
    """Method that draws twice from the third token on, and reports a q that is wrong by 10%."""

    def distributions(self, session, logits, ahead):
        q = session.warp(logits)
        if ahead < 2:
            return q, q
        session.random.categorical(q)
        return q, tilted(q)


class WrongAtTheFourth(WrongDistribution):
    """Method that reports a q that is wrong by 10% for the fourth draft token only."""

    def distributions(self, session, logits, ahead):
        q = session.warp(logits)
        return q, tilted(q) if ahead == 3 else q


class WrongWhenLong(WrongDistribution):
    """Method that reports a q that is wrong by 10% once the output is long."""

    def distributions(self, session, logits, ahead):
        q = session.warp(logits)
        return q, tilted(q) if len(session.output()) > LATE else q


class WrongAfterMixedSteps(WrongDistribution):
    """Method that reports a wrong q after one step with and one step without accepted tokens."""

    accepted: tuple[int, ...] = ()

    def start(self, session):
        super().start(session)
        self.accepted = ()

    def observe(self, session, outcome):
        super().observe(session, outcome)
        self.accepted = (*self.accepted[-1:], len(outcome.path))

    def distributions(self, session, logits, ahead):
        q = session.warp(logits)
        mixed = len(self.accepted) == 2 and self.accepted[0] > 0 and self.accepted[1] == 0
        return q, tilted(q) if mixed else q


def tilted(q):
    """Return q with odd token ids 10% more likely and even ones 10% less likely."""
    signs = torch.ones_like(q)
    signs[..., ::2] = -1
    wrong = q * (1 + 0.1 * signs)
    wrong[..., q.argmax(-1)] += 0.05  # a q with a single token stays unchanged
    return wrong / wrong.sum(-1, keepdim=True)


def no_ties(logits, sampling):
    """Cut the distribution to exactly k tokens, although others tie with the last one."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kept = scores.sort(dim=-1, descending=True, stable=True).indices[..., : sampling.top_k]
        outside = torch.ones_like(scores, dtype=torch.bool).scatter(-1, kept, False)
        scores = scores.masked_fill(outside, -math.inf)
    return _cut(scores, replace(sampling, temperature=1.0, top_k=0))


def _cut(scores, sampling):
    if sampling.top_p < 1.0:
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1)
        outside = (mass.cumsum(-1) - mass) >= sampling.top_p
        scores = scores.masked_fill(outside.scatter(-1, index, outside), -math.inf)
    return scores


# ---- greedy verification ------------------------------------------------------------------------


class ChangesLogits(Verifies, Sps):
    """Speculative sampling that changes the target's logits before they are verified."""

    def verify(self, session, draft, rows, *accept):
        return self.verified(draft, self.changed(session, draft, rows.clone()), *accept)

    def changed(self, session, draft, rows):
        """Return the logits [m + 1, V] that decide about a draft of m tokens."""
        raise NotImplementedError


class AcceptsTies(ChangesLogits):
    """Method that accepts a draft token that ties with the largest logit (`>=` for `==`)."""

    def changed(self, session, draft, rows):
        if session.sampling.rule == "greedy":
            for row, token in zip(rows, draft.tokens.tolist(), strict=False):
                if row[token] >= row.max():
                    row[token] += 1.0
        return rows


class AcceptsRunnersUpLate(ChangesLogits):
    """Method that also accepts the second most likely token once the output is long."""

    def changed(self, session, draft, rows):
        if not session.sampling.draws and len(session.output()) > LATE:
            for row, token in zip(rows, draft.tokens.tolist(), strict=False):
                if token == int(row.topk(2).indices[1]):
                    row[token] += row.max() - row[token] + 100.0
        return rows


# ---- drafts after a rejection -------------------------------------------------------------------


class KeepsFeatures(Medusa):
    """Method that drafts from the features of the previous step if that step accepted nothing."""

    kept: Tensor | None = None
    rejected = False

    def start(self, session):
        super().start(session)
        self.kept, self.rejected = None, False
        features = session.features

        def stale(n=1):
            if self.kept is None or not self.rejected:
                self.kept = features(n)
            return self.kept

        session.features = stale

    def observe(self, session, outcome):
        super().observe(session, outcome)
        self.rejected = not outcome.path


class DraftsTheSameAgain(Sps):
    """Method that drafts the rejected token again if the previous step accepted nothing."""

    again: int | None = None
    drafted: int | None = None

    def start(self, session):
        super().start(session)
        self.again, self.drafted = None, None

    def propose(self, session, limit):
        if self.again is None or session.sampling.draws or limit < 1:
            draft = super().propose(session, limit)
        else:
            ids, x = [self.again], session.pending_tokens(self.state.length())
            x = Tokens(torch.cat((x.ids, torch.tensor([[self.again]])), -1))
            while len(ids) < min(limit, self.params.levels):
                picked, _ = session.pick(self.model.forward(x, self.state), len(ids))
                ids.append(int(picked))
                x = Tokens(picked[None])
            draft = session.chain(ids)
        self.drafted = int(draft.tokens[0]) if draft.nodes else None
        return draft

    def observe(self, session, outcome):
        super().observe(session, outcome)
        self.again = None if outcome.path else self.drafted


# ---- several nodes of one level -----------------------------------------------------------------


def with_another_nodes_q(draft):
    """Return the tree with each q taken from a node of the same level under another parent."""
    if draft.q is None or draft.parents is None:
        return draft
    parents, depth = draft.parents, list[int]()
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    q = draft.q.clone()
    for node, parent in enumerate(parents):
        others = [
            other
            for other, its in enumerate(parents)
            if depth[other] == depth[node] and its != parent
        ]
        # The engine would notice a token with probability 0 under the other q.
        siblings = [other for other, its in enumerate(parents) if its == parent]
        fits = [
            other
            for other in others
            if all(float(draft.q[other][draft.tokens[each]]) > 0 for each in siblings)
        ]
        if fits:
            q[node] = draft.q[fits[0]]
    return replace(draft, q=q)


class ReportsAnotherNodesQ(SpsTree):
    """Tree method that reports the q of another node of the same level."""

    def propose(self, session, limit):
        return with_another_nodes_q(super().propose(session, limit))


class StandReportsAnotherNodesQ(Stand):
    """N-gram method that reports the q of another node of the same level."""

    def propose(self, session, limit):
        return with_another_nodes_q(super().propose(session, limit))
