"""Verification of trees: the exact distribution of committed tokens, for every rule and many
shapes."""

import itertools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench_cli.engine.verify.chain import rejection
from specbench_cli.engine.verify.choosing import draw_siblings
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.siblings import match, multi_round, point_mass
from specbench_cli.engine.verify.tree import ROOT, build_tree
from tests.engine.verify.contexts import distribution_of_target, distributions

SHAPES = {
    "nothing": (),
    "chain": (-1, 0, 1),
    "star": (-1, -1, -1),
    "binary": (-1, -1, 0, 0, 1, 1),
    "uneven": (-1, -1, 0, 2, 2),
    "uneven too": (-1, 0, -1, 0, 2),
}
KINDS = ("peaked", "flat", "near", "equal", "disjoint")
SAMPLINGS = {
    "T=1": Sampling("rejection", 1.0),
    "T=0.5": Sampling("rejection", 0.5),
    "T=2 top-k 2": Sampling("rejection", 2.0, top_k=2),
    "T=0.8 top-p 0.7": Sampling("rejection", 0.8, top_p=0.7),
}
HOW = pytest.mark.parametrize("how", ["deterministic", "independent", "without_replacement"])
SHAPED = pytest.mark.parametrize("shape", SHAPES)


def draft_tree(parents, q, how, random):
    """Return the tokens of a tree as a draft model chooses them, and the distribution of each."""
    tree, tokens, distributions = build_tree(parents), [0] * len(parents), [q[-1]] * len(parents)
    for node in range(-1, len(parents)):
        children = tree.children[node]
        distribution = q[tokens[node] if node != ROOT else -1]
        if how == "deterministic":
            chosen = distribution.argsort(descending=True, stable=True)[: len(children)].tolist()
        else:
            chosen = draw_siblings(
                distribution[None], len(children), random, replacement=how == "independent"
            )[0]
            chosen = chosen.tolist()
        for child, token in zip(children, chosen, strict=True):
            tokens[child], distributions[child] = token, distribution
    return tree, tokens, torch.stack(distributions) if distributions else q[:0]


def verify_tree(tree, tokens, q, p, how, random):
    """Return path and next token by the rule for this draw mode."""
    rows = p[[-1, *tokens]]
    if how == "deterministic":
        return point_mass(tree, tokens, rows, random)
    return multi_round(tree, tokens, q, rows, random, replacement=how == "independent")


def distribution_of_output(exact_distribution, parents, q, p, how, n):
    """Return the exact distribution of n tokens: a tree, its verification, and target draws."""

    def run(random):
        tree, tokens, rows = draft_tree(parents, q, how, random)
        path, following = verify_tree(tree, tokens, rows, p, how, random)
        output = [*(tokens[node] for node in path), int(following)]
        while len(output) < n:
            output.append(int(random.categorical(p[output[-1]])))
        return tuple(output[:n])

    return exact_distribution(run)


# ---- exactness ----------------------------------------------------------------------------------


@HOW
@SHAPED
@pytest.mark.parametrize("kind", KINDS)
def test_committed_tokens_have_the_targets_distribution(exact_distribution, how, shape, kind):
    parents = SHAPES[shape]
    q, p = distributions(kind, vocab=3 if shape in ("nothing", "chain", "star") else 2)
    n = build_tree(parents).levels + 1
    distribution = distribution_of_output(exact_distribution, parents, q, p, how, n)
    assert distribution == pytest.approx(distribution_of_target(p, n), abs=1e-9)


@HOW
def test_three_committed_tokens_have_the_targets_distribution(exact_distribution, how):
    q, p = distributions("near", vocab=3)
    distribution = distribution_of_output(exact_distribution, (-1, -1, 0, 0), q, p, how, 3)
    assert distribution == pytest.approx(distribution_of_target(p, 3), abs=1e-9)


@HOW
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_siblings_have_the_targets_distribution_under_every_warp(
    exact_distribution, how, width, kind, sampling
):
    q, p = distributions(kind, vocab=4, sampling=sampling)
    distribution = distribution_of_output(exact_distribution, (-1,) * width, q, p, how, 1)
    assert distribution == pytest.approx(distribution_of_target(p, 1), abs=1e-9)


