"""The draft head of EAGLE-1 and EAGLE-2.

Li, Wei, Zhang and Zhang: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, ICML
2024, arXiv:2401.15077.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from methods._heads.files import HeadFiles
from methods._heads.layer import LayerHead, random_layer, random_matrix
from specbench_cli.api import NORMED, Decoder


class EagleHead(LayerHead):
    """Slot t joins the token x_{t+1} and the feature f_t, which the target's output matrix reads.

    [embed(x_{t+1}), f_t] through `fc` enters a layer whose attention reads it without a norm; what
    leaves it is the predicted feature f_{t+1}, whose logits by the target's output matrix are those
    of x_{t+2}. Later levels of a draft read the predicted feature in place of the true one.
    """

    kind: ClassVar[str] = "eagle"
    taps = (NORMED,)
    first_norm = None

    def _join(self, tokens: Tensor, rows: Tensor) -> Tensor:
        return self.fc(torch.cat((tokens, rows), -1))

    @classmethod
    def random_files(cls, target: Decoder, seed: int) -> HeadFiles:
        """See `LayerHead`."""
        width = target.hidden_size
        shape, tensors, generator = random_layer(target, seed, reads=width)
        tensors["fc.weight"] = random_matrix(width, 2 * width, generator)
        return HeadFiles("a random head", tensors, shape)
