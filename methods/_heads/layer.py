"""Draft head of fused layers that uses the target's embedding and output matrix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadShape, LoadedHead, read_head
from methods._heads.module import DraftHead, HeadOutput, PrefixHead, get_head_classes
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
"""Number of rows of the target's output matrix that are read at a time, to save memory."""


class HeadStack(FusedStack, Head, Artifact):
    """Fused layers that use the target's embedding and output matrix, in the target's dtype.

    Args:
        shape, rotary: Sizes and rotary embedding of the layers.
        captured_layers: See `Head`.

    Attributes:
        module: Class of the torch module that is fused, also an `Artifact`.
        layers: Weights of the layers, which a subclass sets.
    """

    module: ClassVar[type[Any]]
    layers: Sequence[LayerWeights]
    _end: Tensor | None = None  # the norm of what leaves the last layer, if there is one

    def __init__(
        self, shape: HeadShape, rotary: nn.Module, target: Decoder, captured_layers: tuple[int, ...]
    ) -> None:
        device, dtype = target.device, target.dtype
        super().__init__(shape, rotary, name=self.kind, device=device, dtype=dtype)
        self.target, self.captured_layers = target, captured_layers
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the head in a folder; see `Artifact.load`."""
        made: Any = cls
        head: Self = made(cls.module.load(folder, decoders), decoders["target"])
        return head

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a head with random weights; see `Artifact.random`."""
        made: Any = cls
        head: Self = made(cls.module.random(decoders, seed), decoders["target"])
        return head

    def embed(self, ids: Tensor) -> Tensor:
        """See `Decoder`. Uses the target's embedding."""
        return self.target.embed(ids)

    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`. Without a final norm, the output of the last layer is used as is."""
        return self._norm(rows, self._end)

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`. Uses the target's output matrix."""
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
    """Fused form of a `DraftHead`. Subclasses define the input and the output of the layer.

    Embedding and output matrix are shared with the target, unless the head has its own.

    Args:
        module: Module whose weights are fused. It is not kept.
        target: The decoder that the head drafts for. The head uses its device and dtype.

    Attributes:
        module: Class of the torch module that is fused.
    """

    module: ClassVar[type[DraftHead]]

    def __init__(self, module: DraftHead, target: Decoder) -> None:
        shape, own = module.shape, module.layer
        super().__init__(shape, own.self_attn.rotary, target, module.captured_layers)
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
    def from_files(cls, files: LoadedHead, target: Decoder) -> Self:
        """Return the head of these files.

        Raises:
            EnvironmentFault: The head does not match the target.
        """
        return cls(cls.module.from_files(files, target), target)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the head in a folder, in any layout; see `Artifact.load`."""
        own, target = cls.module, decoders["target"]
        known = (own, *(head for head in get_head_classes().values() if head is not own))
        layouts = [each for head in known for each in head.layouts]
        files = read_head(folder, cls.kind, layouts, target)
        files.check_target(target)
        return cls.from_files(files, target)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a head with random weights and one narrow attention head; see
        `Artifact.random`."""
        target = decoders["target"]
        return cls(cls.module.random(target, seed), target)

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        """Read the head's tensors besides layer and `fc`, and add to `weight_bytes`."""

    def _read_vocabulary(self, read: LayerReader, module: DraftHead) -> None:
        """Read the head's own embedding and output matrix, if they differ from the target's."""
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
        """See `Decoder`. Uses the target's embedding, unless the head was trained with its own."""
        if self._own_embedding is None:
            return self.target.embed(ids)
        return torch.embedding(self._own_embedding, ids)

    def unembed(self, rows: Tensor) -> Tensor:
        """See `Decoder`. Ids that the head cannot draft get -inf."""
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
        """Return the layer's input rows [b n, hidden], from embeddings and features."""


class PrefixLayerHead(LayerHead):
    """Fused form of a `PrefixHead`. Its state contains the target's rows.

    Drafted rows read only the output of their parents. They occupy the state until they are
    dropped.

    Attributes:
        steps: The torch module, without its layer.
    """

    module: ClassVar[type[PrefixHead]]
    steps: PrefixHead

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        assert isinstance(module, PrefixHead)
        self._final = read.norm("norm")
        del module.layer  # it is fused
        self.steps = module.to(self.device, self.dtype).requires_grad_(False).eval()
        self.weight_bytes += sum(part.nbytes for part in self.steps.parameters())

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> Forwarded:
        """See `Decoder`. Rows of the target's width come from the target, wider rows from this
        head."""
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
        """Return the logits of a step's output."""
        return self.target.unembed(out.normed)

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        return rows.clone()  # the layer adds to it

    def _run_layer(self, *given: Any) -> Tensor:
        """Run the layer and its final norm."""
        return self._norm(super()._run_layer(*given), self._final)


def _read_output_rows(target: Decoder, ids: Tensor) -> Tensor:
    """Return the rows [r, hidden] of the target's output matrix for `ids`."""
    unit = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    blocks = [target.unembed(block)[:, ids] for block in torch.split(unit, ROWS_AT_ONCE)]
    return torch.cat(blocks).t()
