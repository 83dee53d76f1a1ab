"""Tiny random Llama models for the methods' tests, and transformers' modules as the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import NamedTuple

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specbench_cli.audit.models.observed_session import nominal_cost
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.models.load import load_decoder, restrict_output
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.workspace import Workspace

CPU = torch.device("cpu")
VOCAB = 96
LONGEST = 40
CAPACITY = 96
CLEAR = 1e-3
"""A choice with a larger margin does not depend on the order of summation."""


@dataclass
class Family:
    """Models by name: transformers' module and our decoder, of the same weights.

    "target"; "near", the target with some noise on its weights; "far", a smaller stranger; "cut",
    the near one whose output says half of the ids; "shuffled", the target whose output says all of
    them, in another order.
    """

    modules: Mapping[str, LlamaForCausalLM]
    decoders: Mapping[str, Decoder]
    prompts: Sequence[tuple[int, ...]] = field(default_factory=list)


class Plain(NamedTuple):
    """Output of plain decoding: the ids, and the smallest margin of a choice over the runner-up."""

    ids: list[int]
    margin: float


def random_llama(seed: int, hidden: int, layers: int) -> LlamaForCausalLM:
    """A Llama whose logits spread like a trained model's, by about 3.

    Attention writes little, so that the last token says most about the next and texts repeat.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    module = LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    gains = {"embed_tokens": math.sqrt(hidden), "o_proj": 0.3, "lm_head": 3.0}
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            gain = gains.get(name.split(".")[-2], 1.5)
            weight.normal_(0, gain / math.sqrt(weight.shape[1]), generator=generator)
    return module


