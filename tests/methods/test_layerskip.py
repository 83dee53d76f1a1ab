"""Tests of LayerSkip: the layers that its forwards run, and its acceptance rate."""

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
    """Return (first layer, end layer, rows) of each forward of a step."""
    return [(*forward.layers, forward.n_tokens) for forward in step.forwards]


def test_a_step_runs_the_first_layers_once_per_token_and_the_others_once(targets):
    """A step runs K * E + L layers, because verification continues draft rows after layer E."""
    target = targets["embedded-exit"]
    _, steps = run(target, some_ids(12, target.vocab_size), exit=3, length=4)
    for step in steps[1:-2]:
        *drafting, last, rest = layers_run(step)
        assert drafting == [(0, 3, 1)] * 4
        assert (last, rest) == ((0, 3, 1), (3, LAYERS, 5))
        assert sum(high - low for low, high, _ in layers_run(step)) == 4 * 3 + LAYERS


def test_an_exit_after_all_layers_has_every_draft_accepted(targets):
    target = targets["embedded-7m"]
    _, steps = run(target, some_ids(12, target.vocab_size), exit=LAYERS, length=3)
    assert [len(step.outcome.path) for step in steps[:-1]] == [3] * (len(steps) - 1)


def test_early_exit_training_raises_the_acceptance_rate(targets):
    """The exit is after half of the layers. Without the training, few drafts are accepted."""
    share = {}
    for name, target in targets.items():
        accepted = drafted = 0
        for n in (8, 12, 20):
            _, steps = run(target, some_ids(n, target.vocab_size), exit=4, length=3, n=24)
            accepted += sum(len(step.outcome.path) for step in steps)
            drafted += sum(step.draft.nodes for step in steps)
        share[name] = accepted / drafted
    assert share["embedded-exit"] > 1.5 * share["embedded-7m"]


def test_an_exit_beyond_the_last_layer_is_refused(targets):
    with pytest.raises(MethodFault, match="has no layers 0 to 9: it has 8"):
        run(targets["embedded-7m"], [5, 6], exit=9)
