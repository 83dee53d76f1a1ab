"""Tree templates: their order, their levels, and how they are filled."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine import host
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.drafting.template import (
    best_tree,
    fill,
    tree_of_choices,
    tree_of_widths,
)
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import ROOT, build_tree

CPU = torch.device("cpu")
GREEDY = Sampling()
REJECTION = Sampling("rejection", 0.8, seed=5)
SPARSE_25 = tree_of_choices(
    tuple(map(int, node))
    for node in (
        "0 1 2 3 00 01 02 03 10 11 20 30 000 001 002 010 011 020 100 200 0000 0001 0010 00000 00001"
    ).split()
)
"""25 nodes in five levels of 4, 8, 8, 3 and 2 nodes, as many as in EAGLE's tree."""


@st.composite
def templates(draw, most=12):
    nodes = [()]
    for _ in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from(nodes))
        nodes.append((*parent, draw(st.integers(0, 3))))
    return tree_of_choices(nodes[1:])


@given(templates())
def test_nodes_come_level_by_level_and_siblings_by_rank(template):
    tree = build_tree(template.parents)
    assert list(tree.depths) == sorted(tree.depths) == [len(node) for node in template.nodes]
    for children in tree.children:
        ranks = [template.nodes[child][-1] for child in children]
        assert ranks == sorted(set(ranks))
    for node, ranks in enumerate(template.nodes):
        path = tree.path(node)
        assert tuple(template.nodes[step][-1] for step in path) == ranks


@given(templates())
def test_nodes_with_children_are_fed_and_leaves_are_not(template):
    inner = set(template.parents) - {ROOT}
    assert [at for at, place in enumerate(template.fed) if place >= 0] == sorted(inner)
    assert [place for place in template.fed if place >= 0] == list(range(len(inner)))


@given(templates())
def test_a_level_lists_parents_ranks_and_fed_nodes(template):
    fed = [()]
    for level, depth in zip(template.levels(), range(1, template.depth + 1), strict=True):
        nodes = [node for node in template.nodes if len(node) == depth]
        assert [(*fed[row], rank) for row, rank in level.picks] == nodes
        assert level.width == 1 + max(rank for _, rank in level.picks)
        assert [fed[row] for row in level.parents] == [node[:-1] for node in nodes]
        above, fed = fed, [nodes[at] for at in level.fed]
        assert [above[row] for row in level.fed_parents] == [node[:-1] for node in fed]
        assert all(node in {each[:-1] for each in template.nodes} for node in fed)


def test_the_levels_of_a_template_are_cached():
    assert SPARSE_25.levels() is SPARSE_25.levels()
    assert tree_of_widths((3, 2)) is tree_of_widths((3, 2))


def test_widths_give_the_complete_tree():
    template = tree_of_widths((2, 3))
    assert template.parents == (-1, -1, 0, 0, 0, 1, 1, 1)
    assert template.nodes[-1] == (1, 2)
    assert tree_of_widths(()).depth == 0


def test_a_node_without_its_parent_is_refused():
    with pytest.raises(ValueError, match=r"\(1, 0\)"):
        tree_of_choices([(0,), (1, 0)])


def test_the_sparse_tree_has_as_many_nodes_per_level_as_eagles():
    depths = build_tree(SPARSE_25.parents).depths
    assert [depths.count(depth) for depth in range(1, 6)] == [4, 8, 8, 3, 2]
    assert SPARSE_25.depth == 5


@given(templates(), st.integers(1, 4), st.integers(1, 4))
def test_a_shortened_template_is_a_part_of_it(template, depth, width):
    cut = template.truncate(depth, width)
    assert cut.nodes == tuple(
        node for node in template.nodes if len(node) <= depth and max(node) < width
    )


# ---- the best shape -----------------------------------------------------------------------------


def expected(nodes, rates):
    total = 0.0
    for node in nodes:
        product = 1.0
        for rank in node:
            product *= rates[rank]
        total += product
    return total


@pytest.mark.parametrize("rates", [(0.6, 0.3), (0.5, 0.4), (0.9, 0.05)])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_optimised_tree_is_the_best_of_all_trees(rates, n):
    every = [node for node in tree_of_widths((2,) * 4).nodes if len(node) <= n]
    best = 0.0
    for nodes in combinations(every, n):
        chosen = {(), *nodes}
        if all(node[:-1] in chosen for node in nodes):
            best = max(best, expected(nodes, rates))
    template = best_tree(n, rates)
    assert len(template.nodes) == n
    assert expected(template.nodes, rates) == pytest.approx(best)