def with_noise(module: LlamaForCausalLM, seed: int, share: float) -> LlamaForCausalLM:
    """Return a copy with noise on each matrix, as a share of the matrix's standard deviation."""
    copy = LlamaForCausalLM(module.config).eval().requires_grad_(False)
    copy.load_state_dict(module.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for weight in copy.parameters():
        if weight.dim() == 2:
            noise = torch.empty_like(weight).normal_(generator=generator)
            weight += share * weight.std() * noise
    return copy


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    pass


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    target = random_llama(seed=1, hidden=32, layers=2)
    modules = {
        "target": target,
        "near": with_noise(target, seed=2, share=0.1),
        "far": random_llama(seed=3, hidden=16, layers=1),
    }
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
    modules["cut"] = restrict_output(with_noise(target, seed=2, share=0.1), order[: VOCAB // 2])
    modules["shuffled"] = restrict_output(with_noise(target, seed=2, share=0.0), order)
    folder = tmp_path_factory.mktemp("family")
    decoders = {}
    for name, module in modules.items():
        module.save_pretrained(folder / name)
        decoders[name] = load_decoder(folder / name, name=name, device=CPU, dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    prompts = []
    for i in range(40):
        ids = torch.randint(VOCAB, (1 + i % 20,), generator=generator).tolist()
        prompts.append((*ids, *ids[: len(ids) // 3]))
    return Family(modules, decoders, prompts)


@pytest.fixture(scope="session")
def target(family: Family) -> Decoder:
    return family.decoders["target"]


@pytest.fixture(scope="session")
def plain(family: Family) -> Callable[[int, Sampling], Plain]:
    """Plain decoding by transformers' module and warpers in a loop: no cache, none of our code.

    `plain(i, sampling)` continues prompt i by 40 tokens. All prompts advance together, padded on
    the right, where causal attention does not look.
    """
    prompts = range(len(family.prompts))
    lengths = torch.tensor([len(ids) for ids in family.prompts])

    @cache
    def decode(sampling: Sampling) -> list[Plain]:
        text = torch.zeros(len(prompts), int(lengths.max()) + LONGEST, dtype=torch.int64)
        for i, ids in enumerate(family.prompts):
            text[i, : len(ids)] = torch.tensor(ids)
        sources = [Noise(sampling.seed, f"tiny/{i}", 0, VOCAB, CPU) for i in prompts]
        margins = torch.full((len(prompts),), math.inf)
        for position in range(LONGEST):
            ends = lengths + position
            logits = family.modules["target"](text[:, : int(ends.max())]).logits
            scores = logits[prompts, ends - 1]
            if sampling.rule == "coupled":
                for warper in warpers(sampling):
                    scores = warper(None, scores)
                noise = torch.cat([source.rows(position, 1) for source in sources])
                scores = scores.log_softmax(-1) + noise
            best, second = scores.topk(2).values.unbind(-1)
            margins = margins.minimum(best - second)
            text[prompts, ends] = scores.argmax(-1)
        return [
            Plain(ids[n : n + LONGEST].tolist(), float(margin))
            for ids, n, margin in zip(text, lengths, margins, strict=True)
        ]

    return lambda prompt, sampling: decode(sampling)[prompt]


def warpers(sampling: Sampling) -> Iterator[LogitsProcessor]:
    """Yield transformers' warpers, in its order."""
    yield TemperatureLogitsWarper(sampling.temperature)
    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1.0:
        yield TopPLogitsWarper(sampling.top_p)


@pytest.fixture(scope="session")
def clear_prompts(
    family: Family, plain: Callable[[int, Sampling], Plain]
) -> Callable[[Sampling, int], list[int]]:
    """Return the first n prompts whose plain output has no near-tie, so that rounding cannot change
    it."""

    def choose(sampling: Sampling, n: int) -> list[int]:
        clear = (i for i in range(len(family.prompts)) if plain(i, sampling).margin > CLEAR)
        found = list(islice(clear, n))
        assert len(found) == n
        return found

    return choose


class RecordingSession(Session):
    """Session that records each state it makes, with its model."""

    def new_state(self, decoder: Metered, slack: int = 0) -> State:
        state = super().new_state(decoder, slack)
        self.__dict__.setdefault("held", []).append((decoder.decoder, state))
        return state


@pytest.fixture(scope="session")
def open_session(family: Family) -> Callable[..., RecordingSession]:
    """A session on prompt i; `draft` names a model of the family, or is one; `alone`: the role of
    the model that decodes by itself.

    Its workspace is its own, so that what a test sets there is for that test; the states and the
    trained modules in it are shared."""
    workspaces: dict[object, Workspace] = {}

    def make(
        prompt: int | tuple[int, ...],
        sampling: Sampling | None = None,
        *,
        draft: str | Decoder = "near",
        budget: int = LONGEST,
        eos: Sequence[int] = (),
        alone: str = "target",
        **rest: object,
    ) -> RecordingSession:
        if draft not in workspaces:
            model = family.decoders[draft] if isinstance(draft, str) else draft
            decoders = {"target": family.decoders["target"], "draft": model}
            workspaces[draft] = Workspace(
                decoders,
                CAPACITY,
                load_artifact=lambda wanted: wanted.kind.random(decoders),
                costs=nominal_cost,
            )
        ids = family.prompts[prompt] if isinstance(prompt, int) else prompt
        request = Request(f"tiny/{prompt}", 0, ids, StopRule(frozenset(eos), budget))
        workspace = replace(workspaces[draft].decode_alone(alone))
        return RecordingSession(workspace, request, sampling or Sampling(), **rest)

    return make


@pytest.fixture
def drafting(family: Family) -> Callable[..., Session]:
    """Start a method with a head on prompt i, and return its session before the first `propose`."""

    def make(method: Method, head: object, prompt: int = 0) -> Session:
        space = Workspace(
            {"target": family.decoders["target"]}, CAPACITY, load_artifact=lambda _: head
        )
        request = Request("tiny", 0, family.prompts[prompt], StopRule(frozenset(), 20))
        session = Session(space, request, Sampling())
        method.start(session)
        session.prefill()
        return session

    return make