def test_equal_deterministic_children_do_not_change_the_distribution(exact_distribution):
    _, p = distributions("near", vocab=3)
    tree, tokens = build_tree((-1, -1, -1, 1, 1)), (1, 1, 2, 0, 0)

    def run(random):
        path, following = point_mass(tree, tokens, p[[-1, *tokens]], random)
        output = [*(tokens[node] for node in path), int(following)]
        return tuple([*output, *([int(random.categorical(p[output[-1]]))] * (len(output) < 2))][:2])

    assert exact_distribution(run) == pytest.approx(distribution_of_target(p, 2), abs=1e-9)


def test_children_of_two_draft_models_have_their_own_distributions(exact_distribution):
    (one, p), (other, _) = distributions("near"), distributions("flat", seed=51)
    tree = build_tree((-1, -1, -1))
    q = torch.stack((one[-1], other[-1], one[-1]))

    def run(random):
        tokens = [int(random.categorical(row)) for row in q]
        path, following = multi_round(tree, tokens, q, p[[-1, *tokens]], random, replacement=True)
        return tokens[path[0]] if path else int(following)

    expected = dict(enumerate(p[-1].tolist()))
    assert exact_distribution(run) == pytest.approx(expected, abs=1e-9)


# ---- planted faults: the same test finds them ----------------------------------------------------


@pytest.mark.parametrize(
    "drawn_as",
    ["deterministic", "without_replacement"],
    ids=["p/q on the likeliest", "no renormalising"],
)
def test_verifying_children_as_independent_draws_changes_the_distribution(
    exact_distribution, drawn_as
):
    q, p = distributions("strangers", vocab=5)

    def run(random):
        tree, tokens, rows = draft_tree((-1, -1, -1), q, drawn_as, random)
        path, following = verify_tree(tree, tokens, rows, p, "independent", random)
        return tokens[path[0]] if path else int(following)

    distribution = exact_distribution(run)
    assert sum(abs(distribution[i] - x) for i, x in enumerate(p[-1].tolist())) / 2 > 1e-3


def test_one_draw_per_path_and_keeping_the_longest_changes_the_distribution(exact_distribution):
    _, p = distributions("flat", vocab=3)

    def run(random):
        draws = [int(random.categorical(p[-1])) for _ in (0, 1)]  # one draw for each child, 0 and 1
        return next((x for child, x in enumerate(draws) if child == x), draws[0])

    distribution = exact_distribution(run)
    assert distribution[0] + distribution[1] > float(p[-1, :2].sum()) + 0.01


# ---- chains and trees agree ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["independent", "without_replacement"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_verified_as_by_rejection(exact_distribution, how, kind):
    q, p = distributions(kind)
    for tokens in itertools.product(range(3), repeat=2):
        if float(q[-1, tokens[0]]) == 0 or float(q[tokens[0], tokens[1]]) == 0:
            continue
        rows = q[[-1, tokens[0]]], p[[-1, *tokens]]

        def of_tree(random, tokens=tokens, rows=rows):
            path, following = multi_round(
                build_tree((-1, 0)), tokens, *rows, random, replacement=how == "independent"
            )
            return len(path), int(following)

        def of_chain(random, tokens=tokens, rows=rows):
            return tuple(map(int, rejection(torch.tensor(tokens), *rows, random)))

        one, two = exact_distribution(of_tree), exact_distribution(of_chain)
        assert all(abs(one.get(x, 0.0) - two.get(x, 0.0)) < 1e-12 for x in {*one, *two})


# ---- acceptance ---------------------------------------------------------------------------------


