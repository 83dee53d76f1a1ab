"""Imposed acceptance: models compute, but their logits are replaced to give an acceptance rate."""

import pytest
import torch

from specbench_cli import registry
from specbench_cli.audit.models.tiny import create_tiny_models
from specbench_cli.engine.imposed_acceptance import NUM_CHOICES, impose_acceptance
from specbench_cli.engine.models.fused import FusedDecoder
from specbench_cli.engine.models.load import FusedCopy
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.errors import MethodFault

BUDGET = 64


def models(chance):
    """Return copies of the tiny pair with this acceptance rate."""
    tiny = create_tiny_models().workspace
    decoders = {role: FusedCopy(tiny.decoders[role]) for role in ("target", "draft")}
    ids = min(each.vocab_size for each in decoders.values())
    for each in decoders.values():
        impose_acceptance(each, chance, ids)
    return decoders


def decode_prompts(decoders, name, budget=BUDGET, prompts=4, **params):
    """Decode some prompts with a method, and return the outputs and the counters of its steps."""
    workspace = Workspace(decoders, 128 + budget)
    method = registry.build(name, params)
    outputs, tested, accepted = [], 0, 0
    for at in range(prompts):
        prompt = tuple(3 + (at * 7 + i) % 20 for i in range(5 + at))
        request = Request(f"made/{at}", 1, prompt, StopRule(frozenset(), budget))
        session = Session(workspace, request, Sampling())
        for step in method.generate(session):
            tested += step.outcome.tested
            accepted += len(step.outcome.path)
        outputs.append(session.output())
    return outputs, tested, accepted


def test_every_lossless_method_gives_vanillas_tokens():
    decoders = models(0.6)
    expected, _, _ = decode_prompts(decoders, "vanilla")
    assert len({tuple(each) for each in expected}) == 4
    for name, params in (("sps", {}), ("sps-tree", {"widths": (3, 2, 1)}), ("pld", {})):
        assert decode_prompts(decoders, name, **params)[0] == expected


@pytest.mark.parametrize("chance", [0.0, 0.4, 0.8, 1.0])
def test_chain_tokens_are_accepted_at_the_imposed_rate(chance):
    _, tested, accepted = decode_prompts(models(chance), "sps", prompts=8, length=4)
    error = 4 * (chance * (1 - chance) / tested) ** 0.5
    assert accepted / tested == pytest.approx(chance, abs=error + 1e-9)


def test_siblings_of_a_tree_share_the_remaining_probability():
    decoders = models(0.5)
    _, chain, one = decode_prompts(decoders, "sps-tree", prompts=8, widths=(1,))
    _, wide, two = decode_prompts(decoders, "sps-tree", prompts=8, widths=(2,))
    assert one / chain == pytest.approx(0.5, abs=4 * 0.5 / chain**0.5)
    assert two / wide == pytest.approx(0.75, abs=4 * 0.5 / wide**0.5)


def test_the_decoder_keeps_its_class_computations_and_counters():
    decoder = models(0.5)["target"]
    plain = FusedCopy(create_tiny_models().workspace.decoders["target"])
    assert isinstance(decoder, FusedDecoder)
    assert type(decoder).__name__ == "FusedCopy"
    ids = torch.tensor([[5, 6, 7]])
    out, own = (each.forward(Tokens(ids), each.new_state(8)) for each in (decoder, plain))
    assert torch.equal(out.hidden, own.hidden)
    assert not torch.equal(out.logits, own.logits)
    assert decoder.ran == 1


def test_logits_are_equal_alone_in_a_block_and_in_a_batch():
    decoder = models(0.5)["draft"]
    ids = torch.tensor([[5, 6, 7, 8]])
    block = decoder.forward(Tokens(ids), decoder.new_state(8), logits_at="all").logits
    state = decoder.new_state(8)
    for at in range(4):
        row = decoder.forward(Tokens(ids[:, at : at + 1]), state).logits
        assert torch.equal(
            row[0, 0].topk(NUM_CHOICES).indices, block[0, at].topk(NUM_CHOICES).indices
        )
    some = decoder.forward(Tokens(ids), decoder.new_state(8), logits_at=torch.tensor([1, 3])).logits
    assert torch.equal(
        some[0].topk(NUM_CHOICES).indices, block[0, [1, 3]].topk(NUM_CHOICES).indices
    )


def test_continuing_from_rows_without_tokens_is_refused():
    decoder = models(0.5)["target"]
    with pytest.raises(MethodFault, match="--acceptance sets logits by the tokens"):
        decoder.exit_logits(torch.zeros(1, decoder.hidden_size))
    with pytest.raises(ValueError, match="is too small: imposed acceptance"):
        impose_acceptance(decoder, 0.5, NUM_CHOICES)
