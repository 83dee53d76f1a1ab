"""Tests of the methods that run `generate` of transformers.

Their steps must match what `generate` did, and the decisions of specbench's own methods.
"""

import functools
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from methods.dflash.head import DFlash
from methods.hf import (
    HfAssisted,
    HfAssistedParams,
    HfDFlash,
    HfEarlyExit,
    HfPromptLookup,
    HfPromptLookupParams,
    HfVanilla,
    dflash_module,
)
from methods.pld import Pld, PldParams
from methods.sps import Sps, SpsParams
from methods.vanilla import Vanilla
from specbench_cli.api import Session, Step
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.peer_session import PeerSession
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.types import ModelOutput, Tokens
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace

VOCAB = 48
EOS = 1
SPEED = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "times" / "speed.py"))

GREEDY = Sampling()
COUPLED = Sampling(rule="coupled", temperature=0.8)
CUT = Sampling(rule="coupled", temperature=0.9, top_k=20, top_p=0.8, seed=5)
STOP = StopRule(frozenset({EOS}), 30)
NO_EOS = StopRule(frozenset(), 30)
REJECTION = Sampling(rule="rejection", temperature=0.8, top_k=30, top_p=0.95)


class History:
    """A state without a cache: all ids of one sequence."""

    nbytes = 0
    by_row = True

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.ids: list[int] = []
        self.kept = 0

    def length(self, seq: int = 0, layer: int = 0) -> int:
        return len(self.ids)

    def position(self, seq: int = 0) -> int:
        return len(self.ids)

    def commit(self, seq: int, path: Sequence[int]) -> None:
        self.ids = self.ids[: self.kept] + [self.ids[self.kept + row] for row in path]
        self.kept = len(self.ids)

    def rollback(self, seq: int, n: int, layers: range | None = None) -> None:
        self.ids = self.ids[:n]
        self.kept = min(self.kept, n)


class Recomputing(Decoder):
    """A decoder without a cache. It shares only the weights with transformers' decoding."""

    def __init__(self, name: str, module: LlamaForCausalLM) -> None:
        self.name = name
        self.module = module
        self.vocab_size = module.config.vocab_size
        self.n_layers = module.config.num_hidden_layers
        self.device = module.device
        self.dtype = module.dtype

    def new_state(self, capacity: int, n_seqs: int = 1) -> History:
        return History()

    @torch.inference_mode()
    def forward(self, x, state, *, logits_at="last", **_) -> ModelOutput:
        assert isinstance(x, Tokens)
        state.ids.extend(x.ids[0].tolist())
        logits = self.module(torch.tensor([state.ids])).logits
        rows = 1 if logits_at == "last" else x.ids.shape[1]
        return ModelOutput(logits=logits[:, -rows:], hidden=logits)


class SizedTarget(Recomputing):
    """A target with the attributes that a random head needs."""

    def __init__(self, module: LlamaForCausalLM) -> None:
        super().__init__("target", module)
        self.hidden_size = module.config.hidden_size


