"""Draft head of EAGLE-3.

Li, Wei, Zhang and Zhang: EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test, NeurIPS 2025, arXiv:2503.01840.

Slot t joins the token x_{t+1} and g_t. At the first level, `fc` maps the target's hidden states of
three layers, side by side, to g_t. At later levels, g is the output of the head's own layer.
Attention reads [norm(embed(x_{t+1})), norm(g_t)]. The residual stream is g_t. The head's own output
matrix covers a part of the target's vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadShape, LoadedHead, head_mismatch, official_layers
from methods._heads.layer import LayerHead
from methods._heads.layouts import DROPPED, SAME_NAMES, Layout, add_prefix
from methods._heads.module import DraftHead, HeadOutput, JoinedHead
from methods._heads.recipe import HeadRecipe, Objective, TargetStatistics
from methods._heads.slots import LlamaLayer, RmsNorm
from methods._heads.vocabulary import HeadVocabulary
from specbench_cli.api import Decoder, LayerReader, LayerWeights, Scratch

_WRITERS = {"EAGLE-3 (SafeAILab, SpecForge)": "midlayer.", "EAGLE-3 (speculators)": "layers.0."}
_AROUND = SAME_NAMES | {"input_norm.": "fc_norm.", "verifier_": DROPPED}
_LAYER = {"input_layernorm.": "enorm.", "hidden_norm.": "hnorm.", "": "layer."}


class Eagle3(JoinedHead):
    """EAGLE-3's head as a torch module.

    Heads trained here draft only the most frequent tokens, with the target's output matrix.
    Official heads have their own output matrix.

    Args:
        size: Approximate magnitude of the target's hidden states, [layers * width]. `fc` is divided
            by it in files. Hidden states can be tens of times as large as what this layer adds to
            them, which makes learning slow. The values are powers of two, so division is exact in
            fp16.
        norm_first: Whether the residual stream is the normed features.
    """

    kind: ClassVar[str] = "eagle3"
    layouts: ClassVar[tuple[Layout, ...]] = tuple(
        Layout(
            "eagle3",
            name,
            re.escape(f"{at}hidden_norm.weight"),
            _AROUND | add_prefix(at, _LAYER),
            excludes="mask_hidden",
        )
        for name, at in _WRITERS.items()
    )
    config: ClassVar[Mapping[str, Any]] = {"architectures": ["LlamaForCausalLMEagle3"]}
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=1000,
        reply_updates=1000,
        losses={"paper": Objective(steps=7), "ttt": Objective(steps=5)},
        mlp=384,
        draft_vocab_size=2048,
    )
    size: Tensor | None

    def __init__(
        self,
        shape: HeadShape,
        rope: Mapping[str, Any],
        has: Collection[str] = (),
        *,
        captured_layers: tuple[int, ...],
        reads: int,
        own: HeadVocabulary,
        size: Tensor | None = None,
        norm_first: bool = False,
    ) -> None:
        super().__init__(shape, rope, own=own)
        self.captured_layers, self.norm_first = captured_layers, norm_first
        self.fc = nn.Linear(reads, shape.hidden_size, bias="fc.bias" in has)
        self.layer = LlamaLayer(2 * shape.hidden_size, shape, rope, has, normed=False)
        self.enorm, self.hnorm, self.norm = (self.new_norm() for _ in range(3))
        self.fc_norm = RmsNorm(reads, shape.rms_norm_eps) if "fc_norm.weight" in has else None
        self.register_buffer("size", size, persistent=False)

    @classmethod
    def choose_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Return the official code's layers, except for targets of fewer than 16 layers.

        There the third official layer is too low (the middle one of 8), so the last layer is used.
        """
        if n_layers >= 16:
            return official_layers(n_layers)
        return min(1, n_layers - 1), n_layers // 2, n_layers - 1

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """Return an untrained head, scaled for the target's hidden states."""
        captured_layers, own = (
            cls.choose_layers(target.n_layers),
            target.choose_vocabulary(cls.recipe.draft_vocab_size),
        )
        size = target.row_scale(captured_layers)
        return cls(
            shape, rope, captured_layers=captured_layers, reads=len(size), own=own, size=size
        )

    def init_weights(self, std: float) -> None:
        """Draw weights that preserve the magnitude of their input.

        The newest token enters only through attention, so queries start equal to keys: a slot
        attends to itself.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        attention = self.layer.self_attn
        attention.q_proj.load_state_dict(attention.k_proj.state_dict())

    @classmethod
    def new_small(cls, shape: HeadShape, target: Decoder) -> Self:
        """Return a head that can draft every second id, and the first two."""
        captured_layers, ids = official_layers(target.n_layers), target.vocab_size
        says = torch.tensor([0, 1, *range(2, ids, 2)], device="cpu")
        own = HeadVocabulary(ids, says, has_output_matrix=True)
        return cls(
            shape,
            {},
            captured_layers=captured_layers,
            reads=len(captured_layers) * shape.hidden_size,
            own=own,
        )

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """See `DraftHead`. `fc` must read three hidden states of this target."""
        d, wide = files.shape.hidden_size, 3 * target.hidden_size
        found = tuple(files.tensors["fc.weight"].shape)
        if found != (d, wide) or wide == d:
            needs = f"this target's rows of {target.hidden_size}, three at a time, need {[d, wide]}"
            raise head_mismatch(files, f"fc is {list(found)}; {needs}")
        own, captured_layers = (
            HeadVocabulary.from_files(files, target),
            files.find_captured_layers(target.n_layers),
        )
        norm_first = bool(files.config.get("norm_before_residual", False))
        return {
            "captured_layers": captured_layers,
            "reads": wide,
            "own": own,
            "norm_first": norm_first,
        }

    def project_features(self, features: Tensor) -> Tensor:
        """Join the hidden states of three layers."""
        if self.fc_norm is not None:
            features = self.fc_norm(features)
        joined: Tensor = self.fc(features if self.size is None else features / self.size)
        return joined

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return both normed, side by side, and the features as residual stream."""
        normed = self.hnorm(features)
        rows = torch.cat([self.enorm(embedded), normed], -1)
        return rows, normed if self.norm_first else features

    def make_output(self, rows: Tensor) -> HeadOutput:
        """Return the rows unchanged to feed back, and normed for the output matrix."""
        return HeadOutput(rows, self.norm(rows))

    def tensors(self) -> dict[str, Tensor]:
        """See `DraftHead`."""
        held = super().tensors()
        if self.size is not None:
            held["fc.weight"] = held["fc.weight"] / self.size
        return held


