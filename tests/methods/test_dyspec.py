"""DySpec: its trees, compared with brute force over all slots, and how they are fed."""

import math
from itertools import pairwise

import pytest
import torch

from methods.dyspec import DySpec, DySpecParams
from specbench_cli.audit.cases import Case
from specbench_cli.audit.models import table as table_model
from specbench_cli.audit.models.table import random_table
from specbench_cli.engine.verify.sampling import Sampling, warp
from specbench_cli.engine.verify.tree import build_tree
from tests.methods.exact import distance_from_target

PROMPT, VOCAB = (1, 0, 1), 4
REJECTION = Sampling("rejection", 0.8)


def on_tables(tables, sampling, budget=12, **rest):
    """Open a session on a pair of tables."""
    return Case("pair", tables, sampling, PROMPT, budget=budget).open(**rest)


def nodes_of(draft):
    """Return the path of each node, in numbering order."""
    ids, tree = draft.tokens.tolist(), build_tree(draft.parents)
    return [tuple(ids[at] for at in tree.path(node)) for node in range(len(ids))]


def first_tree(tables, sampling, **params):
    """Return the text before the first step's tree, its nodes, and its draft forwards."""
    session = on_tables(tables, sampling)
    step = next(DySpec(DySpecParams(**params)).generate(session))
    text = session.tokens()[: len(session.tokens()) - len(step.outcome.committed)]
    return text, nodes_of(step.draft), sum(f.role == "draft" for f in step.forwards)


def every_slot(draft, text, depth, path=(), value=1.0):
    """Return the value of every slot down to a depth, and its node, most likely first."""
    if not depth:
        return
    row = draft[tuple((*text, *path)[-2:])].softmax(-1).tolist()
    left = 1.0
    for token in sorted(range(VOCAB), key=row.__getitem__, reverse=True):
        yield value * left, (*path, token)
        yield from every_slot(draft, text, depth - 1, (*path, token), value * row[token])
        left -= row[token]


TABLES = [
    table_model.make_table_pair("near", VOCAB, seed=40),
    table_model.make_table_pair("peaked", VOCAB, seed=50),
    table_model.make_table_pair("flat", VOCAB, seed=60),
]


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("nodes", [1, 4, 9, 16])
def test_the_heap_fills_the_slots_with_the_largest_values(tables, nodes):
    text, tree, _ = first_tree(tables, Sampling(), nodes=nodes, depth=4)
    slots = sorted(every_slot(tables[1], text, 4), reverse=True)
    assert set(tree) == {node for _, node in slots[:nodes]}
    assert len(tree) == nodes


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.4])
def test_a_threshold_fills_all_slots_above_it_with_one_forward_per_level(tables, threshold):
    text, tree, forwards = first_tree(
        tables, Sampling(), nodes=400, depth=4, growth="threshold", threshold=threshold
    )
    due = [node for value, node in every_slot(tables[1], text, 4) if value >= threshold]
    assert sorted(tree) == sorted(due)
    assert forwards in (max(map(len, tree)), max(map(len, tree)) + 1)


@pytest.mark.parametrize("growth", ["heap", "threshold"])
def test_a_certain_draft_gives_a_chain_and_a_uniform_one_a_star(growth):
    sure = table_model.peaked_table(6, 3)
    _, chain, _ = first_tree((sure, sure), Sampling(), nodes=5, growth=growth, threshold=0.5)
    assert [len(node) for node in chain] == [1, 2, 3, 4, 5]
    flat = torch.zeros(64, 64, 64, dtype=torch.float64)
    for sampling in (Sampling(), REJECTION):
        _, star, _ = first_tree((flat, flat), sampling, nodes=9, growth=growth, threshold=0.5)
        assert [len(node) for node in star] == [1] * 9


@pytest.mark.parametrize("growth", ["heap", "threshold"])
def test_values_of_drawn_slots_decrease_and_match_the_draws(growth):
    """Recompute each node's value from the tree, by its path and its earlier siblings."""
    tables = table_model.make_table_pair("near", VOCAB, seed=70)
    session = on_tables(tables, REJECTION, 60)
    method = DySpec(DySpecParams(nodes=8, depth=5, growth=growth, threshold=0.08))
    for step in method.generate(session):
        if not step.draft.nodes:
            continue
        ids, tree = step.draft.tokens.tolist(), build_tree(step.draft.parents)
        q, values = step.draft.q.tolist(), []
        for node, parent in enumerate(tree.parents):
            own = tree.children[parent]
            before = sum(q[node][ids[each]] for each in own[: own.index(node)])
            value = math.prod(q[at][ids[at]] for at in tree.path(parent)) * (1 - before)
            values.append(value)
        if growth == "heap":
            assert all(a >= b - 1e-9 for a, b in pairwise(values))
        else:
            assert min(values) >= 0.08 - 1e-9
            assert list(tree.depths) == sorted(tree.depths)


@pytest.mark.parametrize("growth", ["heap", "threshold"])
@pytest.mark.parametrize(("kind", "vocab"), [("flat", 2), ("near", 2), ("near", 3)])
def test_the_output_has_the_targets_distribution(growth, kind, vocab):
    params = DySpecParams(nodes=3 if vocab == 2 else 2, growth=growth, threshold=0.2)
    case = Case(kind, table_model.make_table_pair(kind, vocab), REJECTION, PROMPT, budget=3)
    assert distance_from_target(DySpec(params), case) < 1e-9


def test_a_node_has_no_more_children_than_top_k_and_top_p_leave():
    sampling = Sampling("rejection", 0.8, top_k=2)
    tables = table_model.make_table_pair("near", 5)
    for step in DySpec(DySpecParams(nodes=40, depth=3)).generate(on_tables(tables, sampling, 30)):
        levels = step.draft.levels
        assert step.draft.nodes == 2 ** (levels + 1) - 2
        for node, distribution in zip(
            nodes_of(step.draft), [] if not levels else step.draft.q, strict=True
        ):
            assert distribution[node[-1]] > 0


def test_with_an_equal_draft_the_first_children_are_accepted():
    table = random_table(VOCAB, 5, 1.5)
    for step in DySpec(DySpecParams(nodes=6)).generate(on_tables((table, table), REJECTION, 30)):
        tree, node = build_tree(step.draft.parents), -1
        for child in step.outcome.path:
            assert child == tree.children[node][0]
            node = child
        assert not tree.children[node]


def test_the_draft_is_warped_like_the_target():
    tables = table_model.make_table_pair("near", VOCAB)
    session = on_tables(tables, REJECTION)
    step = next(DySpec(DySpecParams(nodes=1)).generate(session))
    n = len(session.tokens()) - len(step.outcome.committed)
    distribution = warp(tables[1][tuple(session.tokens()[n - 2 : n])], REJECTION)
    assert torch.allclose(step.draft.q[0].double(), distribution)