def tiny(seed: int, vocab: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny(0)


@pytest.fixture(scope="module")
def draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the target with noisy weights: many of its predictions match the target's."""
    model = tiny(0)
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return model


Decoded = tuple[Session, list[Step]]


@pytest.fixture(scope="module")
def run(target, draft):
    """Return a function that decodes one prompt and returns the session and its steps."""

    def decode(method, sampling=GREEDY, *, prompt=0, stop=STOP, modules=None) -> Decoded:
        modules = modules or {"target": target, "draft": draft}
        workspace = Workspace(
            decoders={name: Recomputing(name, module) for name, module in modules.items()},
            capacity=64,
            modules=modules.__getitem__,
            load_artifact=lambda wanted: wanted.kind.random(
                {"target": SizedTarget(modules["target"])}
            ),
        )
        ids = torch.randint(2, VOCAB, (12,), generator=torch.Generator().manual_seed(prompt))
        request = Request(f"test/{prompt}", 0, tuple(ids.tolist()), stop)
        session = PeerSession(workspace, request, sampling)
        return session, list(method.generate(session))

    return decode


@pytest.fixture(scope="module")
def vanilla(run):
    """Return a function that computes the output of specbench's own `vanilla`."""

    @functools.cache
    def decode(sampling=GREEDY, prompt=0, stop=STOP) -> list[int]:
        return output(run(Vanilla(), sampling, prompt=prompt, stop=stop))

    return decode


def output(result: Decoded) -> list[int]:
    return list(result[0].output())


PEERS = [HfVanilla(), HfAssisted(), HfPromptLookup(), HfEarlyExit(), HfDFlash()]
PEER_IDS = [peer.name for peer in PEERS]
RULES = {"greedy": GREEDY, "coupled": COUPLED, "cut": CUT}


@pytest.mark.parametrize("peer", PEERS, ids=PEER_IDS)
@pytest.mark.parametrize("sampling", [*RULES.values(), REJECTION], ids=[*RULES, "rejection"])
def test_output_is_the_prefill_token_and_the_committed_tokens(run, peer, sampling):
    for prompt in range(2):
        session, steps = run(peer, sampling, prompt=prompt)
        committed = [token for step in steps for token in step.outcome.committed]
        assert session.finish is not None
        assert len(session.harness.text.origin) == len(session.output())
        assert committed == list(session.output())[1:]
        for step in steps:
            n, m = len(step.outcome.path), step.draft.levels
            assert n <= step.outcome.tested <= m
            assert step.draft.tokens[:n].tolist() == list(step.outcome.committed[:n])


@pytest.mark.parametrize("peer", PEERS, ids=PEER_IDS)
def test_output_equals_that_of_generate(run, target, draft, peer):
    session, _ = run(peer)
    extra = {
        "hf:vanilla": {},
        "hf:assisted": {"assistant_model": draft},
        "hf:prompt-lookup": {"prompt_lookup_num_tokens": 10},
        "hf:early-exit": {"assistant_early_exit": 1},
        "hf:dflash": {
            "assistant_model": dflash_module(DFlash.random({"target": SizedTarget(target)})),
            "speculation_type": "dflash",
        },
    }
    prompt = torch.tensor([session.requests[0].ids])
    ids = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=30,
        eos_token_id=EOS,
        pad_token_id=EOS,
        do_sample=False,
        **extra[peer.name],
    )
    assert ids[0, prompt.shape[1] :].tolist() == list(session.output())


@pytest.mark.parametrize("peer", PEERS, ids=PEER_IDS)
@pytest.mark.parametrize("sampling", RULES.values(), ids=list(RULES))
def test_peers_emit_the_tokens_of_vanilla(run, vanilla, peer, sampling):
    for prompt in range(3):
        assert output(run(peer, sampling, prompt=prompt)) == vanilla(sampling, prompt)


@pytest.mark.parametrize(
    ("ours", "peer"),
    [
        (Sps(SpsParams(length=5)), HfAssisted(HfAssistedParams(length=5))),
        (Sps(SpsParams(length=2)), HfAssisted(HfAssistedParams(length=2))),
        (
            Pld(PldParams(rule="transformers", ngram=2, length=10)),
            HfPromptLookup(HfPromptLookupParams(ngram=2, length=10)),
        ),
    ],
    ids=["sps5", "sps2", "pld"],
)
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_steps_agree_after_both_methods_rejected_a_token(run, ours, peer, sampling):
    agreements = 0
    for prompt in range(5):
        a, b = run(ours, sampling, prompt=prompt), run(peer, sampling, prompt=prompt)
        assert output(a) == output(b)
        trails = [SPEED["StepTrail"].from_steps(*each) for each in (a, b)]
        if isinstance(ours, Pld):
            # transformers' lookup drafts past the budget. Its last step is cut: it has no bonus
            # token.
            trails = [replace(trail, steps=trail.steps[:-1]) for trail in trails]
        verdict = SPEED["steps_agree"](*trails)
        assert verdict is not False
        agreements += verdict is True
    assert agreements >= 2


