"""Faulty tree methods, heads and functions of the engine. The audit must catch all of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from methods.mtp.method import Mtp
from methods.sps_tree import SpsTree
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.models.head import FeatureCache
from specbench_cli.engine.types import Features
from specbench_cli.engine.verify.tree import ROOT, build_tree_mask

# ---- methods that draft trees -------------------------------------------------------------------


class RatioOfTopK(SpsTree):
    """Method that drafts the most likely children, but reports q as if it had drawn them."""

    def start(self, session):
        super().start(session)
        branch = session.branch

        def likeliest(rows, width, **rest):
            tokens, q = branch(rows, width, **rest)
            return (tokens, q) if q is None else (q.topk(width).indices, q)

        session.branch = likeliest


class OrderedBackwards(SpsTree):
    """Method that draws children without replacement, and has them tested in reverse order."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        order = tuple(reversed(range(draft.nodes)))
        return draft if draft.parents is None else replace(draft, order=order)


class WrongParents(SpsTree):
    """Method that swaps the parents of the second level's nodes."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        if draft.parents is None:
            return draft
        swapped = {0: 1, 1: 0}
        return replace(draft, parents=tuple(swapped.get(node, node) for node in draft.parents))


class WorstFirst(SpsTree):
    """Method that drafts the least likely children in greedy decoding."""

    def start(self, session):
        super().start(session)
        branch = session.branch
        sign = -1 if session.sampling.rule == "greedy" else 1

        def worst(rows, width, **rest):
            return branch(sign * rows, width, **rest)

        session.branch = worst


# ---- methods that draft with a head -------------------------------------------------------------


class KeepsItsDraft(Mtp):
    """Method that leaves its draft in its head's state."""

    def start(self, session):
        super().start(session)
        self.levels.drop = lambda: None


class KeepsPredicted(KeepsItsDraft):
    """Method that keeps its head's state computed from predicted features.

    It should recompute that state from the target's features once tokens are accepted.
    """

    def start(self, session):
        super().start(session)
        pending = session.pending_features

        def rest(length):
            x = pending(length)
            return Features(x.ids, x.rows[:, -x.ids.shape[1] :])

        session.pending_features = rest

    def observe(self, session, outcome):
        """Keep the state of the accepted nodes."""
        self.levels.keep(outcome.path)


# ---- in place of `FeatureCache.read` and of `Levels._reset` --------------------------------------

_read = FeatureCache.read
_reset = Levels._reset


def one_late(self):
    """Return features that are one token too old."""
    rows = _read(self)
    late = torch.cat((getattr(self, "late", rows[:1]), rows))
    self.late = late[-1:]
    return late[:-1]


def one_too_high(self):
    """Start the draft at a position that is one too high."""
    _reset(self)
    self._root_position += 1


# ---- in place of the engine's verification of trees ----------------------------------------------


def unnormalised(q, tested):
    """Return the rest of q after some draws, not normalised."""
    left = q.double().clone()
    left[torch.as_tensor(tested, dtype=torch.int64)] = 0.0
    return left


def several_draws(tree, tokens, p, random):
    """Draw once for each child, and accept the first child that equals its own draw."""
    path: list[int] = []
    node = ROOT
    while True:
        for child in tree.children[node]:
            if int(random.categorical(p[node + 1])) == tokens[child]:
                path.append(child)
                node = child
                break
        else:
            return tuple(path), random.categorical(p[node + 1])


def against_one_distribution(tree, tokens, q, p, random, *, replacement):
    """Test all siblings with the parent's p, without the residual after each rejection."""
    path: list[int] = []
    node = ROOT
    while True:
        r = p[node + 1].double()
        for child in tree.children[node]:
            x = tokens[child]
            if random.bernoulli((r[x] / q[child].double()[x]).clamp_max(1.0)[None]).item():
                path.append(child)
                node = child
                break
        else:
            return tuple(path), random.categorical(r)


# ---- in place of `build_tree_mask`, `Session.commit` and `FeatureCache.keep`
# ----------------------


def by_number(parents, device):
    """Return positions by node number instead of depth."""
    mask, depths = build_tree_mask(parents, device)
    return mask, torch.arange(len(depths), device=device)


def first_rows(self, outcome):
    """Keep the state of the first n nodes, where n nodes were accepted."""
    committed = self._text.append(outcome)
    self._step_log.record_committed(committed)
    self.state.commit(0, range(len(committed.path[: len(committed.committed) - 1]) + 1))
    return committed


_keep = FeatureCache.keep


def first_features(self, path):
    """Keep the features of the first n nodes, where n nodes were accepted."""
    _keep(self, range(len(path)))
