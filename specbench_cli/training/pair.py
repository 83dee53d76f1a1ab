"""The first embedded pair: `embedded-7m` (target, 256x8) and `embedded-1m` (its draft, 128x2).

Both are Llama models with one tokenizer and one corpus. The target learns by cross-entropy. The
draft does too at first, then follows the target's own distribution (KL divergence), because what
it is for is to agree with the target (DistillSpec, Zhou et al., ICLR 2024, arXiv:2310.08461).
Weights are stored in fp16, and the upcast of those is the model.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from specbench_cli.training import loop
from specbench_cli.training.corpus import Batch, Chat, Corpus, tokenizer_texts
from specbench_cli.training.tokenizer import (
    MAX_POSITIONS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    train_tokenizer,
)

Loss = Callable[[Batch], Tensor]
Report = Callable[[str, loop.Point], None]

WORK = "training"
"""Folder inside the output folder with tokenizer, checkpoints and loss curves."""


@dataclass(frozen=True)
class StagePlan:
    """A stretch of training towards the `text` (cross-entropy) or the finished `target` (KL)."""

    steps: int
    sequences: int
    length: int
    towards: Literal["text", "target"] = "text"


@dataclass(frozen=True)
class Recipe:
    """Shape and schedule of one model (the head size is `hidden` / `heads`)."""

    name: str
    hidden: int
    layers: int
    heads: int
    mlp: int
    stages: tuple[StagePlan, ...]
    peak_lr: float
    warmup_steps: int = 100

    def config(self) -> LlamaConfig:
        """The model in transformers' terms."""
        end, _, _, begin, pad = range(len(SPECIAL_TOKENS))
        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            intermediate_size=self.mlp,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=begin,
            eos_token_id=end,
            pad_token_id=pad,
        )

    def scaled(self, factor: float) -> "Recipe":
        """The same recipe with its steps and warm-up multiplied, at least one of each."""
        return replace(
            self,
            stages=tuple(replace(s, steps=max(1, round(s.steps * factor))) for s in self.stages),
            warmup_steps=max(1, round(self.warmup_steps * factor)),
        )

    def smoke(self) -> "Recipe":
        """Two small steps of every stage."""
        stages = tuple(replace(s, steps=2, sequences=2, length=32) for s in self.stages)
        return replace(self, stages=stages, warmup_steps=1)


# 4,096 tokens an update. Most chats fit in 256 tokens; the last fifth reads 1,024 at a time.
TARGET = Recipe(
    "embedded-7m",
    hidden=256,
    layers=8,
    heads=4,
    mlp=704,
    stages=(StagePlan(1800, 16, 256), StagePlan(450, 4, 1024)),
    peak_lr=3e-3,
)
DRAFT = Recipe(
    "embedded-1m",
    hidden=128,
    layers=2,
    heads=4,
    mlp=352,
    stages=(
        StagePlan(700, 16, 256),
        StagePlan(300, 16, 256, "target"),
        StagePlan(150, 4, 1024, "target"),
    ),
    peak_lr=5e-3,
)


def train_pair(
    out: Path,
    recipes: Sequence[Recipe],
    gsm8k: Sequence[Chat],
    *,
    seed: int,
    device: torch.device,
    compiled: bool = True,
    report: Report = lambda _name, _point: None,
) -> dict[str, loop.Result]:
    """Train target and draft and export both into `out`, continuing what `out` already holds.

    Args:
        recipes: of the target and then of its draft.
        gsm8k: the problems that make up 30% of the corpus; empty = generated text alone.
        compiled: use torch.compile where this machine can.
        report: called after every step with the model's name.

    Returns:
        Each model's loss curve and seconds, by name.
    """
    work = out / WORK
    tokenizer = make_tokenizer(work / "tokenizer", gsm8k, seed)
    results: dict[str, loop.Result] = {}
    target: LlamaForCausalLM | None = None
    for recipe in recipes:
        model = build(recipe, seed, device)
        stages = _stages(recipe, model, target, compiled)
        optimization = loop.Optimization(
            recipe.peak_lr, end_lr=0.05 * recipe.peak_lr, warmup_steps=recipe.warmup_steps
        )
        with _deterministic(device):
            results[recipe.name] = loop.train(
                model,
                Corpus(tokenizer, gsm8k, seed),
                stages,
                optimization,
                work / recipe.name,
                progress=partial(report, recipe.name),
            )
        export(model, tokenizer, out / recipe.name)
        target = model.requires_grad_(False).train(False)
    return results


def make_tokenizer(folder: Path, gsm8k: Sequence[Chat], seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer kept in `folder`, trained first where there is none."""
    if not (folder / "tokenizer.json").is_file():
        train_tokenizer(tokenizer_texts(gsm8k, seed)).save_pretrained(
            folder, save_jinja_files=False
        )
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def build(recipe: Recipe, seed: int, device: torch.device) -> LlamaForCausalLM:
    """A freshly initialised model in fp32, ready to train."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(recipe.config())
    nn.Module.to(model, device)  # transformers' own `to` is not typed
    model.train()
    return model


def text_loss(model: LlamaForCausalLM) -> Loss:
    """Weighted cross-entropy of the text in nats a token."""

    def loss(batch: Batch) -> Tensor:
        logits = _logits(model, batch.inputs)
        each = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return _mean(each, batch.weights.flatten())

    return _on_device(loss, model.device)


def target_loss(model: LlamaForCausalLM, target: LlamaForCausalLM) -> Loss:
    """Weighted KL divergence KL(target || model) in nats a token."""

    def loss(batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = F.log_softmax(_logits(target, batch.inputs), -1)
        got = F.log_softmax(_logits(model, batch.inputs), -1)
        each = F.kl_div(got, wanted, reduction="none", log_target=True).sum(-1)
        return _mean(each, batch.weights)

    return _on_device(loss, model.device)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write what from_pretrained needs: fp16 weights (tied ones once), configs and tokenizer."""
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    nn.Module.half(stored)
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On a CPU, make two runs equal: compiled embedding gradients else add up in any order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or device.type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _stages(
    recipe: Recipe, model: LlamaForCausalLM, target: LlamaForCausalLM | None, compiled: bool
) -> list[loop.Stage]:
    losses = {"text": text_loss(model)}
    if target is not None:
        losses["target"] = target_loss(model, target)
    if compiled and (shutil.which("g++") or shutil.which("clang++")):
        losses = {towards: torch.compile(loss, dynamic=False) for towards, loss in losses.items()}
    return [loop.Stage(s.steps, s.sequences, s.length, losses[s.towards]) for s in recipe.stages]


def _logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """fp32 logits [sequences, length, vocabulary]; the forward runs in bf16.

    On a CPU with AMX that is 2.4 times as fast at the same loss.
    """
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _mean(each: Tensor, weights: Tensor) -> Tensor:
    return (each * weights).sum() / weights.sum()


def _on_device(loss: Loss, device: torch.device) -> Loss:
    return lambda batch: loss(Batch(*(part.to(device) for part in batch)))
