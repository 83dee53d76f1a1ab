"""USCD: contrast with the target's logits for a weakened prompt where the target is unsure.

Shuai Wang, Liang Ding, Li Shen, Yong Luo, Zheng He, Wei Yu, Dacheng Tao: USCD: Improving Code
Generation of LLMs by Uncertainty-Aware Selective Contrastive Decoding, 2024, arXiv:2409.05923.

The contrast changes the target's distribution, as temperature does, so every method is compared
with it (`--contrast`; `weakened` reads the weakened prompt).
Differs from the paper, which removes the examples of a few-shot prompt: here the weakened prompt is
the end of the request's own prompt, so every task has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contrast:
    """Combination of the logits of the whole prompt and of the weakened prompt.

    A row is contrasted if its normalized standard deviation is at most `below`. Each logit then
    becomes z + beta (z - z_weakened), and tokens with less than `floor` times the greatest
    probability are removed. All other rows are unchanged.

    Attributes:
        beta: Strength of the contrast; 0 for none.
        keep: Share of the prompt's tokens at its end that the weakened prompt keeps, after the
            first token.
        below: Maximum normalized standard deviation of a contrasted row, 0 to 1.
        floor: Minimum share of the greatest probability; 0 keeps all tokens.
    """

    beta: float = 0.5
    keep: float = 0.5
    below: float = 0.45
    floor: float = 0.1

    def weaken(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the weakened prompt: the first token, an attention sink in many models, and the
        last ones."""
        rest = len(prompt) - 1
        kept = min(rest, max(1, round(self.keep * rest)))
        return (*prompt[:1], *prompt[1 + rest - kept :])

    def apply(self, rows: Tensor, weak: Tensor) -> Tensor:
        """Return the logits of the whole prompt, contrasted with those of the weakened one.

        Args:
            rows, weak: [n, V] each, after the same tokens.

        Returns:
            [n, V] in float32, or float64 for float64 logits; minus infinity for removed tokens.
        """
        kind = torch.promote_types(rows.dtype, torch.float32)
        whole, weak = rows.to(kind), weak.to(kind)
        p = whole.softmax(-1)
        # No difference for tokens with probability 0 in one of the two.
        differs = (whole - weak).masked_fill(whole.isneginf() | weak.isneginf(), 0.0)
        moved = whole + self.beta * differs
        moved = moved.masked_fill(p < self.floor * p.amax(-1, keepdim=True), -math.inf)
        return torch.where((normalized_std(p) <= self.below)[:, None], moved, whole)

    @property
    def error_factor(self) -> float:
        """Maximum factor by which an error of the logits grows. Both forwards have the error."""
        return 1.0 + 2.0 * self.beta

    def borderline_variants(self, vocab: int, error: float) -> tuple[Contrast, ...]:
        """Return this contrast with its two thresholds moved as far as errors of the logits may
        move them.

        Probabilities are then wrong by a factor of at most e^(2 error), which moves a row's
        standard deviation and a token's share by the same factor.

        Args:
            vocab: V.
            error: Maximum error of each logit.
        """
        least, factor = 1.0 / vocab, math.exp(2.0 * error)
        squares = [(self.below**2 * (1.0 - least) + least) * by for by in (factor**2, factor**-2)]
        borders = [math.sqrt(max(0.0, each - least) / (1.0 - least)) for each in squares]
        return tuple(
            replace(self, below=below, floor=self.floor * by)
            for below in borders
            for by in (1.0 / factor, factor)
        )


def normalized_std(p: Tensor) -> Tensor:
    """Return the normalized standard deviation [n] of distributions [n, V].

    It is 1 for a one-hot distribution, and 0 for the uniform one.
    """
    even = 1.0 / p.shape[-1]
    return (((p * p).sum(-1) - even).clamp_min(0.0) / (1.0 - even)).sqrt()
