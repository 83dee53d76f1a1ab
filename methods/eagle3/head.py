"""Draft head of EAGLE-3.

Li, Wei, Zhang and Zhang: EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test, NeurIPS 2025, arXiv:2503.01840.

At position t, the head combines the token x_{t+1} with a feature g_t. At the first draft step, the
matrix `fc` computes g_t from the concatenated hidden states of three target layers (low, middle and
high). At later draft steps, g_t is the output of the head's own layer. The attention reads
[norm(embed(x_{t+1})), norm(g_t)], and the residual stream is g_t. The output matrix covers a part
of the target's vocabulary.
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
    """EAGLE-3's draft head as a torch module, for training.

    A head that specbench trains uses the target's output matrix, restricted to the most frequent
    tokens. Published heads have their own output matrix.

    Args:
        captured_layers: Numbers of the three target layers.
        reads: Width of the concatenated hidden states of these layers.
        own: Draft vocabulary.
        size: Approximate magnitude of the hidden states, [layers * width], in powers of two. In
            training, the hidden states are divided by `size`, because large inputs slow down
            learning. Saved files contain `fc` divided by `size` instead. This is exact, because
            `size` is a power of two.
        norm_first: Whether the residual stream starts with the normed feature
            (`norm_before_residual` in the authors' config.json).
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
        tensor_names: Collection[str] = (),
        *,
        captured_layers: tuple[int, ...],
        reads: int,
        own: HeadVocabulary,
        size: Tensor | None = None,
        norm_first: bool = False,
    ) -> None:
        super().__init__(shape, rope, own=own)
        self.captured_layers, self.norm_first = captured_layers, norm_first
        self.fc = nn.Linear(reads, shape.hidden_size, bias="fc.bias" in tensor_names)
        self.layer = LlamaLayer(2 * shape.hidden_size, shape, rope, tensor_names, normed=False)
        self.enorm, self.hnorm, self.norm = (self.new_norm() for _ in range(3))
        self.fc_norm = (
            RmsNorm(reads, shape.rms_norm_eps) if "fc_norm.weight" in tensor_names else None
        )
        self.register_buffer("size", size, persistent=False)

    @classmethod
    def choose_layers(cls, n_layers: int) -> tuple[int, ...]:
        """Return the three target layers that a new head reads.

        For targets with at least 16 layers, these are the layers of the authors' code. For smaller
        targets, the authors' high layer would be near the middle (layer 4 of 8). The last layer
        replaces it.
        """
        if n_layers >= 16:
            return official_layers(n_layers)
        return min(1, n_layers - 1), n_layers // 2, n_layers - 1

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """Return an untrained head. It divides the hidden states by their approximate magnitude."""
        captured_layers, own = (
            cls.choose_layers(target.n_layers),
            target.choose_vocabulary(cls.recipe.draft_vocab_size),
        )
        size = target.row_scale(captured_layers)
        return cls(
            shape, rope, captured_layers=captured_layers, reads=len(size), own=own, size=size
        )

    def init_weights(self, std: float) -> None:
        """Draw random weights that preserve the magnitude of the input of each matrix.

        Queries and keys start with equal weights, so that each position first attends to itself.
        Only attention passes the newest token to the output.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        attention = self.layer.self_attn
        attention.q_proj.load_state_dict(attention.k_proj.state_dict())

    @classmethod
    def new_small(cls, shape: HeadShape, target: Decoder) -> Self:
        """Return a small head for audits.

        Its draft vocabulary is id 0, id 1 and every second id from 2.
        """
        captured_layers, ids = official_layers(target.n_layers), target.vocab_size
        draft_ids = torch.tensor([0, 1, *range(2, ids, 2)], device="cpu")
        own = HeadVocabulary(ids, draft_ids, has_output_matrix=True)
        return cls(
            shape,
            {},
            captured_layers=captured_layers,
            reads=len(captured_layers) * shape.hidden_size,
            own=own,
        )

    @classmethod
    def init_args(cls, files: LoadedHead, target: Decoder) -> dict[str, Any]:
        """Return the constructor arguments of this head: captured layers, width and draft
        vocabulary.

        Raises:
            EnvironmentFault: `fc` does not read three hidden states of this target's size.
        """
        d, wide = files.shape.hidden_size, 3 * target.hidden_size
        found = tuple(files.tensors["fc.weight"].shape)
        if found != (d, wide) or wide == d:
            what = f"fc has shape {list(found)}; this target needs {[d, wide]}"
            raise head_mismatch(files, what)
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
        """Return the feature g, computed from the concatenated hidden states of three target
        layers.
        """
        if self.fc_norm is not None:
            features = self.fc_norm(features)
        joined: Tensor = self.fc(features if self.size is None else features / self.size)
        return joined

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention input and the residual stream.

        The attention input is the normed embedding, concatenated with the normed feature.
        """
        normed = self.hnorm(features)
        rows = torch.cat([self.enorm(embedded), normed], -1)
        return rows, normed if self.norm_first else features

    def make_output(self, rows: Tensor) -> HeadOutput:
        """Return the layer's output as the next feature, and the same rows after RMSNorm as the
        input of the LM head.
        """
        return HeadOutput(rows, self.norm(rows))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store.

        `fc` contains the division by the magnitude of the hidden states.
        """
        tensors = super().tensors()
        if self.size is not None:
            tensors["fc.weight"] = tensors["fc.weight"] / self.size
        return tensors


class Eagle3Head(LayerHead):
    """EAGLE-3's draft head for decoding."""

    kind: ClassVar[str] = Eagle3.kind
    module: ClassVar[type[DraftHead]] = Eagle3

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        assert isinstance(module, Eagle3)
        self._enorm, self._hnorm, self._final_norm = map(read.norm, ("enorm", "hnorm", "norm"))
        self._fc_norm = read.get("fc_norm.weight") if module.fc_norm is not None else None
        self._true_width, self._norm_first = module.fc.in_features, module.norm_first
        self.weight_bytes += 3 * self._final_norm.nbytes

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        self._tokens, width = self._norm(tokens, self._enorm), rows.shape[1]
        if width == self._true_width:
            if self._fc_norm is not None:
                rows = torch.rms_norm(rows, (width,), self._fc_norm, self._eps)
            g = self.fc(rows)
        elif width == self.hidden_size:
            g = rows.clone()  # the layer adds its output to this tensor in place
        else:
            known = f"{self._true_width} (the target's) or {self.hidden_size} (the head's own)"
            raise ValueError(f"features have width {width}; it must be {known}")
        return self._norm(g, self._hnorm) if self._norm_first else g

    def _attention_input(self, layer: LayerWeights, h: Tensor, scratch: Scratch) -> Tensor:
        rows = h if self._norm_first else self._norm(h, self._hnorm, scratch.size, scratch.normed)
        return torch.cat((self._tokens, rows), -1)
