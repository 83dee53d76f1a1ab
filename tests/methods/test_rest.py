"""REST: the longest suffix in the datastore, and the trie of its continuations."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.rest.datastore import Datastore, write
from methods.rest.method import Rest, RestParams, select_heaviest
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.errors import EnvironmentFault

END = 96
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=16), min_size=1, max_size=4)
REJECTION = Sampling("rejection", 0.8, seed=3)


def stored(texts, end=END):
    return Datastore(*Datastore.sort(texts, end))


def prefixes(ways):
    """Count how often each prefix of the continuations occurs."""
    return Counter(tuple(way[:n]) for way in ways for n in range(1, len(way) + 1))


def paths(tokens, parents):
    """Return the nodes of a tree by their paths."""
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


def retrieved(texts, text, params, limit):
    """Compute the paper's steps by naive search: the chosen nodes, most frequent first."""
    for n in range(min(params.longest, len(text)), params.shortest - 1, -1):
        ways = [
            each[at + n : at + n + min(params.depth, limit)]
            for each in texts
            for at in range(len(each) - n + 1)
            if each[at : at + n] == text[len(text) - n :]
        ]
        if ways:
            counts = prefixes(ways)
            best = sorted(counts, key=lambda way: (-counts[way], len(way), way))
            return best[: params.nodes]
    return []


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=12), st.integers(1, 9)
)
@settings(max_examples=150, deadline=None)
def test_the_tree_has_the_most_frequent_prefixes_shorter_ones_first(ways, nodes):
    rows = np.asarray(sorted([*way, *[END] * (5 - len(way))] for way in ways))
    tokens, parents = select_heaviest(rows, END, nodes)
    counts = prefixes(ways)
    assert all(parent < at for at, parent in enumerate(parents))
    due = sorted(counts, key=lambda way: (-counts[way], len(way), way))[:nodes]
    assert paths(tokens, parents) == due


@given(
    TEXTS,
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
def test_the_continuation_is_that_of_the_longest_suffix_that_occurs(
    texts, text, shortest, more, limit
):
    params = RestParams(shortest=shortest, longest=shortest + more, depth=3, nodes=6)

    class Opened:
        artifact = staticmethod(lambda wanted: stored(texts))
        reserve = staticmethod(lambda nodes: None)
        tokens = staticmethod(lambda: text)
        chain = staticmethod(lambda ids: (list(ids), ()))
        tree = staticmethod(lambda ids, parents: (ids, parents))

    method = Rest(params)
    method.start(Opened)
    assert paths(*method.propose(Opened, limit)) == retrieved(texts, text, params, limit)


@pytest.mark.smoke
@pytest.mark.parametrize("sampling", [Sampling(), REJECTION], ids=lambda s: s.rule)
def test_a_datastore_of_the_targets_own_output_is_fully_accepted(open_session, plain, sampling):
    session = open_session(4, sampling)
    ids = plain(4, Sampling()).ids
    store = stored([[*session.tokens(), *ids]])
    session.artifact = lambda wanted: store
    steps = list(Rest(RestParams(shortest=1)).generate(session))
    if sampling.rule == "greedy":
        assert session.output() == ids
        accepted = [len(step.outcome.path) for step in steps[:-1]]
        assert accepted and all(
            n == step.draft.levels for n, step in zip(accepted, steps[:-1], strict=True)
        )
    assert all(step.draft.draw_mode == "deterministic" for step in steps if step.draft.nodes)


def test_a_folder_can_be_loaded_and_is_refused_for_another_target(family, tmp_path):
    decoders = family.decoders
    write([[5, 6, 7], [6, 7]], 96, tmp_path / "store", {})
    store = Datastore.load(tmp_path / "store", decoders)
    assert store.continuations(store.find([6]), 1, 2, 9).tolist() == [[7, 96], [7, 96]]
    assert store.weight_bytes == 7 * (2 + 4)
    assert not list(tmp_path.glob("*.part"))
    write([[5]], 97, tmp_path / "store", {})
    with pytest.raises(EnvironmentFault, match="a vocabulary of 97 tokens; this target has 96"):
        Datastore.load(tmp_path / "store", decoders)
    (tmp_path / "store" / "config.json").unlink()
    with pytest.raises(EnvironmentFault, match="store is not a datastore"):
        Datastore.load(tmp_path / "store", decoders)
