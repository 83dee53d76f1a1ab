"""The draft heads of Hydra.

Zachary Ankner et al.: Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding, COLM 2024,
arXiv:2402.05109, section 3.

Head k reads the row h that the target's output matrix reads, beside the target's embeddings of the
last committed token and of the k tokens drafted behind it, x = [h, E(y_0), ..., E(y_k)], and says
y_{k+1}: U_k (A_k x + SiLU(B_k x)). B_k begins with zeros.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from methods._heads.medusa import output_matrix
from specbench_cli.api import Decoder, Said, SequentialHead


class HydraHeads(SequentialHead):
    """One head a level.

    Args:
        levels: how many heads.
        blocks: how many there are in a head: the first brings all that is read to the target's
            width, further ones are residual.
        own_output: whether each head has an output matrix of its own, as in the paper; without one
            all share the target's.
    """

    kind: ClassVar[str] = "hydra"

    def __init__(
        self, target: Decoder, levels: int = 4, blocks: int = 1, own_output: bool = True
    ) -> None:
        super().__init__(target, levels=levels, blocks=blocks, own_output=own_output)
        width = target.hidden_size
        self.heads = nn.ModuleList(
            _Head(self.width, (level + 1) * width, width, blocks) for level in range(levels)
        )
        self.outputs = nn.ParameterList()
        if own_output:
            self.outputs.extend(nn.Parameter(output_matrix(target)) for _ in range(levels))

    def forward(self, rows: Tensor, ids: Tensor, level: int) -> Said:  # type: ignore[override]
        """See `SequentialHead.forward`; what it leaves is all that it read."""
        read = torch.cat((rows, self.target.embed(ids)), -1)
        moved = self.heads[level](read)
        if self.outputs:
            return Said(moved @ self.outputs[level].T, read)
        return Said(self.target.unembed(moved), read)


class _Head(nn.Module):
    """Begins with the first `width` of the target's numbers, whatever was drafted."""

    def __init__(self, features: int, drafted: int, width: int, blocks: int) -> None:
        super().__init__()
        self.through = nn.Linear(features + drafted, width)
        self.mixed = nn.Linear(features + drafted, width)
        self.further = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks - 1))
        for layer in (self.through, self.mixed, *self.further.children()):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        nn.init.eye_(self.through.weight)

    def forward(self, read: Tensor) -> Tensor:
        moved: Tensor = self.through(read) + silu(self.mixed(read))
        for block in self.further:
            moved = moved + silu(block(moved))
        return moved
