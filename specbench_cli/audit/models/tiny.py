"""Tiny random Llamas, to test attention, positions, KV caches and packed weights.

Table models cannot test these. The reference is a transformers module with the same weights, which
decodes without a KV cache.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from specbench_cli.audit.models.observed_session import (
    ObservedPeerSession,
    ObservedSession,
    nominal_cost,
)
from specbench_cli.engine.learning import Memory
from specbench_cli.engine.models.decoder import Decoder
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Noise, Sampling
from specbench_cli.engine.workspace import Workspace

VOCAB = 96
MAX_TOKENS = 32
PROMPTS = 16
CAPACITY = 160
MIN_MARGIN = 1e-3
"""Minimum logit margin at which the order of summation cannot change the token."""

CPU = torch.device("cpu")


class PlainOutput(NamedTuple):
    """Output of decoding without speculation.

    It contains the token ids, and the smallest difference between the logits of the best and the
    second-best token.
    """

    ids: list[int]
    margin: float


@dataclass(frozen=True, eq=False)
class TinyModels:
    """A target, its draft (the target with noise on its weights), and prompts.

    Attributes:
        workspace: workspace with both models.
        oracle: module of the target in transformers.
        prompts: token ids of each prompt.
    """

    workspace: Workspace
    oracle: Any
    prompts: Sequence[tuple[int, ...]]

    def open(
        self,
        prompt: int,
        sampling: Sampling,
        *,
        budget: int = MAX_TOKENS,
        eos: Sequence[int] = (),
        memory: Memory | None = None,
        peer: bool = False,
    ) -> ObservedSession:
        """Return a session on a prompt.

        Args:
            peer: True if the method decodes with the program of another project.
        """
        stop = StopRule(frozenset(eos), budget)
        request = Request(f"tiny/{prompt}", 0, self.prompts[prompt], stop)
        kind = ObservedPeerSession if peer else ObservedSession
        return kind(self.workspace, request, sampling, memory=memory)

    def outputs_without_ties(self, sampling: Sampling) -> Iterator[tuple[int, list[int]]]:
        """Yield (prompt number, output of plain decoding) for prompts without near-ties between
        tokens.
        """
        for prompt, plain in enumerate(_decode_plainly(self, sampling)):
            if plain.margin > MIN_MARGIN:
                yield prompt, plain.ids


@cache
def create_tiny_models() -> TinyModels:
    """Create the models. Later calls return the same object."""
    target = _random_llama()
    decoders: dict[str, Decoder] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role, module in {"target": target, "draft": _add_noise(target)}.items():
            place = Path(folder, role)
            module.config.save_pretrained(place)
            save_file(module.state_dict(), place / "model.safetensors", {"format": "pt"})
            decoders[role] = load_decoder(place, name=role, device=CPU)
        modules: Mapping[str, Any] = {role: get_module(d) for role, d in decoders.items()}
    generator = torch.Generator().manual_seed(4)
    prompts = []
    for i in range(PROMPTS):
        ids = torch.randint(VOCAB, (2 + i,), generator=generator).tolist()
        prompts.append((*ids, *ids[: len(ids) // 3]))
    workspace = Workspace(
        decoders,
        CAPACITY,
        modules=lambda role: modules[role],
        load_artifact=lambda wanted: wanted.kind.random(decoders),
        costs=nominal_cost,
    )
    return TinyModels(workspace, target, prompts)


def _random_llama() -> Any:
    """Return a random Llama whose logits spread like those of a trained model.

    Attention outputs are small, so the last token mostly determines the next, and texts repeat.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        module = LlamaForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    gains = {"embed_tokens": math.sqrt(config.hidden_size), "o_proj": 0.3, "lm_head": 3.0}
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            gain = gains.get(name.split(".")[-2], 1.5)
            weight.normal_(0, gain / math.sqrt(weight.shape[1]), generator=generator)
    return module


def _add_noise(module: Any, share: float = 0.1) -> Any:
    """Return a copy of a module with noise on each weight matrix.

    Args:
        share: standard deviation of the noise, relative to that of the matrix.
    """
    copied = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(2)
    for weight in copied.parameters():
        if weight.dim() == 2:
            noise = torch.empty_like(weight).normal_(generator=generator)
            weight.add_(noise, alpha=share * float(weight.std()))
    return copied


@cache
def _decode_plainly(models: TinyModels, sampling: Sampling) -> list[PlainOutput]:
    """Decode all prompts with transformers' module and warpers, without specbench's code.

    All prompts form one batch with padding on the right, which causal attention ignores.
    """
    prompts = range(len(models.prompts))
    lengths = torch.tensor([len(ids) for ids in models.prompts])
    text = torch.zeros(len(prompts), int(lengths.max()) + MAX_TOKENS, dtype=torch.int64)
    for i, ids in enumerate(models.prompts):
        text[i, : len(ids)] = torch.tensor(ids)
    noise = [Noise(sampling.seed, f"tiny/{i}", 0, VOCAB, CPU) for i in prompts]
    margins = torch.full((len(prompts),), math.inf)
    for position in range(MAX_TOKENS):
        ends = lengths + position
        scores = models.oracle(text[:, : int(ends.max())]).logits[prompts, ends - 1]
        if sampling.rule == "coupled":
            for warper in warpers(sampling):
                scores = warper(None, scores)
            scores = scores.log_softmax(-1) + torch.cat([n.rows(position, 1) for n in noise])
        best, second = scores.topk(2).values.unbind(-1)
        margins = margins.minimum(best - second)
        text[prompts, ends] = scores.argmax(-1)
    return [
        PlainOutput(ids[n : n + MAX_TOKENS].tolist(), float(margin))
        for ids, n, margin in zip(text, lengths, margins, strict=True)
    ]


def warpers(sampling: Sampling) -> Iterator[Any]:
    """Yield the logits warpers of transformers, in the order in which transformers applies them."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    yield TemperatureLogitsWarper(sampling.temperature)
    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1.0:
        yield TopPLogitsWarper(sampling.top_p)
