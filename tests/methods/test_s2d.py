"""S2D: which layers draft a token, what they have read, and one draft for two targets."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from methods.s2d import S2d, S2dParams
from methods.sps import Sps, SpsParams
from methods.vanilla import Vanilla
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

PROMPT = tuple(range(5, 17))
LAYERS = 4
SURE = 0.04
"""A threshold that every exit sometimes reaches, because a random model is never very certain."""
GREEDY = Sampling()


@pytest.fixture(scope="module")
def folders(tiny_checkpoint):
    """Two targets, and a deeper draft that is near to the first."""
    deep = {"num_hidden_layers": LAYERS}
    return {
        "target": tiny_checkpoint("llama", **deep),
        "other": tiny_checkpoint("llama", seed=1),
        "draft": tiny_checkpoint("llama", noise=0.3, **deep),
    }


@pytest.fixture(scope="module")
def decoders(folders):
    return {role: load_decoder(path, name=role) for role, path in folders.items()}


def opened(decoders, target="target", sampling=GREEDY, budget=24):
    models = {"target": decoders[target], "draft": decoders["draft"]}
    request = Request("r/0", 0, PROMPT, StopRule(frozenset(), budget))
    return Session(Workspace(models, 64), request, sampling)


def drafted(steps):
    """The layers of each draft forward, and how many rows it read."""
    return [(f.layers, f.n_tokens) for step in steps for f in step.forwards if f.role == "draft"]


def test_threshold_0_uses_only_the_first_layers_and_one_above_1_drafts_as_sps(decoders):
    cheap = list(S2d(S2dParams(length=3, threshold=0)).generate(opened(decoders)))
    assert {layers for layers, _ in drafted(cheap)} == {(0, 2)}
    whole = list(S2d(S2dParams(length=3, threshold=2)).generate(opened(decoders)))
    plain = list(Sps(SpsParams(length=3)).generate(opened(decoders)))
    assert [step.draft.tokens.tolist() for step in whole] == [
        step.draft.tokens.tolist() for step in plain
    ]
    assert {layers for layers, _ in drafted(whole)} == {(0, 2), (2, 3), (3, 4)}


def test_a_token_is_drawn_from_the_softmax_of_the_confident_exit(decoders, folders):
    """q is that of transformers' module cut behind the exit; at every threshold some exit's."""
    method = S2d(S2dParams(length=3, threshold=SURE))
    session, seen = opened(decoders, sampling=Sampling("rejection", 1.0)), set()
    module = AutoModelForCausalLM.from_pretrained(folders["draft"], dtype=torch.float32)
    for step in method.generate(session):
        text = session.tokens()[: len(session.tokens()) - len(step.outcome.committed)]
        ids = torch.tensor([[*text, *step.draft.tokens.tolist()]])
        with torch.no_grad():
            rows = module(ids, output_hidden_states=True).hidden_states
            normed = [module.model.norm(rows[end]) for end in (2, 3)]
            exits = [module.lm_head(each)[0] for each in (*normed, rows[LAYERS])]
            distributions = [each.softmax(-1)[len(text) - 1 : -1] for each in exits]
        for at, q in enumerate(step.draft.q if step.draft.nodes else ()):
            sure = [distribution[at].max() >= SURE for distribution in distributions[:-1]]
            due = sure.index(True) if any(sure) else 2
            seen.add(due)
            assert torch.allclose(q.float(), distributions[due][at], atol=1e-4)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("threshold", [0.0, SURE, 2.0])
def test_every_layer_holds_the_rows_of_a_whole_forward_as_far_as_it_has_read(decoders, threshold):
    method, session = S2d(S2dParams(length=4, threshold=threshold)), opened(decoders)
    for _ in method.generate(session):
        text, state = session.tokens(), method.state
        fresh = decoders["draft"].new_state(64)
        decoders["draft"].forward(Tokens(torch.tensor([text])), fresh, logits_at=None)
        held = [state.length(0, layer) for layer in range(LAYERS)]
        assert held == sorted(held, reverse=True) and held[0] <= len(text) - 1
        assert [len(rows) for rows in method.waiting] == [held[0] - held[2], held[2] - held[3]]
        for layer, n in enumerate(held):
            for ours, due in ((state.keys, fresh.keys), (state.values, fresh.values)):
                assert torch.allclose(ours(layer)[:, :, :n], due(layer)[:, :, :n], atol=1e-5)


@pytest.mark.parametrize("target", ["target", "other"])
def test_one_draft_serves_two_targets_with_unchanged_outputs(decoders, target):
    alone = opened(decoders, target)
    list(Vanilla(Vanilla.Params()).generate(alone))
    for threshold in (0.0, SURE, 2.0):
        session = opened(decoders, target)
        list(S2d(S2dParams(threshold=threshold)).generate(session))
        assert session.tokens() == alone.tokens()


def test_exits_that_a_draft_lacks_are_ignored(decoders):
    method, session = S2d(S2dParams(exits=(1, 9))), opened(decoders)
    method.start(session)
    assert method.spans == [(0, 1), (1, LAYERS)]
