"""Tests of models whose output matrices have different numbers of rows.

The rows may differ between the models, or from the tokenizer's tokens. No draft may contain an id
that the target lacks, and the output must be the target's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specbench_cli.audit.models.observed_session import nominal_cost
from specbench_cli.engine.drafting.vocabulary import Translation, Vocabulary
from specbench_cli.engine.learning import learn
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.registry import build, built_in_methods, load

CPU = torch.device("cpu")
BUDGET, CAPACITY = 10, 96
RULES = {
    "greedy": Sampling(),
    "coupled": Sampling(temperature=1.0, rule="coupled"),
    "rejection": Sampling(temperature=1.0, rule="rejection"),
}
DRAFTING = sorted(
    name
    for name, entry in built_in_methods().items()
    if not entry.peer and "draft" in load(name).needs and name != "draft-alone"
)
"""Methods that use a draft model."""

ANY_VOCABULARY = ("omnidraft", "tli", "uag")
"""Methods whose draft model may have another tokenizer."""


@cache
def module(rows: int, draft: bool) -> LlamaForCausalLM:
    """Return a tiny Llama with `rows` rows in its embedding and output matrices.

    Models of all sizes share their first rows. A draft model is the target with some noise.
    """
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for seed, (name, weight) in enumerate(sorted(model.named_parameters())):
        if weight.dim() == 2:
            whole = (512, 16) if weight.shape[0] == rows else weight.shape
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(whole, generator=generator)
            if draft:
                drawn += 0.1 * torch.randn(whole, generator=generator)
            weight.copy_(drawn[: len(weight)] * (1.0 if "embed" in name else 0.6))
    return model


LoadModel = Callable[..., Decoder]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> LoadModel:
    """Return a function that loads a model by role and number of rows."""
    folder = tmp_path_factory.mktemp("sizes")

    def make(name: str, rows: int, **how: Any) -> Decoder:
        folder_of_size = folder / f"{name}-{rows}"
        if not folder_of_size.is_dir():
            module(rows, name == "draft").save_pretrained(folder_of_size)
        return load_decoder(folder_of_size, name=name, **how)

    return make


def decode_output(
    workspace: Workspace, method: str, sampling: Sampling, prompt: tuple[int, ...]
) -> list:
    """Return the output of a method. The method `osd` then learns from it."""
    request = Request("sizes/0", 0, prompt, StopRule(frozenset(), BUDGET))
    session, built_method = Session(workspace, request, sampling), build(method, {})
    for _ in built_method.generate(session):
        pass
    if method == "osd":
        learn(built_method, session)
    return list(session.output())


PAIRS = [(96, 64), (64, 96), (96, 95)]


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("method", DRAFTING)
def test_models_of_one_tokenizer_may_have_different_padding(
    decoder: LoadModel, method: str, target: int, draft: int, rule: str
) -> None:
    pair = {"target": decoder("target", target), "draft": decoder("draft", draft)}
    workspace = Workspace(
        pair, CAPACITY, costs=nominal_cost, load_artifact=lambda wanted: wanted.kind.random(pair)
    )
    prompt = (3, target - 1, 5, 40, target - 2, 3, 5)  # with ids that a smaller draft model lacks
    found = decode_output(workspace, method, RULES[rule], prompt)
    assert len(found) == BUDGET
    assert all(0 <= token < target for token in found)
    if load(method)(load(method).Params()).guarantee(rule) == "exact_tokens":
        assert found == decode_output(workspace, "vanilla", RULES[rule], prompt)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_hosted_draft_accepts_ids_that_it_lacks(
    decoder: LoadModel, target: int, draft: int
) -> None:
    pair = {"target": decoder("target", target), "draft": decoder("draft", draft, host_module=True)}
    workspace = Workspace(pair, CAPACITY)
    prompt = (3, target - 1, 5, 40, target - 2, 3, 5)
    found = [decode_output(workspace, name, RULES["greedy"], prompt) for name in ("vanilla", "sps")]
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_draft_that_decodes_alone_only_emits_ids_of_the_target(
    decoder: LoadModel, target: int, draft: int, rule: str
) -> None:
    pair = {"target": decoder("target", target), "draft": decoder("draft", draft)}
    workspace = Workspace(pair, CAPACITY).decode_alone("draft")
    found = decode_output(workspace, "draft-alone", RULES[rule], (3, target - 1, 5, 40))
    assert len(found) == BUDGET
    assert max(found) < min(target, draft)


# ---- two tokenizers, with more or fewer tokens than the models have rows ------------------------

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = len(BYTES) + 6


@cache
def tokenizer(reverse: bool) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a start, an end and four tokens that were added last."""
    pieces = ["<s>", "</s>", *(reversed(BYTES) if reverse else BYTES)]
    model = models.BPE({piece: at for at, piece in enumerate(pieces)}, [])
    byte_tokenizer = Tokenizer(model)
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_tokenizer.decoder = decoders.ByteLevel()
    byte_tokenizer.add_special_tokens(["<s>", "</s>"])
    byte_tokenizer.add_tokens([AddedToken(f"<m{at}>", normalized=False) for at in range(4)])
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer, bos_token="<s>", eos_token="</s>"
    )


SIZES = (TOKENS - 3, TOKENS, TOKENS + 9)
"""Numbers of rows: fewer than tokens, as many as tokens, and more than tokens (padding)."""


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("target", "draft"), [*product(SIZES, SIZES)])
@pytest.mark.parametrize("method", ANY_VOCABULARY)
def test_tokenizers_may_have_more_or_fewer_tokens_than_models_have_rows(
    decoder: LoadModel, method: str, target: int, draft: int, rule: str
) -> None:
    pair = {"target": decoder("target", target), "draft": decoder("draft", draft)}
    vocabularies = (
        Vocabulary.from_tokenizer(tokenizer(side)).with_size(n)
        for side, n in ((0, target), (1, draft))
    )
    pair["draft"].translation = Translation(*vocabularies, CPU)
    workspace = Workspace(pair, CAPACITY, tokenizer=tokenizer(False))
    prompt = (*tokenizer(False).encode("a <b> c")[:7], target - 1, 40)
    found = decode_output(workspace, method, RULES[rule], prompt)
    assert len(found) == BUDGET
    assert all(0 <= token < target for token in found)
    if rule != "rejection":
        assert found == decode_output(workspace, "vanilla", RULES[rule], prompt)


@pytest.mark.parametrize("size", SIZES)
def test_a_resized_vocabulary_has_only_ids_of_the_model(size: int) -> None:
    vocabulary = Vocabulary.from_tokenizer(tokenizer(False)).with_size(size)
    assert len(vocabulary.pieces) == size
    text = b"x <m0><m3> y"
    ids = vocabulary.encode(text)
    assert max(ids) < size
    assert vocabulary.decode(ids) == text
