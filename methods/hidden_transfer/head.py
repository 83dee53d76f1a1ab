"""Draft head of Parallel Decoding via Hidden Transfer.

Pengfei Wu, Jiahao Liu, Zhuocheng Gong, Qifan Wang, Jinpeng Li, Jingang Wang, Xunliang Cai, Dongyan
Zhao: Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration,
arXiv:2404.12022.

h is the hidden state of a token before layer L. A linear map W_k predicts the hidden state of the
token k positions later: the pseudo hidden state W_k h. The target runs its layers L, L + 1, ... on
the pseudo hidden state at that position. Its output matrix maps the result to logits. The trained
parameters are D_k, where W_k = I + D_k. They are zero before training, and weight decay pulls W_k
to the identity.

As in the paper, pseudo hidden states attend to earlier ones, the target is frozen, and its
distribution is the label. Differs from the paper, whose code is not public: all steps k use the
same layer L, the middle one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from specbench_cli.api import Decoder, LookAhead


class TransferMaps(LookAhead):
    """Linear maps D_k of Hidden Transfer, [levels, hidden, hidden]. W_k = I + D_k.

    Args:
        target: Target whose hidden states the maps read.
        levels: Number of tokens to predict ahead.
        layer: Number L of the layer whose input the maps read. None means the middle layer.
    """

    kind: ClassVar[str] = "hidden-transfer"

    def __init__(self, target: Decoder, levels: int = 3, layer: int | None = None) -> None:
        super().__init__(target, levels, layer)
        width = target.hidden_size
        self.moves = nn.Parameter(torch.zeros(levels, width, width))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the predicted (pseudo) hidden states of the next tokens, [n, levels, hidden].

        Args:
            rows: Hidden states before layer L, [n, hidden].
        """
        return rows[:, None] + torch.einsum("nd,led->nle", rows, self.moves)