def test_a_certain_first_child_gives_a_chain_and_a_depth_limit_a_wide_tree():
    assert best_tree(4, (1.0, 0.0)).parents == (-1, 0, 1, 2)
    assert best_tree(4, (0.3, 0.3, 0.2, 0.2), depth=1).parents == (-1, -1, -1, -1)
    assert len(best_tree(30, (0.5, 0.5), depth=2).nodes) == 6  # there are no more nodes


# ---- filling ------------------------------------------------------------------------------------


@pytest.fixture
def ready(open_session, random_table):
    def make(sampling=GREEDY, vocab=6, seed=2):
        table = random_table(vocab, seed, 1.5)
        session = open_session(table, table, prompt=(2, 0, 1), sampling=sampling, budget=12)
        model = session.draft()
        levels = Levels(session, model, session.new_state(model, slack=40))
        session.reserve(25)
        levels.begin(session.pending_tokens(0))
        session.prefill()
        first = levels.begin(session.pending_tokens(levels.state.length()))
        return session, levels, first, table

    return make


@pytest.mark.parametrize(
    "template", [SPARSE_25, tree_of_widths((2, 2)), tree_of_widths((1, 1, 2)), best_tree(9)]
)
def test_each_node_is_its_parents_child_of_its_rank(ready, template):
    session, levels, first, table = ready()
    before = len(session.harness.meter.forwards) - 1
    grown = fill(template, levels, first, session)
    assert grown.draft.parents == template.parents
    assert len(session.harness.meter.forwards) - before == template.depth
    ids, tree = grown.draft.tokens.tolist(), build_tree(template.parents)
    for node, ranks in enumerate(template.nodes):
        text = [*session.tokens(), *(ids[step] for step in tree.path(node)[:-1])]
        best = table[text[-2], text[-1]].argsort(descending=True)
        assert ids[node] == best[ranks[-1]]


@pytest.mark.parametrize("how", ["deterministic", "independent", "without_replacement"])
def test_a_filled_draft_has_the_right_draw_mode(ready, how):
    session, levels, first, table = ready(REJECTION)
    template = best_tree(8, (0.5, 0.3, 0.2))
    draft = fill(template, levels, first, session, how=how).draft
    assert draft.draw_mode == how
    assert (draft.q is None) == (how == "deterministic")
    if draft.q is not None:
        ids, tree = draft.tokens.tolist(), build_tree(template.parents)
        for node in range(draft.nodes):
            text = [*session.tokens(), *(ids[step] for step in tree.path(node)[:-1])]
            distribution = session.warp(table[text[-2], text[-1]])
            torch.testing.assert_close(draft.q[node], distribution)
    session.verify(draft, session.score(draft))


@pytest.mark.parametrize("how", ["deterministic", "independent", "without_replacement"])
@pytest.mark.parametrize("sampling", [GREEDY, REJECTION], ids=lambda sampling: sampling.rule)
@pytest.mark.parametrize("template", [SPARSE_25, tree_of_widths((2, 2)), tree_of_widths((1, 1, 1))])
def test_tokens_on_the_device_are_the_same(ready, monkeypatch, template, sampling, how):
    drafts, fed = [], []
    for near in (True, False):
        session, levels, first, _ = ready(sampling)
        monkeypatch.setattr(host, "is_on_host", lambda device, near=near: near)
        drafts.append(fill(template, levels, first, session, how=how).draft)
        fed.append(levels.state.rows)
        session.commit(session.verify(drafts[-1], session.score(drafts[-1])))
    here, there = drafts
    assert here.tokens.tolist() == there.tokens.tolist()
    assert (here.parents, here.draw_mode) == (there.parents, there.draw_mode)
    assert here.q is there.q is None or torch.equal(here.q, there.q)
    assert fed[0] == fed[1]


def test_the_rows_of_an_accepted_path_are_kept(ready):
    session, levels, first, _ = ready()
    grown = fill(SPARSE_25, levels, first, session)
    outcome = session.commit(session.verify(grown.draft, session.score(grown.draft)))
    assert len(outcome.path) == 5  # the draft is the target
    levels.keep(grown.rows(outcome.path))
    text = session.tokens()
    assert levels.state.ids == list(text[: levels.state.length()])
    assert levels.state.length() == len(text) - 2  # the deepest level was never fed
