"""A draft head of one fused layer, which embeds and speaks through its target."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from methods._heads.files import HeadFiles, HeadShape, read_head
from specbench_cli.api import (
    Artifact,
    Decoder,
    EnvironmentFault,
    Features,
    FusedStack,
    Head,
    Input,
    Layer,
    LayerReader,
    Scratch,
    layer_bytes,
)

RANDOM_HEAD_DIM = 8


class LayerHead(FusedStack, Head, Artifact):
    """One layer over `Features`: what enters it and what is read from it are its subclass's.

    Embedding and output matrix are the target's own, which cost no memory twice.

    Args:
        files: the head, as it was read or made.
        target: the decoder that it drafts for; the head computes on its device, in its dtype.

    Raises:
        EnvironmentFault: sizes that do not go with the target's.
    """

    first_norm: ClassVar[str | None] = "input_layernorm"
    """The norm of what attention reads, where the layer has one."""

    def __init__(self, files: HeadFiles, target: Decoder) -> None:
        shape, tensors = files.shape, files.tensors
        self._check(files, target)
        super().__init__(
            shape,
            _rotary(shape, files.rope),
            name=self.kind,
            device=target.device,
            dtype=target.dtype,
        )
        self.target = target
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        read = self._reader(shape, tensors)
        self.layer = read.layer("layer.", norm=self.first_norm)
        bias = read.get("fc.bias") if "fc.bias" in read else None
        self.fc = read.linear(read.get("fc.weight"), bias)
        self.weight_bytes = layer_bytes(self.layer) + self.fc.nbytes
        self._read_rest(read)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """The head in a folder, in whatever layout; see `Artifact.load`."""
        files, target = read_head(folder, cls.kind), decoders["target"]
        files.check_target(target)
        try:
            return cls(files, target)
        except KeyError as missing:
            raise EnvironmentFault(
                f"{files.source} has no {missing.args[0]}", "specbench list methods"
            ) from missing

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """A head with random weights, one narrow attention head; see `Artifact.random`."""
        target = decoders["target"]
        return cls(cls.random_files(target, seed), target)

    def _read_rest(self, read: LayerReader) -> None:
        """Read what a kind of head has beside its layer and `fc`; adds to `weight_bytes`."""

    @classmethod
    @abstractmethod
    def random_files(cls, target: Decoder, seed: int) -> HeadFiles:
        """What `random` is made of."""

    @classmethod
    def _check(cls, files: HeadFiles, target: Decoder) -> None:
        """Raise EnvironmentFault unless the sizes go with the target's."""
        found, due = tuple(files.tensors["fc.weight"].shape), target.hidden_size
        if found != (due, 2 * due):
            raise wrong_size(
                files, f"fc is {list(found)}; this target's rows of {due} need {[due, 2 * due]}"
            )

    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`: the target's."""
        return self.target.embed(ids)

    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`: rows that leave the layer are what the output matrix reads."""
        return rows

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`: the target's."""
        return self.target.unembed(rows)

    @property
    def _stack(self) -> Sequence[Layer]:
        return (self.layer,)

    def _enter(self, x: Input, layers: tuple[int, int] | None) -> tuple[Tensor, int, int]:
        if not isinstance(x, Features):
            raise ValueError(f"{self.name} reads tokens beside features, not {type(x).__name__}")
        b, n = x.ids.shape
        return self._join(self.embed(x.ids.reshape(-1)), x.rows.reshape(b * n, -1)), b, n

    @abstractmethod
    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Rows [b n, hidden] of our own that enter the layer, of embeddings and features."""

    def _logits(
        self, h: Tensor, b: int, at: Literal["last", "all"] | Tensor, scratch: Scratch
    ) -> Tensor:
        rows = h.view(b, -1, self.hidden_size)
        if isinstance(at, Tensor):
            rows = rows.index_select(1, at)
        elif at == "last":
            rows = rows[:, -1:]
        return self.unembed(self.norm(rows))


def wrong_size(files: HeadFiles, what: str) -> EnvironmentFault:
    """A head that does not go with the target."""
    return EnvironmentFault(f"{files.source}: {what}", "specbench list models")


def random_layer(
    target: Decoder, seed: int, *, reads: int
) -> tuple[HeadShape, dict[str, Tensor], torch.Generator]:
    """A layer as wide as the target whose attention reads rows of so many numbers."""
    generator = torch.Generator().manual_seed(seed)
    width, d = target.hidden_size, RANDOM_HEAD_DIM
    mlp = 2 * width
    sizes = {
        **{f"self_attn.{part}_proj": (d, reads) for part in "qkv"},
        "self_attn.o_proj": (width, d),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
    tensors = {
        f"layer.{name}.weight": random_matrix(*size, generator) for name, size in sizes.items()
    }
    tensors["layer.post_attention_layernorm.weight"] = torch.ones(width)
    return HeadShape(width, mlp, 1, 1, d), tensors, generator


def random_matrix(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns], which about keeps the size of what it is multiplied with."""
    drawn = torch.randn(rows, columns, generator=generator)
    return drawn.div_(math.sqrt(columns))


def _rotary(shape: HeadShape, rope: Mapping[str, Any]) -> Any:
    """transformers' rotary module for the layer."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=shape.num_attention_heads * shape.head_dim,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        **rope,
    )
    return LlamaRotaryEmbedding(config)
