"""A draft head of one fused layer, which embeds and speaks through its target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadShape, LoadedHead, read_head
from methods._heads.module import DraftHead, HeadOutput, PrefixHead, heads
from specbench_cli.api import (
    Artifact,
    Decoder,
    Features,
    FusedStack,
    Head,
    Input,
    KVState,
    LayerReader,
    LayerWeights,
    ModelInput,
    Scratch,
    layer_bytes,
    scatter_logits,
)
from specbench_cli.api import ModelOutput as Forwarded

ROWS_AT_ONCE = 256
"""Rows of the target's output matrix are read in blocks, so that little is held at a time."""


class HeadStack(FusedStack, Head, Artifact):
    """Fused layers that embed and speak through their target, in whose dtype they compute.

    Args:
        shape, rotary: of the layers.
        taps: see `Head`.

    Attributes:
        module: the torch module that it is made of, an `Artifact` too.
        layers: which a subclass reads.
    """

    module: ClassVar[type[Any]]
    layers: Sequence[LayerWeights]
    _end: Tensor | None = None  # the norm of what leaves the last layer, if there is one

    def __init__(
        self, shape: HeadShape, rotary: nn.Module, target: Decoder, taps: tuple[int, ...]
    ) -> None:
        device, dtype = target.device, target.dtype
        super().__init__(shape, rotary, name=self.kind, device=device, dtype=dtype)
        self.target, self.taps = target, taps
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """The head in a folder; see `Artifact.load`."""
        made: Any = cls
        head: Self = made(cls.module.load(folder, decoders), decoders["target"])
        return head

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """One with random weights; see `Artifact.random`."""
        made: Any = cls
        head: Self = made(cls.module.random(decoders, seed), decoders["target"])
        return head

    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`: the target's."""
        return self.target.embed(ids)

    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`: without a norm, rows that leave the last layer are read as they are."""
        return self._norm(rows, self._end)

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`: the target's."""
        return self.target.unembed(rows)

    @property
    def _stack(self) -> Sequence[LayerWeights]:
        return self.layers

    def _logits(
        self, h: Tensor, b: int, at: Literal["last", "all"] | Tensor, scratch: Scratch
    ) -> Tensor:
        rows = h.view(b, -1, self.hidden_size)
        if isinstance(at, Tensor):
            rows = rows.index_select(1, at)
        elif at == "last":
            rows = rows[:, -1:]
        return self.unembed(self.norm(rows))


