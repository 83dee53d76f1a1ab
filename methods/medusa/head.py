"""Draft heads of Medusa.

Tianle Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads,
ICML 2024, arXiv:2401.10774, section 2.1.

Head k reads the hidden state h before the target's output matrix, and predicts the token k + 2
positions later as U_k (h + SiLU(W_k h + b_k)). W_k starts at zero and U_k at the target's output
matrix, so that a head first predicts the target's own next token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from methods._heads.files import copy_tensors
from specbench_cli.api import Decoder, FeatureHead, Weights

PUBLISHED = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
"""Tensor names of the authors' checkpoints: the head, and the index of the block (`linear`) or the
matrix in it."""


class MedusaHeads(FeatureHead):
    """Medusa's heads, computed together: one product for their blocks, one for their output
    matrices.

    Args:
        levels: Number of heads.
        blocks: Number of residual blocks per head; the authors' have one.
        own_output: Whether each head has its own output matrix, as in the paper. Otherwise all
            share the target's. In small models these matrices would be most of the heads' weights.
    """

    kind: ClassVar[str] = "medusa"
    trained: ClassVar[Mapping[str, Any]] = {"own_output": False}

    def __init__(
        self, target: Decoder, levels: int = 4, blocks: int = 1, own_output: bool = True
    ) -> None:
        super().__init__(target, levels=levels, blocks=blocks, own_output=own_output)
        width = self.width
        self.weight = nn.Parameter(torch.zeros(blocks, levels, width, width))
        self.bias = nn.Parameter(torch.zeros(blocks, levels, 1, width))
        self.output = None
        if own_output:
            self.output = nn.Parameter(torch.empty(levels, self.vocab_size, width))
            self.output.data.copy_(read_output_matrix(target).expand_as(self.output))

    def forward(self, rows: Tensor) -> Tensor:
        """See `FeatureHead.forward`."""
        moved = rows.expand(self.sizes["levels"], *rows.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            moved = moved + silu(torch.baddbmm(bias, moved, weight.mT))
        return self.target.unembed(moved) if self.output is None else moved @ self.output.mT

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load our format, or the authors' (github.com/FasterDecoding/Medusa).

        There, `K.B.linear` are the blocks of head K, followed by its output matrix.
        """
        weights = Weights(folder)
        found = {name: match for name in weights if (match := PUBLISHED.fullmatch(name))}
        if not found:
            return super().load(folder, decoders)
        levels = 1 + max(int(match[1]) for match in found.values())
        blocks = 1 + max((int(match[2]) for match in found.values() if match[3]), default=0)
        sizes = {"levels": levels, "blocks": blocks}
        head = cls.from_sizes(decoders["target"], sizes, weights, folder)
        assert head.output is not None
        places = {}
        for at in range(levels):
            places[f"{at}.{blocks}.weight"] = head.output[at]
            for block in range(blocks):
                places[f"{at}.{block}.linear.weight"] = head.weight[block, at]
                places[f"{at}.{block}.linear.bias"] = head.bias[block, at, 0]
        named = {name.removeprefix("medusa_head."): weights[name] for name in weights}
        copy_tensors(places, named, f"{folder.name}: Medusa heads (FasterDecoding)", cls.kind)
        return head.ready()


def read_output_matrix(target: Decoder) -> Tensor:
    """Return the target's output matrix, [V, width], on the CPU, computed from unit vectors."""
    ones = torch.eye(target.hidden_size, device=target.device, dtype=target.dtype)
    with torch.no_grad():
        return target.unembed(ones).T.contiguous().cpu()
