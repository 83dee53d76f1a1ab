"""Drafts whose distributions are not those that their tokens were drawn from, where only large
vocabularies, long drafts or unusual parameters show it: what the audit must catch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from methods.sps import Sps
from methods.sps_tree import SpsTree
from specbench_cli.engine.types import Tokens


class OtherLaw(Sps):
    """Draws tokens from one distribution and hands over another; subclasses say how the two
    differ."""

    def propose(self, session, limit):
        if not session.sampling.draws:
            return super().propose(session, limit)
        x, picks = session.pending_tokens(self.state.length()), []
        for ahead in range(min(self.params.levels, limit)):
            logits = self.model.forward(x, self.state).logits
            assert logits is not None
            distribution, told = self.distributions(session, logits[:, -1], ahead)
            picks.append((session.random.categorical(distribution), told))
            x = Tokens(picks[-1][0][None])
        return session.chain_of_picks(picks)

    def distributions(self, session, logits, ahead):
        """Distributions [1, V]: the one drawn from, and the one handed over."""
        raise NotImplementedError


def largest(distribution, n):
    """A distribution's n likeliest tokens alone."""
    if n >= distribution.shape[-1]:
        return distribution
    kept = distribution * (distribution >= distribution.topk(n).values[:, -1:])
    return kept / kept.sum(-1, keepdim=True)


class DrawsFromTen(OtherLaw):
    """Draws from the draft's ten likeliest tokens, and hands the whole distribution over."""

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        return largest(distribution, 10), distribution


class TellsFifty(OtherLaw):
    """Draws from the whole distribution, and hands over that of the fifty likeliest tokens.

    What it draws beside these has the least of them's probability, so that nothing is impossible.
    """

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        told = largest(distribution, 50)
        floor = torch.where(distribution > 0, torch.full_like(distribution, 1e-6), distribution)
        told = told.clamp_min(floor)
        return distribution, told / told.sum(-1, keepdim=True)


class ColderThanTold(OtherLaw):
    """Draws at temperature 0.5 and hands over the distribution at 1."""

    def distributions(self, session, logits, ahead):
        return session.warp(logits / 0.5), session.warp(logits)


class WrongFromTheFifth(OtherLaw):
    """From the fifth level on hands over a distribution that is wrong by 10%."""

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        if ahead < 4:
            return distribution, distribution
        signs = torch.ones_like(distribution)
        signs[:, ::2] = -1
        wrong = distribution * (1 + 0.1 * signs)
        return distribution, wrong / wrong.sum(-1, keepdim=True)


class TellsHalfPrecision(OtherLaw):
    """Hands its distribution over with eight bits, as a worker might send it."""

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        told = distribution.bfloat16().to(distribution.dtype)
        return distribution, told / told.sum(-1, keepdim=True)


class CutsOnlyWhatItTells(OtherLaw):
    """Draws under the temperature alone, and redraws what the cuts leave out as the likeliest."""

    def distributions(self, session, logits, ahead):
        told = session.warp(logits)
        whole = (logits / session.sampling.temperature).softmax(-1).to(told.dtype)
        distribution = torch.where(told > 0, whole, 0.0)
        best = told.argmax(-1, keepdim=True)
        return distribution.scatter_add(-1, best, 1 - distribution.sum(-1, keepdim=True)), told


class SureIfUnlimited(OtherLaw):
    """With its threshold off draws without the distribution's tail, and hands the whole
    distribution over."""

    def distributions(self, session, logits, ahead):
        distribution = session.warp(logits)
        return (
            largest(distribution, 2) if self.params.threshold == 0.0 else distribution
        ), distribution


class MixesUpTheLast(SpsTree):
    """Of trees of five levels, hands over half of the last node's distribution shifted by one
    id."""

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
    """Cuts by mass, and then by number."""
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
    kept: Tensor = scores
    return kept


def residual_of_the_first(p, q):
    """What is left of the target's distribution among the first 1,024 tokens, where that is
    anything."""
    left = (p - q).clamp_min(0.0)
    few = left.clone()
    few[..., 1_024:] = 0.0
    left = torch.where(few.sum(-1, keepdim=True) > 0, few, left)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp_min(1e-30), p)
