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
    """How logits of the whole prompt and of the weakened one are put together.

    A row is contrasted where its spread is at most `below`. Then logit by logit it becomes
    z + beta (z - z_weakened), and tokens whose probability was less than `floor` times the
    greatest one are left out. All other rows stay as they are.

    Attributes:
        beta: how far a row is moved; 0: not at all.
        keep: share of the prompt's tokens, the last ones, that the weakened prompt has behind the
            first one.
        below: greatest spread of a row that is contrasted, 0 to 1.
        floor: share of the greatest probability that a token must have; 0: none.
    """

    beta: float = 0.5
    keep: float = 0.5
    below: float = 0.45
    floor: float = 0.1

    def weaken(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The weakened prompt: the first token, which many models lean on, and the last ones."""
        rest = len(prompt) - 1
        kept = min(rest, max(1, round(self.keep * rest)))
        return (*prompt[:1], *prompt[1 + rest - kept :])

    def apply(self, rows: Tensor, weak: Tensor) -> Tensor:
        """Logits of the whole prompt, contrasted with those of the weakened one.

        Args:
            rows, weak: [n, V] each, behind the same tokens.
        Returns:
            [n, V] in float32 (float64 if given so); minus infinity where a token is left out.
        """
        kind = torch.promote_types(rows.dtype, torch.float32)
        whole, weak = rows.to(kind), weak.to(kind)
        p = whole.softmax(-1)
        # Of a token that one of the two cannot say there is no difference.
        differs = (whole - weak).masked_fill(whole.isneginf() | weak.isneginf(), 0.0)
        moved = whole + self.beta * differs
        moved = moved.masked_fill(p < self.floor * p.amax(-1, keepdim=True), -math.inf)
        return torch.where((normalized_std(p) <= self.below)[:, None], moved, whole)

    @property
    def error_factor(self) -> float:
        """By how much at most an error of logits grows: both readings have it."""
        return 1.0 + 2.0 * self.beta

    def borderline_variants(self, vocab: int, error: float) -> tuple[Contrast, ...]:
        """This contrast with its two borders as far off as errors of logits may move them.

        Probabilities are then off by the factor e^(2 error) at most, and what is asked of a row's
        spread and of a token's share is as much as that more, or less.

        Args:
            vocab: V.
            error: of each logit, at most.
        """
        least, off = 1.0 / vocab, math.exp(2.0 * error)
        squares = [(self.below**2 * (1.0 - least) + least) * by for by in (off**2, off**-2)]
        borders = [math.sqrt(max(0.0, each - least) / (1.0 - least)) for each in squares]
        return tuple(
            replace(self, below=below, floor=self.floor * by)
            for below in borders
            for by in (1.0 / off, off)
        )


def normalized_std(p: Tensor) -> Tensor:
    """How far from even distributions [n, V] are, [n]: their standard deviation over the
    vocabulary, in that of a sure one, which is 1; 0 where all tokens are as likely."""
    even = 1.0 / p.shape[-1]
    return (((p * p).sum(-1) - even).clamp_min(0.0) / (1.0 - even)).sqrt()