class Eagle3Head(LayerHead):
    """Head in decoding."""

    kind: ClassVar[str] = Eagle3.kind
    module: ClassVar[type[DraftHead]] = Eagle3

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        assert isinstance(module, Eagle3)
        self._enorm, self._hnorm, self._final = map(read.norm, ("enorm", "hnorm", "norm"))
        self._fc_norm = read.get("fc_norm.weight") if module.fc_norm is not None else None
        self._true_width, self._norm_first = module.fc.in_features, module.norm_first
        self.weight_bytes += 3 * self._final.nbytes

    def norm(self, rows: Tensor) -> Tensor:
        """See `Decoder`."""
        return self._norm(rows, self._final)

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        self._tokens, width = self._norm(tokens, self._enorm), rows.shape[1]  # for attention
        if width == self._true_width:
            if self._fc_norm is not None:
                rows = torch.rms_norm(rows, (width,), self._fc_norm, self._eps)
            g = self.fc(rows)
        elif width == self.hidden_size:
            g = rows.clone()  # the layer adds to it
        else:
            known = f"true ones have {self._true_width}, the head's own {self.hidden_size}"
            raise ValueError(f"features of {width} numbers; {known}")
        return self._norm(g, self._hnorm) if self._norm_first else g

    def _attention_input(self, layer: LayerWeights, h: Tensor, scratch: Scratch) -> Tensor:
        rows = h if self._norm_first else self._norm(h, self._hnorm, scratch.size, scratch.normed)
        return torch.cat((self._tokens, rows), -1)
