"""Shapes and training schedules of the embedded models, and functions to build and store a model.

All are Llama models. Weights are stored in fp16. A training that uses a finished model therefore
loads the stored fp16 weights, not the fp32 weights that were trained.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from recipes.embedded.tokenizer import MAX_POSITIONS, VOCAB_SIZE
from specbench_cli import files
from specbench_cli.engine.models.checkpoint import disable_progress_bars
from specbench_cli.training.corpus import SPECIAL_TOKENS
from specbench_cli.training.loop import Schedule, StagePlan


@dataclass(frozen=True, kw_only=True)
class Recipe(Schedule):
    """Shape and training schedule of one model. The head size is `hidden` / `heads`."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    vocabulary: int = VOCAB_SIZE

    def config(self) -> LlamaConfig:
        """Return the configuration of the model for transformers."""
        end, _, _, begin, pad = range(len(SPECIAL_TOKENS))
        return LlamaConfig(
            vocab_size=self.vocabulary,
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


# Updates on 2,048 tokens reach a lower loss than updates on 4,096, for the same total number of
# tokens. Nearly all chats fit in 256 tokens, where attention on a CPU is cheapest. The last fifth
# of the training uses sequences of 1,024 tokens.
BASE = Recipe(
    name="embedded-7m-base",
    hidden=256,
    layers=8,
    heads=4,
    mlp=704,
    stages=(StagePlan(4800, 8, 256),),
    peak_lr=3e-3,
    horizon=6000,
)
# A second training cycle with a lower learning rate. It mostly uses the task families that the
# model learned worst in the first cycle (HARD). In its first stage, wordings reserved for
# evaluation ("open") are left out. Otherwise the model would associate a wording with one half of
# the lexicons. The second stage contains them again.
TARGET = replace(
    BASE,
    name="embedded-7m",
    stages=(StagePlan(2800, 8, 256, data="open"), StagePlan(1900, 2, 1024, data="hard")),
    peak_lr=1.5e-3,
    horizon=None,
)
HARD = (
    *("translation", "math_reasoning", "rag", "summarization") * 2,
    *("translation", "math_reasoning", "rag", "multi_turn") * 2,
    "qa",
)
"""Task families of the second cycle, in their order of use. Slowly learned families occur more
often: facts are learned first, sums and retrieval last."""
DRAFT = Recipe(
    name="embedded-1m",
    hidden=128,
    layers=2,
    heads=4,
    mlp=352,
    stages=(
        StagePlan(600, 16, 256),
        StagePlan(240, 16, 256, "target", "replies"),
        StagePlan(210, 4, 1024, "target"),
    ),
    peak_lr=5e-3,
)
EXIT = replace(
    TARGET,
    name="embedded-exit",
    stages=(StagePlan(640, 8, 256, "exits"), StagePlan(160, 2, 1024, "exits")),
    peak_lr=1e-3,
)
FOREIGN = replace(
    DRAFT,
    name="embedded-xv",
    stages=(
        StagePlan(560, 16, 256),
        StagePlan(200, 16, 256, data="replies"),
        StagePlan(190, 4, 1024),
    ),
    vocabulary=2048,
)


def build(recipe: Recipe, seed: int, device: torch.device) -> LlamaForCausalLM:
    """Return a model with random fp32 weights, in training mode."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(recipe.config())
    nn.Module.to(model, device)  # the `to` of transformers has no type annotations
    model.train()
    return model


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the files that `from_pretrained` needs: fp16 weights, configs and tokenizer.

    Tied weights are stored once.
    """
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    nn.Module.half(stored)
    disable_progress_bars()
    with files.staging_folder(folder, overwrite=None) as staging:
        stored.save_pretrained(staging)
        tokenizer.save_pretrained(staging, save_jinja_files=False)
