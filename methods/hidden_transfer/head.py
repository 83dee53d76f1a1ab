"""The draft head of Parallel Decoding via Hidden Transfer.

Pengfei Wu, Jiahao Liu, Zhuocheng Gong, Qifan Wang, Jinpeng Li, Jingang Wang, Xunliang Cai, Dongyan
Zhao: Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration,
arXiv:2404.12022.

From h, the row of a token that enters layer L, step k makes the pseudo hidden state W_k h of the
token k places behind it, which goes through layers L, L + 1, ... at that place and is read by the
target's own output matrix. W_k = I + D_k, and D_k begins with zeros: so W_k decays to the identity.
There are no other parameters.

The paper's: linear maps at a middle layer, attention of pseudo states to those before them, a
frozen target, its distribution as the aim. Ours, since no code of the authors' was found: one layer
for all steps, the middle one, and a fixed number of steps.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from specbench_cli.api import Decoder, LookAhead


class TransferMaps(LookAhead):
    """The D_k, [levels, width, width].

    Args:
        levels: how many steps.
        layer: L; default: the middle one.
    """

    kind: ClassVar[str] = "hidden-transfer"

    def __init__(self, target: Decoder, levels: int = 3, layer: int | None = None) -> None:
        super().__init__(target, levels, layer)
        width = target.hidden_size
        self.moves = nn.Parameter(torch.zeros(levels, width, width))

    def forward(self, rows: Tensor) -> Tensor:
        """See `LookAhead.forward`."""
        return rows[:, None] + torch.einsum("nd,led->nle", rows, self.moves)