class LayerHead(HeadStack):
    """The fused form of a `DraftHead`: what enters its layer and is read from it, a subclass says.

    Embedding and output matrix are the target's own, which cost no memory twice, unless the head
    brings some.

    Args:
        module: whose weights are fused; it is not kept.
        target: the decoder that it drafts for; the head computes on its device, in its dtype.

    Attributes:
        module: the torch module that it is made of.
    """

    module: ClassVar[type[DraftHead]]

    def __init__(self, module: DraftHead, target: Decoder) -> None:
        shape, own = module.shape, module.layer
        super().__init__(shape, own.self_attn.rotary, target, module.taps)
        self.levels = module.levels
        read = self._reader(shape, module.state_dict())
        normed = own.input_layernorm is not None
        self.layers = (read.layer("layer.", norm="input_layernorm" if normed else None),)
        self.weight_bytes = layer_bytes(self.layers[0])
        if "fc.weight" in read:
            bias = read.get("fc.bias") if "fc.bias" in read else None
            self.fc = read.linear(read.get("fc.weight"), bias)
            self.weight_bytes += self.fc.nbytes
        self._read_extra_weights(read, module)
        self._read_vocabulary(read, module)

    @classmethod
    def of(cls, files: LoadedHead, target: Decoder) -> Self:
        """The head that files hold; raises EnvironmentFault where it does not fit the target."""
        return cls(cls.module.of(files, target), target)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """The head in a folder, in whatever layout; see `Artifact.load`."""
        own, target = cls.module, decoders["target"]
        known = (own, *(head for head in heads().values() if head is not own))
        layouts = [each for head in known for each in head.layouts]
        files = read_head(folder, cls.kind, layouts, target)
        files.check_target(target)
        return cls.of(files, target)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """A head with random weights, one narrow attention head; see `Artifact.random`."""
        target = decoders["target"]
        return cls(cls.module.random(target, seed), target)

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        """Read what a kind of head has beside its layer and `fc`; adds to `weight_bytes`."""

    def _read_vocabulary(self, read: LayerReader, module: DraftHead) -> None:
        """What it embeds and speaks with, where that is not simply the target's."""
        says = module.says
        self._ids = None if says is None else says.to(self.device)
        self._own_embedding = self._own_output = None
        if module.embed_tokens is not None:
            self._own_embedding = read.get("embed_tokens.weight").contiguous()
            self.weight_bytes += self._own_embedding.nbytes
        if module.lm_head is not None:
            self._own_output = read.linear(read.get("lm_head.weight"))
        elif self._ids is not None:
            self._own_output = read.linear(_read_output_rows(self.target, self._ids))
        if self._own_output is not None:
            self.weight_bytes += self._own_output.nbytes

    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`: the target's, unless the head was trained with one of its own."""
        if self._own_embedding is None:
            return self.target.embed(ids)
        return torch.embedding(self._own_embedding, ids)

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`: the target's, or its own; ids that the head cannot say get -inf."""
        if self._own_output is None:
            return self.target.unembed(rows)
        logits = self._own_output(rows.reshape(-1, self.hidden_size)).view(*rows.shape[:-1], -1)
        return logits if self._ids is None else scatter_logits(logits, self._ids, self.vocab_size)

    def _enter(self, x: Input, layers: tuple[int, int] | None) -> tuple[Tensor, int, int]:
        if not isinstance(x, Features):
            raise ValueError(f"{self.name} reads tokens beside features, not {type(x).__name__}")
        b, n = x.ids.shape
        return self._join(self.embed(x.ids.reshape(-1)), x.rows.reshape(b * n, -1)), b, n

    @abstractmethod
    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Rows [b n, hidden] of our own that enter the layer, of embeddings and features."""


class PrefixLayerHead(LayerHead):
    """The fused form of a `PrefixHead`: its state holds the target's rows. Drafted ones see nothing
    but what their parents left; they take room in the state, as any rows, until they are dropped.

    Attributes:
        steps: the torch module, without its layer.
    """

    module: ClassVar[type[PrefixHead]]
    steps: PrefixHead

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        assert isinstance(module, PrefixHead)
        self._final = read.norm("norm")
        del module.layer  # which is fused
        self.steps = module.to(self.device, self.dtype).requires_grad_(False).eval()
        self.weight_bytes += sum(part.nbytes for part in self.steps.parameters())

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> Forwarded:
        """See `Decoder`; rows of the target's width are its own, wider ones were left here."""
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        assert isinstance(x, Features)
        assert isinstance(state, KVState)
        rows, ids = x.rows, x.ids
        if rows.shape[-1] == self.hidden_size:
            out_rows = super().execute(model_input._replace(logits_at=None))
            if logits_at is None:
                return out_rows
            rows, ids = (
                (out_rows.hidden, ids)
                if logits_at == "all"
                else (out_rows.hidden[:, -1:], ids[:, -1:])
            )
        else:
            self.ran += 1
            state.extend(0, (0,), ids.shape[1])
        out = self.steps.step(self.embed(ids), rows)
        return Forwarded(self._compute_logits(out), out.hidden)

    def _compute_logits(self, out: HeadOutput) -> Tensor:
        """Logits of what a step made."""
        return self.target.unembed(out.normed)

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        return rows.clone()  # the layer adds to it

    def _run_layer(self, *given: Any) -> Tensor:
        """The norm ends the layer."""
        return self._norm(super()._run_layer(*given), self._final)


def _read_output_rows(target: Decoder, ids: Tensor) -> Tensor:
    """Rows [r, hidden] of the target's output matrix."""
    unit = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    blocks = [target.unembed(block)[:, ids] for block in torch.split(unit, ROWS_AT_ONCE)]
    return torch.cat(blocks).t()