def test_assistant_shares_the_noise(run, target):
    """If draft model and target are equal and share the noise, every draft token is accepted."""
    same = {"target": target, "draft": target}
    _, steps = run(HfAssisted(), COUPLED, modules=same, stop=NO_EOS)
    assert len(steps) > 3
    assert all(len(step.outcome.path) == step.draft.levels for step in steps)


def test_constant_length_is_drafted(run):
    stop = NO_EOS
    _, steps = run(HfAssisted(HfAssistedParams(length=3)), stop=stop)
    levels = [step.draft.levels for step in steps]
    assert set(levels[1:-2]) == {3}


def test_generation_settings_of_the_checkpoint_are_ignored(run, target, draft):
    clean = {peer.name: run(peer) for peer in PEERS}
    settings = GenerationConfig(
        do_sample=True,
        temperature=3.0,
        repetition_penalty=9.0,
        suppress_tokens=list(range(2, 40)),
        min_length=200,
        max_length=3,
        eos_token_id=[5, 6],
        num_assistant_tokens=1,
        num_assistant_tokens_schedule="heuristic",
    )
    before = target.generation_config, draft.generation_config
    target.generation_config, draft.generation_config = settings, settings
    try:
        for peer in PEERS:
            leaky, fresh = run(peer), clean[peer.name]
            assert output(leaky) == output(fresh)
            assert [s.outcome for s in leaky[1]] == [s.outcome for s in fresh[1]]
            assert target.generation_config is settings
    finally:
        target.generation_config, draft.generation_config = before
    assert "_get_candidate_generator" not in vars(target)
    assert settings.num_assistant_tokens == 1


def test_rejection_is_seeded_and_leaves_the_global_generator_alone(run):
    before = torch.random.get_rng_state()
    first = output(run(HfAssisted(), REJECTION))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(3)
    assert output(run(HfAssisted(), REJECTION)) == first
    other = Sampling(rule="rejection", temperature=0.8, seed=1)
    assert output(run(HfAssisted(), other)) != first


@pytest.mark.parametrize("peer", PEERS, ids=PEER_IDS)
def test_output_ends_with_the_first_eos(run, vanilla, peer):
    full = vanilla(stop=NO_EOS)
    eos = full[15]
    session, _ = run(peer, stop=StopRule(frozenset({eos, VOCAB - 1}), 30))
    assert session.finish == "eos"
    assert list(session.output()) == full[: full.index(eos) + 1]


@pytest.mark.parametrize("peer", PEERS, ids=PEER_IDS)
def test_stop_strings_end_the_generate_call(run, vanilla, target, peer):
    full = vanilla(stop=NO_EOS)
    string = f" {full[9]} {full[10]} "
    stop = StopRule(frozenset(), 30, (string,), lambda ids: f" {' '.join(map(str, ids))} ")
    forwards = []
    hook = target.register_forward_hook(lambda *_: forwards.append(1))
    session, _ = run(peer, stop=stop)
    hook.remove()
    assert session.finish == "stop"
    assert list(session.output()) == vanilla(stop=stop)
    assert len(session.output()) < 30
    if peer.name != "hf:early-exit":  # it drafts with the target module itself
        assert len(forwards) <= len(session.output())


@pytest.mark.parametrize("peer", PEERS, ids=PEER_IDS)
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_small_budgets_are_met_exactly(run, peer, budget):
    for sampling in (GREEDY, COUPLED, REJECTION):
        session, steps = run(peer, sampling, stop=StopRule(frozenset(), budget))
        assert session.finish == "length"
        assert 1 + sum(len(step.outcome.committed) for step in steps) == budget


@pytest.mark.parametrize("peer", PEERS, ids=PEER_IDS)
def test_nothing_is_logged(run, peer, capfd):
    run(peer, COUPLED)
    run(peer, REJECTION)
    assert capfd.readouterr() == ("", "")
