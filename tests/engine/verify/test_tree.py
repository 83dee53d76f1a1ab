"""Tree structure: ancestors, depths and paths, compared with brute force, for any numbering."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.engine.verify.tree import (
    ROOT,
    build_tree,
    build_tree_mask,
    find_child,
    merge_trees,
)

CPU = torch.device("cpu")


@st.composite
def trees(draw, most=14):
    m = draw(st.integers(0, most))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(m))


def ancestors(parents, node):
    """Return the path of a node, including itself, by following parents."""
    return {node} | (ancestors(parents, parents[node]) if node != ROOT else set())


@given(trees())
def test_a_row_sees_only_its_ancestors_and_itself(parents):
    mask, _ = build_tree_mask(parents, CPU)
    for node in range(-1, len(parents)):
        seen = {row - 1 for row in range(len(parents) + 1) if mask[node + 1, row]}
        assert seen == ancestors(parents, node)


@given(trees())
def test_a_rows_depth_is_the_number_of_its_ancestors(parents):
    mask, depths = build_tree_mask(parents, CPU)
    assert depths.tolist() == (mask.sum(1) - 1).tolist()
    tree = build_tree(parents)
    assert tree.depths == tuple(depths.tolist()[1:])
    assert tree.levels == int(depths.max())


@given(trees())
def test_paths_lead_from_the_root_to_every_leaf(parents):
    tree = build_tree(parents)
    leaves = set(range(len(parents))) - set(parents)
    assert [path[-1] for path in tree.paths()] == sorted(leaves)
    for node in range(len(parents)):
        path = tree.path(node)
        assert set(path) | {ROOT} == ancestors(parents, node)
        assert list(path) == sorted(path)  # the rows of a path increase, as `commit` requires
        assert [tree.depths[step] for step in path] == list(range(1, len(path) + 1))
    assert tree.path(ROOT) == ()


@given(trees(), st.randoms(use_true_random=False))
def test_children_are_listed_in_test_order(parents, random):
    order = list(range(len(parents)))
    random.shuffle(order)
    tree = build_tree(parents, tuple(order))
    for node in range(-1, len(parents)):
        children = [child for child in order if parents[child] == node]
        assert list(tree.children[node]) == children
    assert sum(map(len, tree.children)) == len(parents)


def test_without_an_order_children_are_in_numbering_order():
    assert build_tree((-1, -1, 0, -1, 0)).children == ((2, 4), (), (), (), (), (0, 1, 3))


def test_a_child_is_found_by_its_token_and_the_first_of_equal_ones():
    tree = build_tree((-1, -1, -1, 1))
    tokens = (5, 7, 7, 7)
    assert [find_child(tree, tokens, ROOT, token) for token in (5, 7, 6)] == [0, 1, None]
    assert [find_child(tree, tokens, 1, token) for token in (5, 7)] == [None, 3]


def test_the_rows_of_a_template_are_cached():
    assert build_tree_mask((-1, 0, 0), CPU) is build_tree_mask((-1, 0, 0), CPU)


def test_an_empty_tree_is_only_the_root():
    mask, depths = build_tree_mask((), CPU)
    assert (mask.tolist(), depths.tolist()) == ([[True]], [0])
    assert (build_tree(()).levels, list(build_tree(()).paths())) == (0, [])


# ---- several trees as one -----------------------------------------------------------------------

PARTS = st.lists(
    trees(8).flatmap(
        lambda parents: st.tuples(
            st.lists(st.integers(0, 2), min_size=len(parents), max_size=len(parents)),
            st.just(parents),
        )
    ),
    max_size=4,
)


def texts(ids, parents):
    """Return the path of each node as ids."""
    tree = build_tree(tuple(parents))
    return [tuple(ids[step] for step in tree.path(node)) for node in range(len(ids))]


@given(PARTS)
def test_a_merged_tree_has_every_path_once(parts):
    merged = merge_trees(parts)
    found = texts(merged.ids, merged.parents)
    assert len(set(found)) == len(found)
    assert set(found) == {path for part in parts for path in texts(*part)}
    assert all(parent < node for node, parent in enumerate(merged.parents))


@given(PARTS)
def test_each_parts_nodes_are_found_in_the_merged_tree(parts):
    merged = merge_trees(parts)
    found = texts(merged.ids, merged.parents)
    for part, places in zip(parts, merged.places, strict=True):
        assert [found[place] for place in places] == texts(*part)


def test_chains_with_one_beginning_share_it():
    merged = merge_trees([((5, 6, 7), None), ((5, 6, 8), None), ((9,), None)])
    assert merged.ids == (5, 6, 7, 8, 9)
    assert merged.parents == (-1, 0, 1, 1, -1)
    assert merged.places == ((0, 1, 2), (0, 1, 3), (4,))
