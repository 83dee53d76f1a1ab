"""Planted faults of token trees: each is caught, by the check that is there for it."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from specbench_cli.audit.faults import Fault
from specbench_cli.audit.runner import TABLE_CHECKS, run_checks
from specbench_cli.audit.selftest import self_test
from specbench_cli.audit.subject import Subject
from specbench_cli.engine import session as session_module
from specbench_cli.engine import verify_tree
from specbench_cli.engine.session import Session

FILE = Path(__file__).parents[1] / "methods" / "tree_method.py"


def tree_module():
    spec = importlib.util.spec_from_file_location("tree_method_under_audit", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks for the names in annotations
    spec.loader.exec_module(module)
    return module


TREES = tree_module()
PlainTree, PlainTreeParams = TREES.PlainTree, TREES.PlainTreeParams


def subject(method=PlainTree, **params):
    return Subject("plain-tree", method, (PlainTreeParams(**params),))


class RatioOfTopK(PlainTree):
    """Takes the likeliest children and hands over the law that they were not drawn from."""

    def start(self, session):
        super().start(session)
        branch = session.branch

        def likeliest(rows, width, **rest):
            tokens, q = branch(rows, width, **rest)
            return (tokens, q) if q is None else (q.topk(width).indices, q)

        session.branch = likeliest


class OrderedBackwards(PlainTree):
    """Has children drawn without replacement tested in the order opposite to their draws."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        return draft if draft.parents is None else replace(draft, order=backwards(draft))


def backwards(draft):
    return tuple(reversed(range(draft.nodes)))


class WrongParents(PlainTree):
    """Hangs the second level's children below each other's parents."""

    def propose(self, session, limit):
        draft = super().propose(session, limit)
        if draft.parents is None:
            return draft
        swapped = {0: 1, 1: 0}
        parents = tuple(swapped.get(parent, parent) for parent in draft.parents)
        return replace(draft, parents=parents)


class WorstFirst(PlainTree):
    """Takes the least likely children in greedy decoding."""

    def start(self, session):
        super().start(session)
        branch = session.branch
        sign = -1 if session.sampling.rule == "greedy" else 1
        session.branch = lambda rows, width, **rest: branch(sign * rows, width, **rest)


def unnormalised(q, tested):
    """The law of the next draw without renormalising what is left of it."""
    left = q.double().clone()
    left[torch.as_tensor(tested, dtype=torch.int64)] = 0.0
    return left


def several_draws(tree, tokens, p, random):
    """A draw for each child: the first child to meet its own draw stands."""
    path, node = [], -1
    while True:
        for child in tree.children[node]:
            drawn = random.categorical(p[node + 1])
            if int(drawn) == tokens[child]:
                path.append(child)
                node = child
                break
        else:
            return tuple(path), random.categorical(p[node + 1])


def against_one_law(tree, tokens, q, p, random, *, replacement):
    """Siblings against the target's law at their parent, never against what rejections left."""
    path, node = [], -1
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


def by_number(parents, device):
    """Positions by the node's number instead of its depth."""
    mask, depths = ROWS_OF(parents, device)
    return mask, torch.arange(len(depths), device=device)


ROWS_OF = session_module.rows_of


def first_rows(self, outcome):
    """Keeps as many rows as stand, from the front: not those that stand."""
    committed = self._append(outcome)
    self.state.commit(0, range(len(committed.path[: len(committed.committed) - 1]) + 1))
    return committed


def instead(owner, name, wrong):
    return lambda: patch.object(owner, name, wrong)


FAULTS = [
    Fault("p/q on deterministic top-k children", "law", subject(RatioOfTopK, depth=1, law="iid")),
    Fault(
        "without replacement and no renormalising",
        "law",
        subject(depth=1),
        instead(verify_tree, "remaining", unnormalised),
    ),
    Fault(
        "several draws at one tree node",
        "law",
        subject(depth=1, law="point"),
        instead(verify_tree, "point_mass", several_draws),
    ),
    Fault(
        "siblings tested against one law",
        "law",
        subject(depth=1, law="iid"),
        instead(verify_tree, "multi_round", against_one_law),
    ),
    Fault("wrong child order without replacement", "law", subject(OrderedBackwards, depth=1)),
    Fault(
        "tree positions by number, not by depth",
        "tokens",
        subject(),
        instead(session_module, "rows_of", by_number),
    ),
    Fault(
        "tree rows kept from the front", "states", subject(), instead(Session, "commit", first_rows)
    ),
    Fault("children below the wrong parents", "twin draft", subject(WrongParents)),
    Fault("wrong child order: the worst first", "twin draft", subject(WorstFirst)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_trees_is_caught_by_its_check(fault):
    (caught,) = self_test([fault])
    assert caught.caught, caught.facts()
    assert "raises" not in caught.facts()["by how much"]


@pytest.mark.parametrize(("law", "depth"), [("wor", 1), ("iid", 1), ("point", 2), ("wor", 2)])
def test_the_tree_method_itself_passes(law, depth):
    found = run_checks(subject(law=law, depth=depth), TABLE_CHECKS)
    assert [finding.problem for finding in found if not finding.passed] == []
