"""Draft head of Parallel Decoding via Hidden Transfer.

Pengfei Wu, Jiahao Liu, Zhuocheng Gong, Qifan Wang, Jinpeng Li, Jingang Wang, Xunliang Cai, Dongyan
Zhao: Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration,
arXiv:2404.12022.

h is the hidden state of a token before layer L. Step k maps it to the pseudo hidden state W_k h of
the token k positions later. This runs through layers L, L + 1, ... at that position, and the
target's own output matrix reads the result. W_k = I + D_k, and D_k starts at zero, so that weight
decay pulls W_k to the identity. There are no other parameters.

As in the paper: linear maps at a middle layer, attention of pseudo states to earlier pseudo states,
a frozen target, and its distribution as label. Differs from the paper, whose code is not public:
all steps share one layer, the middle one, and the number of steps is fixed.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from specbench_cli.api import Decoder, LookAhead


class TransferMaps(LookAhead):
    """Maps D_k, [levels, width, width].

    Args:
        levels: Number of steps.
        layer: L. Default: the middle layer.
    """

    kind: ClassVar[str] = "hidden-transfer"

    def __init__(self, target: Decoder, levels: int = 3, layer: int | None = None) -> None:
        super().__init__(target, levels, layer)
        width = target.hidden_size
        self.moves = nn.Parameter(torch.zeros(levels, width, width))

    def forward(self, rows: Tensor) -> Tensor:
        """See `LookAhead.forward`."""
        return rows[:, None] + torch.einsum("nd,led->nle", rows, self.moves)
