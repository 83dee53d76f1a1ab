"""Multi-token-prediction (MTP) layer, used as a draft head.

DeepSeek-AI: DeepSeek-V3 Technical Report, arXiv:2412.19437. The computation follows
XiaomiMiMo/MiMo.

At position t, the layer combines the token x_{t+1} with h_t, the target's last hidden state. The
matrix `fc` maps [norm(embed(x_{t+1})), norm(h_t)] to the input of one transformer layer. The
target's output matrix maps the output of this layer, after a final norm, to the logits of x_{t+2}.
At later draft steps, the output of this layer replaces h_t.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from methods._heads.files import HeadShape
from methods._heads.layer import LayerHead
from methods._heads.layouts import DRAFT_VOCABULARY, DROPPED, TARGET_COPIES, Layout, add_prefix
from methods._heads.module import DraftHead, HeadOutput, JoinedHead
from methods._heads.recipe import HeadRecipe, Objective, TargetStatistics
from methods._heads.slots import LlamaLayer
from specbench_cli.api import LayerReader

_MIMO = {
    "token_layernorm.": "enorm.",
    "hidden_layernorm.": "hnorm.",
    "input_proj.": "fc.",
    "final_layernorm.": "norm.",
    "": "layer.",
}
_QWEN = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "fc.",
    "norm.": "norm.",
    "layers.0.": "layer.",
}
_DEEPSEEK = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": DROPPED,
    "embed_tokens.": DROPPED,
    "": "layer.",
}


class Mtp(JoinedHead):
    """MTP layer as a torch module, for training.

    A layer that specbench trains has the checkpoint layout of MiMo, where `fc` reads [h_t,
    embedding].
    """

    kind: ClassVar[str] = "mtp"
    layouts: ClassVar[tuple[Layout, ...]] = (
        Layout(
            kind,
            "MTP (MiMo)",
            r"model\.mtp_layers\.0\.input_proj\.weight",
            DRAFT_VOCABULARY | add_prefix("model.mtp_layers.0.", _MIMO),
            in_target=True,
            hidden_first=True,
        ),
        Layout(
            kind,
            "MTP (speculators)",
            r"mtp_layers\.0\.input_proj\.weight",
            TARGET_COPIES | {"verifier_": DROPPED} | add_prefix("mtp_layers.0.", _MIMO),
        ),
        Layout(
            kind,
            "MTP (Qwen3-Next)",
            r"mtp\.pre_fc_norm_hidden\.weight",
            add_prefix("mtp.", _QWEN),
            in_target=True,
            norms_minus_one=True,
        ),
        Layout(
            kind,
            "MTP (DeepSeek, GLM)",
            r"model\.layers\.(\d+)\.eh_proj\.weight",
            add_prefix("model.layers.{n}.", _DEEPSEEK),
            in_target=True,
        ),
    )
    config: ClassVar[Mapping[str, Any]] = {
        "architectures": ["MiMoMTPModel"],
        "num_nextn_predict_layers": 1,
    }
    recipe: ClassVar[HeadRecipe] = HeadRecipe(
        corpus_updates=500,
        reply_updates=500,
        losses={"paper": Objective(steps=1, text_labels=True), "ttt": Objective(steps=4)},
    )

    def build(self, tensor_names: Collection[str]) -> None:
        """Create the submodules of the head.

        The constructor of the base class calls this method.
        """
        width = self.shape.hidden_size
        self.enorm, self.hnorm = self.new_norm(), self.new_norm()
        self.fc = nn.Linear(2 * width, width, bias="fc.bias" in tensor_names)
        self.layer = LlamaLayer(width, self.shape, self.rope, tensor_names, normed=True)
        self.norm = self.new_norm()

    @classmethod
    def new(cls, shape: HeadShape, rope: Mapping[str, Any], target: TargetStatistics) -> Self:
        """Return an untrained layer in the checkpoint layout of MiMo."""
        head = cls(shape, rope, own=target.choose_vocabulary(cls.recipe.draft_vocab_size))
        head.hidden_first = cls.layouts[0].hidden_first
        return head

    def linear_input(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Return the input of `fc`: the normed embedding and the normed features, concatenated."""
        both = [self.enorm(embedded), self.hnorm(features)]
        if self.hidden_first:
            both.reverse()
        return torch.cat(both, -1)

    def init_from_linear(self, found: Tensor, norm: Tensor) -> None:
        """Initialise `fc` with a fitted linear map, and the final norm with the target's final
        norm.
        """
        self.fc.load_state_dict({"weight": (found / norm).T})
        self.norm.load_state_dict({"weight": norm})
        self.layer.zero_outputs()

    def join(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention input (the normed output of `fc`) and the residual stream (the
        output of `fc`).
        """
        joined = self.fc(self.linear_input(embedded, features))
        assert self.layer.input_layernorm is not None
        return self.layer.input_layernorm(joined), joined

    def make_output(self, rows: Tensor) -> HeadOutput:
        """Return the normed output of the layer.

        The output matrix and the next draft step both read it.
        """
        normed = self.norm(rows)
        return HeadOutput(normed, normed)


class MtpHead(LayerHead):
    """MTP layer for decoding."""

    kind: ClassVar[str] = Mtp.kind
    module: ClassVar[type[DraftHead]] = Mtp

    def _read_extra_weights(self, read: LayerReader, module: DraftHead) -> None:
        self._enorm, self._hnorm, self._layer_norm = map(read.norm, ("enorm", "hnorm", "norm"))
        self.weight_bytes += 3 * self._layer_norm.nbytes
        self._hidden_first = module.hidden_first

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        parts = [self._norm(tokens, self._enorm), self._norm(rows, self._hnorm)]
        if self._hidden_first:
            parts.reverse()
        return self.fc(torch.cat(parts, -1))

    def _run_layer(self, *args: Any) -> Tensor:
        """Return the normed output of the layer."""
        return self._norm(super()._run_layer(*args), self._layer_norm)
