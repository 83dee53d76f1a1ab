"""Tests of SWIFT: the search for the sublayers to skip, their score, and the output."""

import sys
from itertools import combinations

import pytest
import torch

from methods.swift.method import Swift, SwiftParams
from methods.vanilla import Vanilla
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens, expand_skip
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from tests.methods.conftest import random_llama

GREEDY, PROMPT = Sampling(), (3, 14, 15, 9, 2, 6)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return a target with five layers, of which six sublayers may be skipped."""
    folder = tmp_path_factory.mktemp("five")
    random_llama(seed=8, hidden=32, layers=5).save_pretrained(folder)
    return load_decoder(folder, name="target")


def open_session(target, sampling=GREEDY, n=40, memory=None, prompt=PROMPT):
    request = Request("some/0", 0, prompt, StopRule(frozenset(), n))
    workspace = Workspace({"target": target}, capacity=len(prompt) + n + 8)
    return Session(workspace, request, sampling, memory=Memory() if memory is None else memory)


def run(target, sampling=GREEDY, n=40, memory=None, method=None, prompt=PROMPT, **params):
    session = open_session(target, sampling, n, memory, prompt)
    steps = list((method or Swift(SwiftParams(**params))).generate(session))
    return session, steps


def agreement(target, skip, text, first, n):
    """Return how often the target predicts the next token without the sublayers `skip`.

    Each prediction is computed from scratch. The whole target reads the text before `first`.
    """
    correct, skipped_parts = 0, expand_skip(frozenset(skip))
    for end in range(first + 1, first + n + 1):
        state = target.new_state(80)
        target.forward(Tokens(torch.tensor([text[:first]])), state, logits_at=None)
        part = torch.tensor([text[first:end]])
        out = target.forward(Tokens(part), state, skip=skipped_parts)
        correct += int(out.logits[0, -1].argmax()) == text[end]
    return correct / n


def test_the_score_equals_that_of_sequential_decoding(target):
    """The method scores all tokens in one forward, which attends to the prompt's cache rows
    only."""
    method = Swift(SwiftParams(window=12, skip=0.5))
    session, _ = run(target, method=method)
    text, sublayers = list(session.tokens()), method.search.items
    for chosen in ([], [0, 3], [1, 2, 5]):
        skip = [sublayers[at] for at in chosen]
        score = method._score_set(session, session.partial(skip=skip))
        assert score == pytest.approx(agreement(target, skip, text, len(PROMPT), 12))
    assert session.state.length() == len(text) - 1


def test_the_search_finds_the_best_set(target):
    """Three of six sublayers are skipped. All twenty sets are scored to know the best one."""
    memory = Memory()
    session, _ = run(
        target, n=60, memory=memory, window=12, skip=0.5, enough=1.0, patience=1000, depth=2
    )
    found = memory["found"]
    while len(found.tried) < 60:  # the same request again, so sets are scored on the same text
        run(target, n=60, memory=memory, window=12, skip=0.5, enough=1.0, patience=1000, depth=2)
    method = Swift(SwiftParams(window=12, skip=0.5))
    method.start(session2 := open_session(target, memory=memory))
    scores = {
        chosen: agreement(target, chosen, list(session.tokens()), len(PROMPT), 12)
        for chosen in combinations(method.search.items, 3)
    }
    assert scores[tuple(sorted(found.best))] == max(scores.values())
    for chosen, score, _ in found.tried:
        assert score == pytest.approx(scores[tuple(chosen)])
    assert session2.output() == []


def test_the_optimiser_proposes_the_best_set_once_it_knows_enough(target):
    """The score of a set is its share of the three wanted sublayers."""
    method = Swift(SwiftParams(skip=0.5))
    method.start(open_session(target))
    sublayers = method.search.items
    wanted = {sublayers[at] for at in (0, 2, 5)}
    method.search.tried = [
        (list(chosen), len(wanted & set(chosen)) / 3, False)
        for chosen in combinations(sublayers, 3)
        if set(chosen) != wanted
    ]
    assert set(method.search.suggest()) == wanted


def test_the_optimisers_library_is_loaded_before_the_first_step(target, monkeypatch):
    monkeypatch.delitem(sys.modules, "bayes_opt", raising=False)
    Swift(SwiftParams(skip=0.5)).start(open_session(target))
    assert "bayes_opt" in sys.modules


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling("coupled", 0.8, seed=3)], ids=lambda s: s.rule
)
def test_the_output_equals_that_of_vanilla_while_sets_change(target, sampling):
    plain, _ = run(target, sampling, method=Vanilla())
    memory = Memory()
    for every in (12, 13):
        session, _ = run(target, sampling, memory=memory, window=6, every=every, depth=3)
        assert session.output() == plain.output()
    tried = memory["found"].tried
    assert len(tried) > 8
    sizes = {len(set(chosen)) for chosen, *_ in tried}
    assert sizes == {int(0.45 * 6)}


def test_the_first_and_the_last_layer_are_never_skipped(target):
    method = Swift(SwiftParams(skip=0.0, depth=3, least=0.0))
    session, steps = run(target, method=method)
    assert {at for at, _ in method.search.items} == {1, 2, 3}
    assert [len(step.outcome.path) for step in steps[:-1]] == [3] * (len(steps) - 1)
    assert session.output() == run(target, method=Vanilla())[0].output()


@pytest.mark.parametrize(
    ("rule", "count"), [({"tries": 5}, 5), ({"patience": 1}, None), ({"enough": 0.0}, 0)]
)
def test_each_stopping_rule_ends_the_search(target, rule, count):
    memory = Memory()
    for _ in range(2):
        run(target, memory=memory, window=6, depth=2, **rule)
    tried = memory["found"].tried
    if count is None:
        assert [better for *_, better in tried].index(False) == len(tried) - 1
    else:
        assert len(tried) == count


def test_forwards_of_the_search_have_their_own_role_and_share(target):
    _, steps = run(target, window=6, depth=2)
    kinds = {f.role: f.share for step in steps for f in step.forwards}
    assert set(kinds) >= {"draft", "verify", "aux"}
    assert kinds["verify"] == 1.0
    assert kinds["draft"] < 1.0
    assert kinds["aux"] < 1.0
