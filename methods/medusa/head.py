"""Draft heads of Medusa.

Tianle Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads,
ICML 2024, arXiv:2401.10774, section 2.1.

Head k (counted from 0) reads the target's last hidden state h. It predicts the token k + 2
positions later, with the logits U_k (h + SiLU(W_k h + b_k)). Before training, W_k is zero and U_k
is the target's output matrix, so each head predicts the target's next token.
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
"""Pattern of tensor names in the authors' checkpoints. Group 1 is the head, group 2 the index in
it.

With `linear` the tensor belongs to a residual block, otherwise to the output matrix.
"""


class MedusaHeads(FeatureHead):
    """Medusa's draft heads. Batched matrix products compute all heads at once.

    Args:
        target: Target that the heads draft for.
        levels: Number of heads.
        blocks: Number of residual blocks per head. The authors use one.
        own_output: Whether each head has its own output matrix, as in the paper. If False, all
            heads use the target's output matrix, which keeps the heads of small models small.
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
        """Return the logits of all heads, [levels, n, vocab]."""
        hidden = rows.expand(self.sizes["levels"], *rows.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            hidden = hidden + silu(torch.baddbmm(bias, hidden, weight.mT))
        return self.target.unembed(hidden) if self.output is None else hidden @ self.output.mT

    @classmethod
    def load(cls, folder: Path, decoders: Mapping[str, Decoder]) -> Self:
        """Load heads in the format of specbench or of the authors' code.

        In the authors' code (github.com/FasterDecoding/Medusa), the tensor `K.B.linear` is block B
        of head K. The output matrix of a head has the number after its last block.
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
    """Return the target's output matrix [vocab, hidden], on the CPU.

    The target may store the matrix in another form, such as quantized. The matrix is therefore
    computed as the logits of unit vectors.
    """
    ones = torch.eye(target.hidden_size, device=target.device, dtype=target.dtype)
    with torch.no_grad():
        return target.unembed(ones).T.contiguous().cpu()
