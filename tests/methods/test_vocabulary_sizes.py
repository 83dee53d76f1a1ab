"""Matrices with more or fewer rows than the other model has, or than the tokenizer has tokens:
nothing is drafted that the target cannot have, and the output is the target's own."""

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
"""Methods that read a draft model."""

ANY_VOCABULARY = ("omnidraft", "tli", "uag")
"""Methods whose draft model may have another tokenizer."""


@cache
def module(rows: int, draft: bool) -> LlamaForCausalLM:
    """A tiny Llama with so many rows; the first ones are the same whatever their number.

    A draft is the target with some noise. Its rows beyond those of a smaller model are the
    likeliest of all.
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
    made = LlamaForCausalLM(config).eval().requires_grad_(False)
    for seed, (name, weight) in enumerate(sorted(made.named_parameters())):
        if weight.dim() == 2:
            whole = (512, 16) if weight.shape[0] == rows else weight.shape
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(whole, generator=generator)
            if draft:
                drawn += 0.1 * torch.randn(whole, generator=generator)
            weight.copy_(drawn[: len(weight)] * (1.0 if "embed" in name else 0.6))
    return made


Made = Callable[..., Decoder]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that loads a model by role and number of rows."""
    folder = tmp_path_factory.mktemp("sizes")

    def make(name: str, rows: int, **how: Any) -> Decoder:
        held = folder / f"{name}-{rows}"
        if not held.is_dir():
            module(rows, name == "draft").save_pretrained(held)
        return load_decoder(held, name=name, **how)

    return make


def decoded(workspace: Workspace, method: str, sampling: Sampling, prompt: tuple[int, ...]) -> list:
    """Return the output of a method, which learns from it where it does."""
    request = Request("sizes/0", 0, prompt, StopRule(frozenset(), BUDGET))
    session, made = Session(workspace, request, sampling), build(method, {})
    for _ in made.generate(session):
        pass
    if method == "osd":
        learn(made, session)
    return list(session.output())


PAIRS = [(96, 64), (64, 96), (96, 95)]


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("method", DRAFTING)
def test_padding_of_one_tokenizer_may_differ(
    decoder: Made, method: str, target: int, draft: int, rule: str
) -> None:
    pair = {"target": decoder("target", target), "draft": decoder("draft", draft)}
    workspace = Workspace(
        pair, CAPACITY, costs=nominal_cost, load_artifact=lambda wanted: wanted.kind.random(pair)
    )
    prompt = (3, target - 1, 5, 40, target - 2, 3, 5)  # ids that a smaller draft does not have
    found = decoded(workspace, method, RULES[rule], prompt)
    assert len(found) == BUDGET
    assert all(0 <= token < target for token in found)
    if load(method)(load(method).Params()).guarantee(rule) == "exact_tokens":
        assert found == decoded(workspace, "vanilla", RULES[rule], prompt)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_hosted_draft_reads_ids_that_it_does_not_have(
    decoder: Made, target: int, draft: int
) -> None:
    pair = {"target": decoder("target", target), "draft": decoder("draft", draft, host_module=True)}
    workspace = Workspace(pair, CAPACITY)
    prompt = (3, target - 1, 5, 40, target - 2, 3, 5)
    found = [decoded(workspace, name, RULES["greedy"], prompt) for name in ("vanilla", "sps")]
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_draft_that_decodes_alone_only_emits_ids_of_the_target(
    decoder: Made, target: int, draft: int, rule: str
) -> None:
    pair = {"target": decoder("target", target), "draft": decoder("draft", draft)}
    workspace = Workspace(pair, CAPACITY).decode_alone("draft")
    found = decoded(workspace, "draft-alone", RULES[rule], (3, target - 1, 5, 40))
    assert len(found) == BUDGET
    assert max(found) < min(target, draft)


# ---- tokenizers of their own, with more or fewer tokens than the models have rows ---------------

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = len(BYTES) + 6


@cache
def tokenizer(reverse: bool) -> PreTrainedTokenizerFast:
    """Bytes, their pairs of the text, an end, and marks that were added last."""
    pieces = ["<s>", "</s>", *(reversed(BYTES) if reverse else BYTES)]
    model = models.BPE({piece: at for at, piece in enumerate(pieces)}, [])
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken(f"<m{at}>", normalized=False) for at in range(4)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


SIZES = (TOKENS - 3, TOKENS, TOKENS + 9)
"""Fewer rows than tokens (marks were added to the tokenizer alone), as many, and padding."""


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("target", "draft"), [*product(SIZES, SIZES)])
@pytest.mark.parametrize("method", ANY_VOCABULARY)
def test_tokenizers_may_have_more_or_fewer_tokens_than_models_have_rows(
    decoder: Made, method: str, target: int, draft: int, rule: str
) -> None:
    pair = {"target": decoder("target", target), "draft": decoder("draft", draft)}
    words = (
        Vocabulary.from_tokenizer(tokenizer(side)).with_size(n)
        for side, n in ((0, target), (1, draft))
    )
    pair["draft"].translation = Translation(*words, CPU)
    workspace = Workspace(pair, CAPACITY, tokenizer=tokenizer(False))
    prompt = (*tokenizer(False).encode("a <b> c")[:7], target - 1, 40)
    found = decoded(workspace, method, RULES[rule], prompt)
    assert len(found) == BUDGET
    assert all(0 <= token < target for token in found)
    if rule != "rejection":
        assert found == decoded(workspace, "vanilla", RULES[rule], prompt)


@pytest.mark.parametrize("size", SIZES)
def test_a_resized_vocabulary_has_only_ids_of_the_model(size: int) -> None:
    words = Vocabulary.from_tokenizer(tokenizer(False)).with_size(size)
    assert len(words.pieces) == size
    text = b"x <m0><m3> y"
    ids = words.encode(text)
    assert max(ids) < size
    assert words.decode(ids) == text
