"""Lookahead decoding: visibility in the window, its n-grams, and how far they are accepted."""

from types import SimpleNamespace

import pytest
import torch

from methods.lookahead import Lookahead, LookaheadParams
from specbench_cli.audit.cases import Case
from specbench_cli.audit.models.table import successor_table
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.verify.tree import build_tree_mask

CYCLE = successor_table([1, 2, 3, 4, 5, 6, 0])


def watched(params, budget=40):
    """Decode the cycle, and return every step with its window rows."""
    case = Case("cycle", (CYCLE, CYCLE), Sampling(), prompt=(3, 5, 0, 1), budget=budget)
    session, method = case.open(), Lookahead(params)
    seen = []
    tree = method._tree

    def spy(session, known, rows):
        seen.append(([list(gram) for gram in known], [list(row) for row in rows]))
        return tree(session, known, rows)

    method._tree = spy
    steps = list(method.generate(session))
    return session, list(zip(seen, steps, strict=True))


def test_a_guess_sees_the_first_row_up_to_its_column_and_its_own_column_above():
    method, made = Lookahead(LookaheadParams(ngram=4, window=3)), []

    def tree(ids, parents):
        made.append((list(ids), parents))
        return SimpleNamespace(ids=ids)

    session = SimpleNamespace(tree=tree)
    grams = [(10, 11, 12), (20, 21, 22)]
    _, newest = method._tree(session, grams, [[1, 2], [3, 4, 5], [6, 7, 8]])
    ids, parents = made[-1]
    assert ids == [10, 11, 12, 20, 21, 22, 1, 2, 3, 4, 5, 6, 7, 8]
    assert newest == [11, 12, 13]  # 6, 7 and 8
    mask, depths = build_tree_mask(parents, torch.device("cpu"))
    sees = {
        token: {([0, *ids])[at] for at in row.nonzero()[:, 0].tolist()} - {0, token}
        for token, row in zip(ids, mask[1:], strict=True)
    }
    assert sees == {
        10: set(), 11: {10}, 12: {10, 11}, 20: set(), 21: {20}, 22: {20, 21},
        1: set(), 2: {1}, 3: set(), 4: {1}, 5: {1, 2}, 6: {3}, 7: {1, 4}, 8: {1, 2, 5},
    }  # fmt: skip
    places = dict(zip(ids, depths[1:].tolist(), strict=True))
    assert [places[token] for token in (1, 2, 3, 4, 5, 6, 7, 8)] == [1, 2, 1, 2, 3, 2, 3, 4]


@pytest.mark.smoke
def test_the_window_has_its_size_after_as_many_steps_as_it_has_further_rows():
    _, steps = watched(LookaheadParams(ngram=5, window=4, guesses=2))
    sizes = [[len(row) for row in rows] for (_, rows), _ in steps]
    assert sizes[:8] == [[6], [5, 6], [4, 5, 5], *[[3, 4, 4, 4]] * 5]
    assert not any(known for (known, _), _ in steps[:4])


def test_the_pool_learns_the_true_continuation_and_it_is_accepted():
    params = LookaheadParams(ngram=4, window=5, guesses=3)
    session, steps = watched(params, budget=100)
    text = list(session.tokens())
    at, full = 4, 0
    for number, ((known, _), step) in enumerate(steps):
        at += len(step.outcome.committed)
        if number > 12 and at + 6 < len(text):
            root = text[at - len(step.outcome.committed)]
            due = [(root + ahead) % 7 for ahead in (1, 2, 3)]
            assert known[-1] == due
            # Three drafted tokens stand, and the target's own follows: four, where the authors'
            # greedy loop commits three.
            full += len(step.outcome.committed) == 4
    assert full > 3


def test_the_pool_keeps_the_newest_n_grams_of_a_token_without_duplicates():
    _, steps = watched(LookaheadParams(ngram=3, window=6, guesses=2), budget=60)
    known = [grams for (grams, _), _ in steps]
    assert max(map(len, known)) == 2
    assert all(len({tuple(gram) for gram in grams}) == len(grams) for grams in known)


def test_nothing_is_guessed_beyond_the_budget():
    session, steps = watched(LookaheadParams(ngram=5, window=7, guesses=7), budget=20)
    position = 1
    for (known, rows), step in steps:
        room = 20 - position - 1
        assert all(len(gram) <= room for gram in known)
        depth = max((len(rows[-1]) - 1 + len(rows) - 1), 0) if rows and rows[-1] else 0
        assert depth <= max(room, 0)
        position += len(step.outcome.committed)
    assert position == len(session.output()) == 20
