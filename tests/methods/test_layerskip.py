"""LayerSkip: what its forwards cost, and what acceptance they get."""

import pytest
import torch

from methods.layerskip import LayerSkip, LayerSkipParams
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault
from specbench_cli.models.resolve import resolve

LAYERS, GREEDY = 8, Sampling()


@pytest.fixture(scope="module")
def targets():
    names = ("embedded-7m", "embedded-exit")
    return {name: load_decoder(resolve(name).path, name="target") for name in names}


def run(target, ids, sampling=GREEDY, n=16, method=None, **params):
    workspace = Workspace({"target": target}, capacity=len(ids) + n + 8)
    request = Request("some/0", 0, tuple(ids), StopRule(frozenset(), n))
    session = Session(workspace, request, sampling)
    steps = list((method or LayerSkip(LayerSkipParams(**params))).generate(session))
    return session.output(), steps


def some_ids(n, vocab):
    return torch.randint(5, vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist()


def layers_run(step):
    """(first, last, rows) of each of a step's forwards."""
    return [(*forward.layers, forward.n_tokens) for forward in step.forwards]


def test_a_round_runs_the_first_layers_once_a_token_and_all_others_once(targets):
    """K E + L layers where nothing is cut: the drafted rows go on where they left layer E."""
    target = targets["embedded-exit"]
    _, steps = run(target, some_ids(12, target.vocab_size), exit=3, length=4)
    for step in steps[1:-2]:
        *drafting, last, rest = layers_run(step)
        assert drafting == [(0, 3, 1)] * 4
        assert (last, rest) == ((0, 3, 1), (3, LAYERS, 5))
        assert sum(high - low for low, high, _ in layers_run(step)) == 4 * 3 + LAYERS


def test_all_layers_as_exit_have_every_draft_accepted(targets):
    target = targets["embedded-7m"]
    _, steps = run(target, some_ids(12, target.vocab_size), exit=LAYERS, length=3)
    assert [len(step.outcome.path) for step in steps[:-1]] == [3] * (len(steps) - 1)


def test_a_target_trained_to_exit_early_has_more_accepted(targets):
    """At an exit behind half of the layers; without the training hardly anything stands."""
    share = {}
    for name, target in targets.items():
        stood = drafted = 0
        for n in (8, 12, 20):
            _, steps = run(target, some_ids(n, target.vocab_size), exit=4, length=3, n=24)
            stood += sum(len(step.outcome.path) for step in steps)
            drafted += sum(step.draft.nodes for step in steps)
        share[name] = stood / drafted
    assert share["embedded-exit"] > 1.5 * share["embedded-7m"]


def test_an_exit_that_is_not_there_is_refused(targets):
    with pytest.raises(MethodFault, match="has no layers 0 to 9: it has 8"):
        run(targets["embedded-7m"], [5, 6], exit=9)
