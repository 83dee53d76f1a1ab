"""Dynamic draft trees: they are connected and the best of all candidates, with one draft call per
level."""

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.engine import host
from specbench_cli.engine.drafting.growth import CandidateNodes, best_size, expand, grow, rerank
from specbench_cli.engine.drafting.levels import Levels
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import ROOT, build_tree

PROMPT = (2, 0, 1)
GREEDY = Sampling()
COUPLED = Sampling("coupled", 0.8, seed=5)
REJECTION = Sampling("rejection", 0.8, seed=5)
SAMPLINGS = st.sampled_from([GREEDY, COUPLED, REJECTION])


@pytest.fixture(scope="module")
def growth(open_session, random_table):
    """Function that grows a tree on a random table. It returns the session, `Levels`, table and
    tree."""

    def make(vocab=4, seed=0, sampling=GREEDY, budget=12, scale=1.5, **shape):
        table = random_table(vocab, seed, scale)
        session = open_session(table, table, prompt=PROMPT, sampling=sampling, budget=budget)
        model = session.draft()
        levels = Levels(session, model, session.new_state(model, slack=200))
        levels.begin(session.pending_tokens(0))
        session.prefill()
        first = levels.begin(session.pending_tokens(levels.state.length()))
        return session, levels, table, first

    return make


def path_value(session, table, tokens):
    """Return the log-probability of a path, computed from the table."""
    text, total = [*session.tokens()], 0.0
    for ahead, token in enumerate(tokens):
        row = table[text[-2], text[-1]][None]
        if session.sampling.rule == "coupled":
            row = session.scores(row, len(session.output()) + ahead)
        elif session.sampling.rule == "rejection":
            row = row / session.sampling.temperature
        total += float(row.log_softmax(-1)[0, token])
        text.append(token)
    return total


def paths(draft):
    """Return the path of each node as ids."""
    ids, tree = draft.tokens.tolist(), build_tree(draft.parents)
    return [tuple(ids[step] for step in tree.path(node)) for node in range(draft.nodes)]


@st.composite
def shapes(draw):
    return {
        "k": draw(st.integers(1, 5)),
        "depth": draw(st.integers(1, 4)),
        "nodes": draw(st.integers(1, 30)),
    }


@settings(max_examples=40, deadline=None)
@given(shapes(), st.integers(2, 6), st.integers(0, 99), SAMPLINGS)
def test_the_tree_is_connected_and_of_the_size_asked_for(growth, shape, vocab, seed, sampling):
    session, levels, _, first = growth(vocab, seed, sampling)
    grown = grow(levels, first, session, **shape)
    draft = grown.draft
    assert all(ROOT <= parent < node for node, parent in enumerate(draft.parents))
    width, most = min(shape["k"], vocab), 0
    level = width
    for _ in range(shape["depth"]):
        most += level
        level = min(shape["k"], level) * width
    assert draft.nodes == min(shape["nodes"], most)
    assert draft.levels <= shape["depth"]
    assert len(set(paths(draft))) == draft.nodes  # siblings differ


@settings(max_examples=40, deadline=None)
@given(shapes(), st.integers(2, 6), st.integers(0, 99), SAMPLINGS)
def test_the_tree_consists_of_the_best_candidates(growth, shape, vocab, seed, sampling):
    session, levels, table, first = growth(vocab, seed, sampling)
    draft = grow(levels, first, session, **shape).draft
    k, width = shape["k"], min(shape["k"], vocab)
    remembered, frontier = [], [((), 0.0)]
    for _ in range(shape["depth"]):
        below = []
        for path, _ in frontier:
            children = [(*path, token) for token in range(vocab)]
            valued = [(child, path_value(session, table, child)) for child in children]
            below += sorted(valued, key=lambda pair: -pair[1])[:width]
        remembered += below
        frontier = sorted(below, key=lambda pair: -pair[1])[:k]
    expected = sorted((value for _, value in remembered), reverse=True)[: shape["nodes"]]
    found = sorted((path_value(session, table, path) for path in paths(draft)), reverse=True)
    assert found == pytest.approx(expected, abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 99))
def test_with_space_for_all_candidates_it_is_the_best_tree(growth, nodes, depth, seed):
    vocab = 3
    session, levels, table, first = growth(vocab, seed)
    draft = grow(levels, first, session, k=vocab**depth, depth=depth, nodes=nodes).draft
    every = [()]
    values = []
    for _ in range(depth):
        every = [(*path, token) for path in every for token in range(vocab)]
        values += [path_value(session, table, path) for path in every]
    found = sum(math.exp(path_value(session, table, path)) for path in paths(draft))
    best = sum(math.exp(value) for value in sorted(values, reverse=True)[:nodes])
    assert found == pytest.approx(best, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(shapes(), st.integers(0, 99), SAMPLINGS)
def test_values_decrease_along_a_path(growth, shape, seed, sampling):
    session, levels, _, first = growth(5, seed, sampling)
    found = expand(levels, first, session, k=shape["k"], depth=shape["depth"])
    parents, values = found.parents, found.values
    below = [node for node, parent in enumerate(parents) if parent != ROOT]
    assert all(parents[node] < node for node in below)
    assert all(values[node] <= values[parents[node]] for node in below)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(2, 6), st.integers(0, 99), SAMPLINGS, st.booleans())
