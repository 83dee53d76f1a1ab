"""Replay: verification against tokens that were recorded, so that all methods walk one path.

Not the target but the recording decides: a draft token stands iff the recording has it there, and
the recorded token after it is committed. Every method then emits the same tokens at any temperature
and dtype, and counters and times pair exactly; of the output's law that proves nothing. The target
still computes every row, so that steps cost what they cost, less the choice itself. Under sampling
a draft drawn from q agrees with a token drawn from p less often than rejection accepts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

END = -1
"""What is recorded behind the last token: no draft token equals it, and it is never committed,
since the stop rule ends the output before it."""


class Recording:
    """An output to be walked again.

    Args:
        ids: its tokens, from output index 0.
        device: where choices are wanted.
    """

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self._ids = torch.tensor([*ids, END], dtype=torch.int64, device=device)

    def choices(self, first: int, depths: Sequence[int]) -> Tensor:
        """The tokens [n] recorded at output indices first + depth; `END` beyond the last."""
        end = self._ids.shape[0] - 1
        at = torch.tensor([min(first + depth, end) for depth in depths], device=self._ids.device)
        return self._ids[at]
