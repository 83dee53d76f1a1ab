"""Sequoia: its dynamic program compared with all trees, and its measurements."""

import math
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.sequoia import BestTrees, Sequoia, SequoiaParams
from specbench_cli.audit.models import table as table_model
from specbench_cli.audit.models.table import TableDecoder
from specbench_cli.engine.drafting.template import tree_of_choices
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.random import SeededRandom
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import build_tree
from specbench_cli.engine.workspace import Workspace

PROMPT = (1, 0, 1)


@cache
def every_tree(nodes, depth):
    """Return all trees of n nodes below a root, as sets of rank paths."""
    if not nodes:
        return [frozenset()]
    found = []
    for sizes in compositions(nodes):
        if depth:
            parts = [every_tree(size - 1, depth - 1) for size in sizes]
            for below in product(*parts):
                tree = {(k,) for k in range(len(sizes))}
                tree |= {(k, *node) for k, part in enumerate(below) for node in part}
                found.append(frozenset(tree))
    return found


def compositions(n):
    """Return the ways to write n as an ordered sum of positive integers."""
    if not n:
        yield ()
    for first in range(1, n + 1):
        yield from ((first, *rest) for rest in compositions(n - first))


def worth(tree, a):
    """Return the expected number of accepted tokens: the sum of all nodes' path probabilities."""
    return sum(math.prod(a[k] if k < len(a) else 0.0 for k in node) for node in tree)


def test_the_number_of_trees_is_the_catalan_number():
    assert [len(every_tree(n, n)) for n in range(8)] == [1, 1, 2, 5, 14, 42, 132, 429]


@settings(max_examples=40, deadline=None)
@given(
    a=st.lists(st.floats(0, 1), min_size=1, max_size=4).map(
        lambda values: [v / max(1.0, sum(values)) for v in values]
    ),
    nodes=st.integers(1, 7),
    depth=st.integers(1, 5),
)
def test_the_dynamic_program_finds_the_best_of_all_trees(a, nodes, depth):
    trees = BestTrees(a)
    best = max(worth(tree, a) for n in range(nodes + 1) for tree in every_tree(n, depth))
    value, _ = trees.best(nodes, depth)
    found = list(trees.nodes(nodes, depth))
    assert value == pytest.approx(best)
    assert worth(found, a) == pytest.approx(value)
    assert len(found) == len(set(found)) <= nodes
    assert max(map(len, found), default=0) <= depth
    assert tree_of_choices(found).nodes if found else value == 0
    assert value >= trees.best(nodes - 1, depth)[0]


def test_a_certain_first_child_gives_a_chain_and_equal_probabilities_a_wide_tree():
    assert list(BestTrees([0.9, 0.0]).nodes(4, 8)) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert set(BestTrees([0.25] * 4).nodes(4, 8)) == {(0,), (1,), (2,), (3,)}


def run(sampling, kind="near", costs=None, memory=None, budget=40, seed=0, **params):
    """Steps of a decoding on tables of six tokens, and what was kept of it."""
    tables = map(TableDecoder, "td", table_model.make_table_pair(kind, 6))
    decoders = dict(zip(("target", "draft"), tables, strict=True))
    request = Request(f"table/{seed}", 0, PROMPT, StopRule(frozenset(), budget))
    memory = Memory() if memory is None else memory
    session = Session(Workspace(decoders, 200, costs=costs), request, sampling, memory=memory)
    return list(Sequoia(SequoiaParams(**params)).generate(session)), memory


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_the_tree_is_the_best_for_the_measured_acceptance(rule):
    sampling = Sampling() if rule == "greedy" else Sampling(rule, 0.8)
    steps, memory = run(sampling, profile=8, width=3, nodes=5, depth=3)
    first, later = steps[:8], steps[8:]
    assert all(build_tree(step.draft.parents).levels == 1 for step in first)
    accepted_ranks = [step.outcome.path[0] if step.outcome.path else 3 for step in first]
    a = [accepted_ranks.count(k) / 8 for k in range(3)]
    due = tree_of_choices(BestTrees(a).nodes(5, 3))
    assert (memory["stood"], memory["tree"]) == (accepted_ranks, due)
    assert later
    for step in later[:-1]:
        assert step.draft.parents == due.truncate(step.draft.levels, 6).parents


def test_measurements_are_reused_for_the_next_prompts():
    _, memory = run(Sampling(), profile=4)
    steps, kept = run(Sampling(), memory=memory, seed=1, profile=4)
    assert kept["tree"] == memory["tree"]
    assert steps[0].draft.nodes == len(memory["tree"].nodes)


@pytest.mark.parametrize(("draft", "row"), [(0.1, 0.0), (0.1, 0.2), (1.0, 0.0), (0.1, 5.0)])
def test_auto_size_and_depth_give_the_most_tokens_per_second(draft, row):
    def costs(model, rows):
        return draft if model == "d" else 1.0 + row * (rows - 1)

    _, memory = run(Sampling(), costs=costs, profile=10, width=2, depth=4, nodes="auto")
    a = [memory["stood"].count(k) / 10 for k in range(2)]
    chosen, trees = memory["tree"], BestTrees(a)

    def rate(value, nodes, levels):
        return (1 + value) / (levels * draft + 1.0 + row * nodes)

    best = max(
        rate(trees.best(m, depth)[0], m, depth) for m in range(1, 64) for depth in range(1, 5)
    )
    assert rate(worth(chosen.nodes, a), len(chosen.nodes), chosen.depth) == pytest.approx(best)


def test_nothing_is_drafted_if_nothing_was_accepted():
    steps, memory = run(Sampling(), kind="disjoint", profile=3, width=3)
    assert memory["tree"].nodes == ()
    assert all(step.draft.nodes == 0 and len(step.forwards) == 1 for step in steps[3:])


class Repeated(SeededRandom):
    """Random source of the official code: every step restarts the prompt's numbers."""

    def begin(self):
        self._generator.manual_seed(self.fixed)


@pytest.mark.parametrize("again", [False, True], ids=["fresh", "repeated"])
def test_noise_that_restarts_in_every_step_makes_steps_dependent(again):
    """Tokens committed in two steps after the same text must be independent."""
    table = torch.zeros(8, 8, 8, dtype=torch.float64)  # every text is followed alike
    same, pairs = 0, 150
    for seed in range(pairs):
        decoders = {"target": TableDecoder("t", table), "draft": TableDecoder("d", table)}
        chance = Repeated(seed, "p", 0, 1, torch.device("cpu"))
        chance.fixed = seed
        request = Request("p", 0, PROMPT, StopRule(frozenset(), 5))
        method = Sequoia(SequoiaParams(profile=8, width=2))
        session = Session(
            Workspace(decoders, 64), request, Sampling("rejection", 1.0), random=chance
        )
        first = []
        propose = method.propose

        def begun(session, limit, propose=propose, chance=chance):
            if again:
                chance.begin()
            return propose(session, limit)

        method.propose = begun
        for step in method.generate(session):
            first.append(step.outcome.committed[0])
        same += first[0] == first[1]
    independent = abs(same / pairs - 1 / 8) < 5 * math.sqrt(7 / 64 / pairs)
    assert independent == (not again)
