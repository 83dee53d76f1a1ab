"""Tests of Hidden Transfer: its pseudo states, computed with the layers of transformers instead."""

from __future__ import annotations

import pytest
import torch

from methods.hidden_transfer.head import TransferMaps
from methods.hidden_transfer.method import HiddenTransfer
from specbench_cli.audit.cases import Case
from specbench_cli.audit.checks.bounds import check_bounds
from specbench_cli.audit.models.table import make_table_pair
from specbench_cli.audit.subject import AuditSubject
from specbench_cli.engine import look_ahead
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault
from specbench_cli.training.heads.build import TorchTarget
from specbench_cli.training.heads.losses import run_target, unroll


def head_with_random_maps(target, **sizes):
    head = TransferMaps(target, **sizes)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        head.moves.copy_(torch.randn(head.moves.shape, generator=generator) / 8)
    return head.ready()


@pytest.fixture(scope="module")
def head(family):
    return head_with_random_maps(family.decoders["target"])


@pytest.fixture
def session(family, head):
    space = Workspace({"target": family.decoders["target"]}, 96, load_artifact=lambda _: head)
    return Session(
        space, Request("tiny", 0, family.prompts[7], StopRule(frozenset(), 20)), Sampling()
    )


def by_transformers(module, head, ids):
    """Compute the logits of a text's last row and of the pseudo states after it, without cache."""
    body, n, k = module.model, len(ids), head.sizes["levels"]
    rows = body.embed_tokens(torch.tensor([ids]))
    causal = torch.ones(n + k, n + k, dtype=torch.bool).tril()[None, None]
    for at, layer in enumerate(body.layers):
        if at == head.layer:
            last = rows[:, -1]
            pseudo_states = [last + last @ move.T for move in head.moves]
            rows = torch.cat((rows, torch.stack(pseudo_states, 1)), 1)
        length = rows.shape[1]
        rotary = body.rotary_emb(rows, torch.arange(length)[None])
        rows = layer(rows, attention_mask=causal[..., :length, :length], position_embeddings=rotary)
    return module.lm_head(body.norm(rows))[0, n - 1 :]


def test_a_step_of_the_target_is_the_plain_one_and_every_node_foresees_what_its_path_does(
    family, head, session
):
    method = HiddenTransfer(HiddenTransfer.Params(nodes=6))
    method.start(session)
    session.prefill()
    prompt = list(family.prompts[7])
    expected = by_transformers(family.modules["target"], head, prompt)
    torch.testing.assert_close(method.ahead.latest_logits(), expected[1:], rtol=1e-4, atol=1e-4)
    for _ in range(3):
        text = list(session.tokens())
        draft = method.propose(session, 3)
        rows = session.score(draft)
        ahead_logits = method.ahead._logits
        assert ahead_logits.shape == (7, 3, 96)
        for node in range(-1, draft.nodes):
            path = []
            at = node
            while at >= 0:
                path.insert(0, int(draft.tokens[at]))
                at = draft.parents[at]
            expected = by_transformers(family.modules["target"], head, text + path)
            torch.testing.assert_close(rows[node + 1], expected[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ahead_logits[node + 1], expected[1:], rtol=1e-4, atol=1e-4)
        outcome = session.commit(session.verify(draft, rows))
        last = [-1, *outcome.path][len(outcome.committed) - 1]
        assert method.ahead.latest_logits().equal(ahead_logits[last + 1])
        n = len(session.tokens()) - 1  # the cache keeps no pseudo state
        assert {session.state.length(0, layer) for layer in range(2)} == {n}
        target, fresh = family.decoders["target"], family.decoders["target"].new_state(n)
        target.forward(Tokens(torch.tensor([session.tokens()[:-1]])), fresh)
        for layer in range(2):
            ours, theirs = (state.keys(layer)[:, :, :n] for state in (session.state, fresh))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_training_computes_the_logits_of_decoding(family, head):
    module, ids = family.modules["target"], list(family.prompts[9])
    training_head = head_with_random_maps(TorchTarget(module))
    with torch.no_grad():
        text = torch.tensor([ids])
        read = run_target(module, text, training_head.captured_layers)
        slots = torch.tensor([[2, len(ids) - 3]])
        steps = list(unroll(training_head, module, text, read, slots, 5))
        assert len(steps) == 3
        for place, slot in enumerate(slots[0].tolist()):
            expected = by_transformers(module, head, ids[: slot + 1])
            ahead_logits = torch.stack([step.logits[0, place] for step in steps])
            torch.testing.assert_close(ahead_logits, expected[1:], rtol=1e-4, atol=1e-4)


def test_maps_are_k_square_matrices_and_start_as_the_identity(family):
    target = family.decoders["target"]
    head = TransferMaps.random({"target": target})
    assert sum(each.numel() for each in head.parameters()) == 3 * target.hidden_size**2
    rows = torch.randn(2, target.hidden_size)
    assert head(rows).equal(rows[:, None].expand(-1, 3, -1))
    with pytest.raises(MethodFault, match="target has no layer 2: it has 2"):
        TransferMaps(target, layer=2)


@pytest.mark.parametrize("fault", ["sight", "place"])
def test_the_audit_finds_wrong_masks_and_positions_of_pseudo_states(monkeypatch, fault):
    right = look_ahead.append_branches

    def wrong(mask, positions, k):
        sight, places = right(mask, positions, k)
        if fault == "place":
            places[len(mask) :] += 1
        else:
            sight[len(mask) :, 0] = False
        return sight, places

    monkeypatch.setattr(look_ahead, "append_branches", wrong)
    subject = AuditSubject("hidden-transfer", HiddenTransfer, (HiddenTransfer.Params(),))
    twin, *_ = check_bounds(subject)
    assert not twin.passed


def test_batches_and_targets_without_partial_forwards_are_refused(family, head):
    space = Workspace({"target": family.decoders["target"]}, 96, load_artifact=lambda _: head)
    requests = [
        Request(f"tiny/{at}", 0, family.prompts[at], StopRule(frozenset(), 4)) for at in (0, 1)
    ]
    with pytest.raises(MethodFault, match="does not support batches"):
        list(HiddenTransfer().generate_batch(Batch(space, requests, Sampling())))
    case = Case("near", make_table_pair("near"), Sampling(), recurrent=frozenset({"target"}))
    with pytest.raises(MethodFault, match="does not support `LookAhead` heads"):
        HiddenTransfer().start(case.open())
