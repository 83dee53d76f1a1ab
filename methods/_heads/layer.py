"""Base classes of draft heads for decoding. Their layers run as fused kernels.

Training uses another form of the head: a torch module derived from `DraftHead`. For decoding, a
class in this file copies the weights of this module to fused layers. EAGLE, EAGLE-3, MTP, P-EAGLE,
DFlash, Hydra++ and Clover define subclasses in their `head.py`.
"""

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
    ModelOutput,
    Scratch,
    layer_bytes,
    scatter_logits,
)

ROWS_AT_ONCE = 256
"""Number of unit vectors that `_read_output_rows` maps to logits at a time, to save memory."""


class HeadStack(FusedStack, Head, Artifact):
    """Draft head of one or more fused layers. It uses the target's embedding and output matrix.

    The head computes on the target's device and in the target's dtype.

    Args:
        shape: Sizes of the layers.
        rotary: Rotary embedding of the layers.
        target: Decoder that the head drafts for.
        captured_layers: Target layers whose hidden states the head reads.

    Attributes:
        module: Class of the torch module that training uses. The weights are copied from such a
            module.
        layers: Weights of the fused layers. Subclasses set them.
    """

    module: ClassVar[type[Any]]
    layers: Sequence[LayerWeights]
    _final_norm: Tensor | None = None  # norm after the last layer, if any

    def __init__(
        self, shape: HeadShape, rotary: nn.Module, target: Decoder, captured_layers: tuple[int, ...]
    ) -> None:
        device, dtype = target.device, target.dtype
        super().__init__(shape, rotary, name=self.kind, device=device, dtype=dtype)
        self.target, self.captured_layers = target, captured_layers
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the head in a folder."""
        make_head: Any = cls  # subclasses take (module, target)
        head: Self = make_head(cls.module.load(folder, decoders), decoders["target"])
        return head

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a head with random weights."""
        make_head: Any = cls
        head: Self = make_head(cls.module.random(decoders, seed), decoders["target"])
        return head

    def embed(self, ids: Tensor) -> Tensor:
        """Return the target's embeddings of token ids."""
        return self.target.embed(ids)

    def norm(self, rows: Tensor) -> Tensor:
        """Return the final norm of `rows`, or `rows` if the head has no final norm."""
        return self._norm(rows, self._final_norm)

    def unembed(self, rows: Tensor) -> Tensor:
        """Return logits, computed with the target's output matrix."""
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
    """Draft head of one fused layer. Its weights come from a trained `DraftHead`.

    Subclasses implement `_join`, which combines a token embedding with features to the layer's
    input. The head uses the target's embedding and output matrix, unless its own files contain such
    matrices.

    Args:
        module: Trained torch module. The head copies the weights of this module.
        target: Decoder that the head drafts for. The head uses its device and dtype.

    Attributes:
        module: Class of the torch module.
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
        """Create the head from loaded files.

        Raises:
            EnvironmentFault: The head does not match the target.
        """
        return cls(cls.module.from_files(files, target), target)

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load the head from a folder, in any known checkpoint layout."""
        own, target = cls.module, decoders["target"]
        known = (own, *(head for head in get_head_classes().values() if head is not own))
        layouts = [each for head in known for each in head.layouts]
        files = read_head(folder, cls.kind, layouts, target)
        files.check_target(target)
        return cls.from_files(files, target)

    @classmethod
    def random(cls, decoders: Mapping[str, Decoder], seed: int = 0) -> Self:
        """Return a small head with random weights."""
        target = decoders["target"]
        return cls(cls.module.random(target, seed), target)

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        """Read the weights that only some heads have, such as additional norms.

        Update `weight_bytes`.

        The base class reads the weights of the layer and of the matrix `fc`.
        """

    def _read_vocabulary(self, read: LayerReader, module: DraftHead) -> None:
        """Read the head's own embedding and output matrix, if the head has them.

        If the head has a draft vocabulary but no output matrix, copy the rows of the target's
        output matrix for the ids of the draft vocabulary.
        """
        draft_ids = module.draft_ids
        self._ids = None if draft_ids is None else draft_ids.to(self.device)
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
        """Return the embeddings of token ids, from the head's own embedding matrix if it has
        one.
        """
        if self._own_embedding is None:
            return self.target.embed(ids)
        return torch.embedding(self._own_embedding, ids)

    def unembed(self, rows: Tensor) -> Tensor:
        """Return logits over the target's ids. Ids outside the draft vocabulary get -inf."""
        if self._own_output is None:
            return self.target.unembed(rows)
        logits = self._own_output(rows.reshape(-1, self.hidden_size)).view(*rows.shape[:-1], -1)
        return logits if self._ids is None else scatter_logits(logits, self._ids, self.vocab_size)

    def _enter(self, x: Input, layers: tuple[int, int] | None) -> tuple[Tensor, int, int]:
        if not isinstance(x, Features):
            raise ValueError(f"{self.name} needs Features as input, not {type(x).__name__}")
        b, n = x.ids.shape
        return self._join(self.embed(x.ids.reshape(-1)), x.rows.reshape(b * n, -1)), b, n

    @abstractmethod
    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Combine token embeddings with features. Return the layer's input [batch * n, hidden].

        Args:
            tokens: Embeddings of the tokens, [batch * n, hidden].
            rows: Features of the previous tokens, [batch * n, width].
        """


class PrefixLayerHead(LayerHead):
    """Draft head whose transformer layer reads only committed tokens, for decoding.

    Only this layer is fused.

    The layer runs once per decoding step, on the target's hidden states of new committed tokens.
    Only committed tokens enter the KV cache. For draft tokens, the torch module `steps` runs on the
    output of the parent node. A draft token still takes a slot of the KV cache, which is freed at
    the end of the step.

    Attributes:
        steps: The trained torch module (`PrefixHead`), without its layer.
    """

    module: ClassVar[type[PrefixHead]]
    steps: PrefixHead

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        assert isinstance(module, PrefixHead)
        self._layer_norm = read.norm("norm")
        del module.layer  # `self.layers` contains its weights
        self.steps = module.to(self.device, self.dtype).requires_grad_(False).eval()
        self.weight_bytes += sum(part.nbytes for part in self.steps.parameters())

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> ModelOutput:
        """Run the head on committed tokens or on one level of the draft tree.

        The width of the features tells the two cases apart. Features of the target's width belong
        to committed tokens and go through the layer. Wider rows are the head's own outputs for the
        parents of draft tokens.
        """
        x, state, logits_at = model_input.x, model_input.state, model_input.logits_at
        assert isinstance(x, Features)
        assert isinstance(state, KVState)
        rows, ids = x.rows, x.ids
        if rows.shape[-1] == self.hidden_size:
            layer_output = super().execute(model_input._replace(logits_at=None))
            if logits_at is None:
                return layer_output
            rows, ids = (
                (layer_output.hidden, ids)
                if logits_at == "all"
                else (layer_output.hidden[:, -1:], ids[:, -1:])
            )
        else:
            self.ran += 1
            state.extend(0, (0,), ids.shape[1])
        out = self.steps.step(self.embed(ids), rows)
        return ModelOutput(self._compute_logits(out), out.hidden)

    def _compute_logits(self, out: HeadOutput) -> Tensor:
        return self.target.unembed(out.normed)

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        return rows.clone()  # the layer adds its output to this tensor in place

    def _run_layer(self, *args: Any) -> Tensor:
        """Return the normed output of the layer."""
        return self._norm(super()._run_layer(*args), self._layer_norm)


def _read_output_rows(target: Decoder, ids: Tensor) -> Tensor:
    """Return the rows [len(ids), hidden] of the target's output matrix for `ids`.

    The matrix may be quantized or split over devices. The target therefore computes the logits of
    unit vectors, which are the columns of the matrix.
    """
    unit = torch.eye(target.hidden_size, dtype=target.dtype, device=target.device)
    blocks = [target.unembed(block)[:, ids] for block in torch.split(unit, ROWS_AT_ONCE)]
    return torch.cat(blocks).t()
