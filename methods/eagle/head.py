"""Draft head of EAGLE-1 and EAGLE-2.

Li, Wei, Zhang and Zhang: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, ICML
2024, arXiv:2401.15077.

At position t, the head combines the token x_{t+1} with the feature f_t, which is the target's last
hidden state. The matrix `fc` maps [embed(x_{t+1}), f_t] to the input of one layer, whose attention
has no input norm. The output of the layer is the predicted feature f_{t+1}, which the target's
output matrix maps to the logits of x_{t+2}. Later draft steps read the predicted feature instead of
the target's feature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadShape
from methods._heads.layer import LayerHead
from methods._heads.layouts import DRAFT_VOCABULARY, TARGET_COPIES, Layout
from methods._heads.module import DraftHead, HeadOutput, JoinedHead
from methods._heads.recipe import HeadRecipe, Objective, TargetStatistics
from methods._heads.slots import LlamaLayer


class Eagle(JoinedHead):
    """EAGLE's draft head as a torch module, for training."""

    kind: ClassVar[str] = "eagle"
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            kind,
            "EAGLE-1 and EAGLE-2 (SafeAILab)",
            r"layers\.0\.self_attn\.q_proj\.weight",
            TARGET_COPIES | DRAFT_VOCABULARY | {"fc.": "fc.", "layers.0.": "layer."},
            excludes=r"layers\.0\.hidden_norm\.weight",
        ),
        Layout(
            kind,
            "EAGLE (speculators)",
            r"fusion_fc\.weight",
            TARGET_COPIES | {"fusion_fc.": "fc.", "transformer.": "layer."},
        ),
    )
    config: ClassVar[Mapping[str, Any]] = {"architectures": ["LlamaForCausalLM"], "bias": True}
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=700,
        reply_updates=700,
        losses={
            "paper": Objective(steps=1, ce=0.1, feature=1.0, noise=0.2),
            "ttt": Objective(steps=4, feature=0.1),
        },
    )

    def build(self, tensor_names: Collection[str]) -> None:
        """Create the submodules of the head.

        The constructor of the base class calls this method.
        """
        width = self.shape.hidden_size
        self.fc = nn.Linear(2 * width, width, bias="fc.bias" in tensor_names)
        self.layer = LlamaLayer(width, self.shape, self.rope, tensor_names, normed=False)

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """Return an untrained head. Its matrix `fc` has a bias, as in the authors' code."""
        return cls(shape, rope, ("fc.bias",), target.choose_vocabulary(cls.recipe.draft_vocab_size))

    def linear_input(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return the input of `fc` with a column of ones.

        The linear fit uses this column for the bias.
        """
        return torch.cat([embedded, features, torch.ones_like(features[:, :1])], -1)

    def init_from_linear(self, found: Tensor, _norm: Tensor) -> None:
        """Initialise the weight and bias of `fc` with a fitted linear map."""
        self.fc.load_state_dict({"weight": found[:-1].T, "bias": found[-1]})
        self.layer.zero_outputs()

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of `fc`, which is both the attention input and the residual stream."""
        joined = self.fc(torch.cat([embedded, features], -1))
        return joined, joined

    def make_output(self, rows: Tensor) -> HeadOutput:
        """Return the predicted feature. The output matrix and the next draft step both read it."""
        return HeadOutput(rows, rows)


class EagleHead(LayerHead):
    """EAGLE's draft head for decoding."""

    kind: ClassVar[str] = Eagle.kind
    module: ClassVar[type[DraftHead]] = Eagle

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        return self.fc(torch.cat((tokens, rows), -1))