def acceptance_probability(exact_distribution, q, p, how, width):
    def run(random):
        tree, tokens, rows = draft_tree((-1,) * width, q, how, random)
        return bool(verify_tree(tree, tokens, rows, p, how, random)[0])

    return exact_distribution(run).get(True, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_more_children_are_accepted_at_least_as_often_and_without_replacement_most(
    exact_distribution, kind
):
    q, p = distributions(kind, vocab=4)
    overlap = float(torch.minimum(q[-1], p[-1]).sum())
    by_width = {
        how: [acceptance_probability(exact_distribution, q, p, how, width) for width in (1, 2, 3)]
        for how in ("independent", "without_replacement")
    }
    for chances in by_width.values():
        assert chances[0] == pytest.approx(overlap, abs=1e-12)
        assert all(b >= a - 1e-12 for a, b in pairwise(chances))
    assert all(w >= i - 1e-12 for i, w in zip(*by_width.values(), strict=True))


@pytest.mark.parametrize("how", ["independent", "without_replacement"])
def test_with_two_equal_children_the_first_is_always_accepted(exact_distribution, how):
    q, p = distributions("equal")

    def run(random):
        tree, tokens, rows = draft_tree((-1, -1, 0, 0), q, how, random)
        return verify_tree(tree, tokens, rows, p, how, random)[0]

    assert exact_distribution(run)[0, 2] == pytest.approx(1.0)


@given(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), st.sets(st.integers(0, 3)))
@settings(deadline=None)
def test_deterministic_children_are_accepted_with_the_targets_probability(
    exact_distribution, weights, children
):
    p = torch.tensor([weights] * (len(children) + 1), dtype=torch.float64)
    p = p / p.sum(-1, keepdim=True)
    tokens = sorted(children)
    tree = build_tree((-1,) * len(tokens))
    distribution = exact_distribution(lambda random: bool(point_mass(tree, tokens, p, random)[0]))
    assert distribution.get(True, 0.0) == pytest.approx(float(p[0, tokens].sum()))


# ---- match --------------------------------------------------------------------------------------


@st.composite
def trees(draw):
    m = draw(st.integers(0, 10))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(m))
    tokens = draw(st.lists(st.integers(0, 2), min_size=m, max_size=m))
    choices = draw(st.lists(st.integers(0, 2), min_size=m + 1, max_size=m + 1))
    return parents, tokens, choices


@given(trees())
def test_the_accepted_path_is_the_longest_that_matches_the_choices(case):
    parents, tokens, choices = case
    tree = build_tree(parents)

    def matches(path):
        return all(tokens[b] == choices[a + 1] for a, b in pairwise((ROOT, *path)))

    path = match(tree, tokens, choices)
    assert matches(path)
    assert path == tree.path(path[-1] if path else ROOT)
    # The first of two equal siblings is followed, so the other one may begin a longer path.
    last = path[-1] if path else ROOT
    assert not any(tokens[child] == choices[last + 1] for child in tree.children[last])
    siblings_differ = all(
        len({tokens[child] for child in children}) == len(children) for children in tree.children
    )
    if siblings_differ:
        every = [tree.path(node) for node in range(-1, len(parents))]
        assert path == max(filter(matches, every), key=len)


# ---- order --------------------------------------------------------------------------------------


@given(
    trees(),
    st.randoms(use_true_random=False),
    st.sampled_from(["choices", "independent", "deterministic"]),
)
@settings(deadline=None, max_examples=60)
def test_renumbering_the_nodes_changes_nothing(exact_distribution, case, random, how):
    parents, tokens, choices = case
    parents, tokens = parents[:5], tokens[:5]
    m = len(parents)
    numbers = renumbered(parents, random)
    back = sorted(range(m), key=numbers.__getitem__)  # new number -> old number
    moved = tuple(ROOT if parents[i] == ROOT else numbers[parents[i]] for i in back)
    # Siblings are tested in their old order.
    other = build_tree(moved, tuple(numbers))
    generator = torch.Generator().manual_seed(m)
    p, q = torch.rand(2, m + 1, 3, generator=generator, dtype=torch.float64).softmax(-1)

    def run(tree, old, chance):
        ids = [tokens[i] for i in old]
        if how == "choices":
            path = match(tree, ids, [choices[row] for row in ([0, *(i + 1 for i in old)])])
            return tuple(old[node] for node in path)
        distributions = p[[0, *(i + 1 for i in old)]]
        if how == "deterministic":
            path, following = point_mass(tree, ids, distributions, chance)
        else:
            path, following = multi_round(
                tree, ids, q[old], distributions, chance, replacement=True
            )
        return tuple(ids[node] for node in path), int(following)

    one = exact_distribution(lambda chance: run(build_tree(parents), list(range(m)), chance))
    two = exact_distribution(lambda chance: run(other, back, chance))
    assert one == pytest.approx(two)


def renumbered(parents, random):
    """Return a new number for every node, with parents still before their children."""
    free, numbers = [node for node, parent in enumerate(parents) if parent == ROOT], {}
    while free:
        node = free.pop(random.randrange(len(free)))
        numbers[node] = len(numbers)
        free += [child for child, parent in enumerate(parents) if parent == node]
    return [numbers[node] for node in range(len(parents))]
