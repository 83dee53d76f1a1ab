"""Shapes of models, without weights: the entries of shapes.yaml, and what follows from them."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from specbench_cli.config.problems import did_you_mean, listed, shown
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.files import cache_folder
from specbench_cli.tasks.source import made_once

HERE = Path(__file__).parent

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""transformers' module of a family."""


class Shape(BaseModel):
    """An entry; the fields are explained at the top of shapes.yaml. Sizes are in numbers, not in
    bytes; `vocab` is the width of the logits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["llama", "qwen2", "mixtral", "qwen3_moe"] = "llama"
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    mlp: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(0, ge=0)
    vocab: int = Field(ge=1)
    tied: bool = False
    positions: int = Field(ge=1)
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    experts: int = Field(1, ge=1)
    chosen: int = Field(1, ge=1)
    source: str = Field(pattern="^(https://|made$)")

    @model_validator(mode="after")
    def _can_be(self) -> Shape:
        if self.heads % self.kv_heads or self.chosen > self.experts:
            raise ValueError(
                "heads come in groups, and a token goes through experts that there are"
            )
        if (self.experts > 1) != (self.family in ("mixtral", "qwen3_moe")):
            raise ValueError(f"{self.family} with {self.experts} experts")
        return self

    @property
    def width(self) -> int:
        """Numbers of one head's query."""
        return self.head_dim or self.hidden // self.heads

    @property
    def attention(self) -> int:
        """Numbers of a layer's attention, with its norms and biases."""
        queries, rows = self.heads * self.width, self.kv_heads * self.width
        matrices = 2 * self.hidden * queries + 2 * self.hidden * rows
        biases = queries + 2 * rows if self.family == "qwen2" else 0
        norms = self.hidden + (2 * self.width if self.family == "qwen3_moe" else 0)
        return matrices + biases + norms

    @property
    def expert(self) -> int:
        """Numbers of one expert of a layer: of its MLP, where it is no mixture."""
        return 3 * self.hidden * self.mlp

    @property
    def router(self) -> int:
        """Numbers of a layer that choose experts, and of the norm before its MLP."""
        return self.hidden + (self.hidden * self.experts if self.experts > 1 else 0)

    @property
    def output(self) -> int:
        """Numbers of the output matrix and of the norm before it."""
        return self.vocab * self.hidden + self.hidden

    @property
    def row(self) -> int:
        """Numbers that a token leaves in the state: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.width

    @property
    def parameters(self) -> int:
        """All numbers, a tied matrix once."""
        layer = self.attention + self.router + self.experts * self.expert
        embedding = 0 if self.tied else self.vocab * self.hidden
        return self.layers * layer + self.output + embedding

    def config(self) -> dict[str, Any]:
        """transformers' config.json of such a model; no id ends a text."""
        said: dict[str, Any] = {
            "architectures": [CLASSES[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.width,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if self.family == "mixtral":
            said |= {"num_local_experts": self.experts, "num_experts_per_tok": self.chosen}
            said["sliding_window"] = None
        if self.family == "qwen3_moe":
            said |= {"num_experts": self.experts, "num_experts_per_tok": self.chosen}
            said |= {"moe_intermediate_size": self.mlp, "norm_topk_prob": True}
        return said


PREFIX = "shape:"
"""What a shape's name begins with where a model's is asked for."""
TOKENIZER = HERE / "embedded" / "embedded-7m"
"""Whose tokenizer shapes read prompts with: ours, which every vocabulary here has room for."""


def folder_of(name: str) -> Path:
    """A folder of the cache with a shape's config.json and a tokenizer, and no weights.

    Raises:
        UsageError: there is no shape of that name.
        EnvironmentFault: it cannot be written.
    """
    config = {**shape(name).config(), "specbench": {"shape": name}}
    text = json.dumps(config, indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TOKENIZER / file, folder / file)

    try:
        return made_once(cache_folder() / "shapes" / f"{name}-{digest}", write)
    except OSError as error:
        raise EnvironmentFault(
            f"the shape {name} cannot be written to {cache_folder()}: {error.strerror or error}",
            "set SPECBENCH_CACHE to a folder that can be written",
        ) from error


@cache
def shapes() -> dict[str, Shape]:
    """The entries, by name, in the file's order."""
    entries = yaml.safe_load((HERE / "shapes.yaml").read_text(encoding="utf-8"))
    return {name: Shape.model_validate(entry) for name, entry in entries.items()}


def shape(name: str) -> Shape:
    """An entry.

    Raises:
        UsageError: there is none of that name.
    """
    known = shapes()
    if name not in known:
        raise UsageError(
            f"unknown shape {shown(repr(name))}{did_you_mean(name, known)}",
            f"known: {listed(known)}",
        )
    return known[name]


def pair(text: str) -> dict[str, str]:
    """The names of a target and its draft, by role: `llama-2-70b+7b`, `llama-2-70b+llama-68m`, or
    a target alone.

    Raises:
        UsageError: one that is not known.
    """
    target, plus, draft = text.partition("+")
    shape(target)
    if not plus:
        return {"target": target}
    sibling = f"{target.rpartition('-')[0]}-{draft}"
    draft = sibling if draft not in shapes() and sibling in shapes() else draft
    shape(draft)
    return {"target": target, "draft": draft}
