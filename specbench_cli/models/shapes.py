"""Shapes of models without weights, from shapes.yaml, and sizes that are computed from a shape."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from specbench_cli.config.problems import did_you_mean, join_names, shorten
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.files import cache_folder
from specbench_cli.tasks.source import create_once

HERE = Path(__file__).parent

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Class of transformers by family."""


class ModelShape(BaseModel):
    """Entry of shapes.yaml. The top of shapes.yaml explains the fields.

    A size is a number of values, not of bytes. `vocab` is the width of the logits.
    """

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
    def _check_consistency(self) -> ModelShape:
        if self.heads % self.kv_heads or self.chosen > self.experts:
            raise ValueError("heads must be a multiple of kv_heads, and chosen at most experts")
        if (self.experts > 1) != (self.family in ("mixtral", "qwen3_moe")):
            raise ValueError(f"{self.family} with {self.experts} experts")
        return self

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of one layer's attention, with norms and biases."""
        queries, rows = self.heads * self.head_width, self.kv_heads * self.head_width
        matrices = 2 * self.hidden * queries + 2 * self.hidden * rows
        biases = queries + 2 * rows if self.family == "qwen2" else 0
        norms = self.hidden + (2 * self.head_width if self.family == "qwen3_moe" else 0)
        return matrices + biases + norms

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of one expert, or of one MLP in a dense model."""
        return 3 * self.hidden * self.mlp

    @property
    def router_parameters(self) -> int:
        """Number of parameters of one layer's router and of the norm before the MLP."""
        return self.hidden + (self.hidden * self.experts if self.experts > 1 else 0)

    @property
    def output_parameters(self) -> int:
        """Number of parameters of the output matrix and of the final norm."""
        return self.vocab * self.hidden + self.hidden

    @property
    def state_row_size(self) -> int:
        """Number of values per token in the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width

    @property
    def parameters(self) -> int:
        """Total number of parameters.

        An output matrix that is tied to the embedding counts only once.
        """
        layer = (
            self.attention_parameters
            + self.router_parameters
            + self.experts * self.expert_parameters
        )
        embedding = 0 if self.tied else self.vocab * self.hidden
        return self.layers * layer + self.output_parameters + embedding

    def config(self) -> dict[str, Any]:
        """Return transformers' config.json of the shape.

        It has no EOS id, so outputs have a fixed length.
        """
        config: dict[str, Any] = {
            "architectures": [CLASSES[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
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
            config |= {"num_local_experts": self.experts, "num_experts_per_tok": self.chosen}
            config["sliding_window"] = None
        if self.family == "qwen3_moe":
            config |= {"num_experts": self.experts, "num_experts_per_tok": self.chosen}
            config |= {"moe_intermediate_size": self.mlp, "norm_topk_prob": True}
        return config


SHAPE_PREFIX = "shape:"
"""Prefix of a shape's name where a model's name is expected."""
TOKENIZER = HERE / "embedded" / "embedded-7m"
"""Folder of the tokenizer of shapes. Its vocabulary is smaller than that of every shape."""


def create_shape_folder(name: str) -> Path:
    """Create a folder in the cache with a shape's config.json and a tokenizer, without weights.

    Raises:
        UsageError: the shape is unknown.
        EnvironmentFault: the folder cannot be written.
    """
    config = {**get_shape(name).config(), "specbench": {"shape": name}}
    text = json.dumps(config, indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TOKENIZER / file, folder / file)

    try:
        return create_once(cache_folder() / "shapes" / f"{name}-{digest}", write)
    except OSError as error:
        raise EnvironmentFault(
            f"the shape {name} cannot be written to {cache_folder()}: {error.strerror or error}",
            "set SPECBENCH_CACHE to a folder that can be written",
        ) from error


@cache
def load_shapes() -> dict[str, ModelShape]:
    """Return the entries of shapes.yaml in the order of the file. The key is the name."""
    entries = yaml.safe_load((HERE / "shapes.yaml").read_text(encoding="utf-8"))
    return {name: ModelShape.model_validate(entry) for name, entry in entries.items()}


def get_shape(name: str) -> ModelShape:
    """Return the entry of shapes.yaml with this name.

    Raises:
        UsageError: the shape is unknown.
    """
    known = load_shapes()
    if name not in known:
        raise UsageError(
            f"unknown shape {shorten(repr(name))}{did_you_mean(name, known)}",
            f"known: {join_names(known)}",
        )
    return known[name]


def parse_pair(text: str) -> dict[str, str]:
    """Parse a target shape with an optional draft shape, such as `llama-2-70b+7b` or `llama-2-70b`.

    Returns:
        Map from role ("target", "draft") to the name of a shape.

    Raises:
        UsageError: a shape is unknown.
    """
    target, plus, draft = text.partition("+")
    get_shape(target)
    if not plus:
        return {"target": target}
    sibling = f"{target.rpartition('-')[0]}-{draft}"
    draft = sibling if draft not in load_shapes() and sibling in load_shapes() else draft
    get_shape(draft)
    return {"target": target, "draft": draft}
