"""Faulty methods whose reported q is not the distribution that their tokens are drawn from.

Each fault shows only with a large vocabulary, a long draft or an unusual parameter. The audit must
catch all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from methods.sps import Sps
from methods.sps_tree import SpsTree
from specbench_cli.engine.types import Tokens


class WrongDistribution(Sps):
    """Base of methods that draw tokens from one distribution and report another one as q."""

    def propose(self, session, limit):
        if not session.sampling.draws:
            return super().propose(session, limit)
        x, picks = session.pending_tokens(self.state.length()), []
        for ahead in range(min(self.params.levels, limit)):
            logits = self.model.forward(x, self.state).logits
            assert logits is not None
            distribution, reported = self.distributions(session, logits[:, -1], ahead)
            picks.append((session.random.categorical(distribution), reported))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def distributions(self, session, logits, ahead):
        """Return two distributions `[1, V]`: the one to draw from, and the one to report as q."""
        raise NotImplementedError


def largest(distribution, n):
    """Return a distribution over its n most likely tokens."""
    if n >= distribution.shape[-1]:
        return distribution
    top = distribution * (distribution >= distribution.topk(n).values[:, -1:])
    return top / top.sum(-1, keepdim=True)


class DrawsFromTen(WrongDistribution):
    """Method that draws from the ten most likely tokens, and reports the whole distribution."""

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        return largest(distribution, 10), distribution


class ReportsFifty(WrongDistribution):
    """Method that draws from the whole distribution, and reports the 50 most likely tokens.

    Other tokens that it draws are reported with a tiny probability, because q = 0 is refused.
    """

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        reported = largest(distribution, 50)
        floor = torch.where(distribution > 0, torch.full_like(distribution, 1e-6), distribution)
        reported = reported.clamp_min(floor)
        return distribution, reported / reported.sum(-1, keepdim=True)


class ColderThanReported(WrongDistribution):
    """Method that draws at temperature 0.5, and reports the distribution at temperature 1."""

    def distributions(self, session, logits, ahead):
        return session.warp(logits / 0.5), session.warp(logits)


class WrongFromTheFifth(WrongDistribution):
    """Method whose reported q is wrong by 10% from the fifth level on."""

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        if ahead < 4:
            return distribution, distribution
        signs = torch.ones_like(distribution)
        signs[:, ::2] = -1
        wrong = distribution * (1 + 0.1 * signs)
        return distribution, wrong / wrong.sum(-1, keepdim=True)


class ReportsHalfPrecision(WrongDistribution):
    """Method that reports q in bfloat16, as a worker might send it."""

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        reported = distribution.bfloat16().to(distribution.dtype)
        return distribution, reported / reported.sum(-1, keepdim=True)


class CutsOnlyWhatItReports(WrongDistribution):
    """Method that draws without top-k and top-p, and replaces tokens that these cuts remove.

    The most likely token takes the place of each removed one.
    """

    def distributions(self, session, logits, ahead):
        reported = session.warp(logits)
        whole = (logits / session.sampling.temperature).softmax(-1).to(reported.dtype)
        distribution = torch.where(reported > 0, whole, 0.0)
        best = reported.argmax(-1, keepdim=True)
        return distribution.scatter_add(-1, best, 1 - distribution.sum(-1, keepdim=True)), reported


class SureIfUnlimited(WrongDistribution):
    """Method that draws from the two most likely tokens if its threshold is 0, but reports all of
    q."""

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        return (
            largest(distribution, 2) if self.params.threshold == 0.0 else distribution
        ), distribution


class MixesUpTheLast(SpsTree):
    """Tree method that reports a wrong q for the leaves of trees with five levels.

    Half of that q is shifted by one token id.
    """

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        if draft.q is None or draft.levels < 5:
            return draft
        q = draft.q.clone()
        last = [node for node in range(draft.nodes) if node not in (draft.parents or ())]
        q[last] = (q[last] + q[last].roll(1, -1)) / 2
        return replace(draft, q=q)


# ---- in place of `sampling.cut` and `chain.residual` --------------------------------------------


def top_p_first(logits, sampling):
    """Apply top-p before top-k."""
    scores: Any = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = scores / sampling.temperature
    if sampling.top_p < 1.0:
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1)
        outside = (mass.cumsum(-1) - mass) >= sampling.top_p
        scores = scores.masked_fill(outside.scatter(-1, index, outside), -math.inf)
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    cut: Tensor = scores
    return cut


def residual_of_the_first(p, q):
    """Return the residual over the first 1,024 tokens, or over all if that is zero."""
    left = (p - q).clamp_min(0.0)
    few = left.clone()
    few[..., 1_024:] = 0.0
    left = torch.where(few.sum(-1, keepdim=True) > 0, few, left)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp_min(1e-30), p)