def test_selection_on_the_device_gives_the_same_tree(growth, shape, vocab, seed, sampling, ties):
    k, depth = shape["k"], shape["depth"]
    found, fed = [], []
    for near in (True, False):
        session, levels, table, first = growth(vocab, seed, sampling, scale=2.0)
        if ties:
            table.round_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "is_on_host", lambda device, near=near: near)
            found.append(expand(levels, first, session, k=k, depth=depth))
        fed.append((levels.fed, levels.state.ids, levels.state.positions))
        fed[-1] += ([row.parent for row in levels.state.rows],)
    assert found[0] == found[1]
    assert fed[0] == fed[1]
    kinds = [{type(number) for number in part} for part in found[1]]
    assert kinds[:3] == [{int}, {int}, {float}]
    assert kinds[3] <= {int}


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("k", [1, 3, 9])
def test_a_tree_takes_one_draft_call_per_level(growth, depth, k):
    session, levels, _, first = growth(4)
    before = len(session.harness.meter.forwards) - 1  # `begin` is the first call
    grow(levels, first, session, k=k, depth=depth, nodes=20)
    calls = session.harness.meter.forwards[before:]
    assert len(calls) == depth
    assert all((call.model, call.role) == ("draft", "draft") for call in calls)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, REJECTION], ids=lambda s: s.rule)
def test_one_node_per_level_gives_the_chain_of_most_likely_tokens(growth, sampling):
    session, levels, table, first = growth(6, 3, sampling)
    grown = grow(levels, first, session, k=1, depth=5, nodes=20)
    assert grown.draft.parents == (-1, 0, 1, 2, 3)
    assert grown.fed == (0, 1, 2, 3, -1)
    path = ()
    for _ in range(5):
        path = max(
            ((*path, token) for token in range(6)), key=lambda p: path_value(session, table, p)
        )
    assert tuple(grown.draft.tokens.tolist()) == path


def test_a_tie_is_won_by_the_shallower_node():
    found = CandidateNodes(
        [*range(6)], [-1, -1, 0, 0, 2, 2], [0.0, -1.0, 0.0, -1.0, 0.0, -1.0], [0, 1, 2]
    )
    assert [rerank(found, n).parents for n in range(4)] == [
        (),
        (-1,),
        (-1, 0),
        (-1, 0, 1),
    ]
    assert rerank(found, 4).ids == [0, 1, 2, 4]
    assert rerank(found, 5).ids == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("hole", [-math.inf, math.nan])
def test_a_token_of_probability_zero_is_never_proposed(hole):
    found = CandidateNodes([*range(5)], [-1, -1, 0, 0, 1], [-0.5, hole, -0.7, hole, hole], [0, 1])
    assert rerank(found, 5).ids == [0, 2]
    assert rerank(found, 5).fed == (0, -1)


def test_the_rows_of_a_path_are_found_in_the_drafts_state(growth):
    session, levels, _, first = growth(4, 8)
    grown = grow(levels, first, session, k=3, depth=4, nodes=9)
    state, start = levels.state, levels.state.kept
    for node, path in enumerate(paths(grown.draft)):
        nodes = build_tree(grown.draft.parents).path(node)
        rows = [row for row in grown.rows(nodes) if row >= 0]
        assert rows == sorted(rows)
        assert [state.ids[start + row] for row in rows] == list(path[: len(rows)])


def test_a_smaller_size_keeps_the_best_nodes(growth):
    session, levels, _, first = growth(5, 2)
    found = expand(levels, first, session, k=4, depth=3)
    sizes = []

    def size(values):
        sizes.extend(values)
        return 5

    whole, small = (
        paths(session.tree(chosen.ids, chosen.parents))
        for chosen in (rerank(found, 12), rerank(found, 12, size))
    )
    assert len(small) == 5
    assert set(small) <= set(whole)
    assert sizes == sorted(found.values, reverse=True)[:12]
    assert len(rerank(found, 12, lambda _: 99).ids) == 12
    assert rerank(found, 12, lambda _: 0).parents == ()


# ---- the best tree size --------------------------------------------------------------------------

CHANCES = st.lists(st.floats(0.0, 1.0), max_size=30).map(lambda ps: sorted(ps, reverse=True))


@given(CHANCES, st.floats(0.01, 5.0), st.floats(0.0, 1.0))
def test_the_best_size_gives_the_most_tokens_per_second(chances, fixed, slope):
    def rate(n):
        return (1 + sum(chances[:n])) / (fixed + 1.0 + slope * (n + 1))

    values = [math.log(p) if p else -math.inf for p in chances]
    n = best_size(values, lambda rows: 1.0 + slope * rows, fixed)
    assert rate(n) == pytest.approx(max(map(rate, range(len(chances) + 1))), rel=1e-9)


def test_free_rows_are_all_used_and_expensive_ones_not_at_all():
    values = [math.log(0.9), math.log(0.5), math.log(0.1)]
    assert best_size(values, lambda rows: 1.0, 0.0) == 3
    assert best_size(values, float, 0.0) == 0
    assert best_size([], float, 1.0) == 0


def test_a_tree_ends_at_a_step_in_the_cost():
    values = [math.log(0.6)] * 10
    costs = defaultdict(lambda: 9.0) | dict.fromkeys(range(1, 9), 1.0)
    assert best_size(values, lambda rows: costs[rows], 0.5) == 7
