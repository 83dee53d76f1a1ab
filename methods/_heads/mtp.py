"""A multi-token-prediction layer, as recent checkpoints ship it, as a draft head.

DeepSeek-AI: DeepSeek-V3 Technical Report, arXiv:2412.19437; here as XiaomiMiMo/MiMo computes it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from methods._heads.files import HeadFiles
from methods._heads.layer import LayerHead, random_layer, random_matrix
from specbench_cli.api import NORMED, Decoder, LayerReader


class MtpHead(LayerHead):
    """Slot t joins the token x_{t+1} and h_t, the row that the target's output matrix reads.

    [norm(embed(x_{t+1})), norm(h_t)] through `fc` enters a whole layer; what leaves it, through a
    final norm of the head's own, gives logits of x_{t+2} by the target's output matrix and takes
    h's place at later levels of a draft.
    """

    kind: ClassVar[str] = "mtp"
    taps = (NORMED,)

    def __init__(self, files: HeadFiles, target: Decoder) -> None:
        super().__init__(files, target)
        self._hidden_first = files.hidden_first

    def _read_rest(self, read: LayerReader) -> None:
        self._enorm, self._hnorm, self._final = map(read.norm, ("enorm", "hnorm", "norm"))
        self.weight_bytes += 3 * self._final.nbytes

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        parts = [self._norm(tokens, self._enorm), self._norm(rows, self._hnorm)]
        if self._hidden_first:
            parts.reverse()
        return self.fc(torch.cat(parts, -1))

    def _run_layer(self, *given: Any) -> Tensor:
        """The final norm ends the layer: what is said and what is fed back are one row."""
        return self._norm(super()._run_layer(*given), self._final)

    @classmethod
    def random_files(cls, target: Decoder, seed: int) -> HeadFiles:
        """See `LayerHead`."""
        width = target.hidden_size
        shape, tensors, generator = random_layer(target, seed, reads=width)
        tensors["fc.weight"] = random_matrix(width, 2 * width, generator)
        for norm in ("enorm", "hnorm", "norm", "layer.input_layernorm"):
            tensors[f"{norm}.weight"] = torch.ones(width)
        return HeadFiles("a random head", tensors, shape)
