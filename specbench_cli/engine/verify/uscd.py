"""USCD: contrastive decoding with a weakened prompt, for tokens where the target is unsure.

Shuai Wang, Liang Ding, Li Shen, Yong Luo, Zheng He, Wei Yu, Dacheng Tao: USCD: Improving Code
Generation of LLMs by Uncertainty-Aware Selective Contrastive Decoding, 2024, arXiv:2409.05923.

Contrastive decoding (`--contrast`) changes the target's distribution, as temperature does. It
applies to all methods of a run, and is not a method itself. The module `weakened_prompt` runs the
target on the weakened prompt.

The paper weakens a few-shot prompt by removing its examples. Here the weakened prompt is the end of
the request's own prompt, so it exists for every task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contrast:
    """Combination of the logits for the full prompt and the logits for the weakened prompt.

    The target is unsure if the normalized standard deviation of its distribution is at most
    `below`. Only the logits of such rows change: each logit z becomes z + beta (z - z_weakened).
    Tokens with less than `floor` times the largest probability then get -inf.

    Attributes:
        beta: Strength of the contrast. 0 means no contrast.
        keep: Length of the weakened prompt, as a share of the prompt. The first token is not
            counted.
        below: Maximum normalized standard deviation of a changed row, 0 to 1.
        floor: Minimum probability of a token, as a share of the largest probability. 0 keeps all
            tokens.
    """

    beta: float = 0.5
    keep: float = 0.5
    below: float = 0.45
    floor: float = 0.1

    def weaken(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the weakened prompt: the first token and the last tokens of a prompt.

        The first token stays because it is an attention sink in many models.
        """
        rest = len(prompt) - 1
        kept = min(rest, max(1, round(self.keep * rest)))
        return (*prompt[:1], *prompt[1 + rest - kept :])

    def apply(self, rows: Tensor, weak: Tensor) -> Tensor:
        """Return the logits after contrastive decoding.

        Args:
            rows, weak: Logits [n, V] with the full prompt, and logits [n, V] with the weakened
                prompt, after the same output tokens.

        Returns:
            [n, V] in float32, or in float64 for float64 logits.
        """
        kind = torch.promote_types(rows.dtype, torch.float32)
        whole, weak = rows.to(kind), weak.to(kind)
        p = whole.softmax(-1)
        # If one of the two logits is -inf, their difference has no meaning. Treat it as 0.
        differs = (whole - weak).masked_fill(whole.isneginf() | weak.isneginf(), 0.0)
        moved = whole + self.beta * differs
        moved = moved.masked_fill(p < self.floor * p.amax(-1, keepdim=True), -math.inf)
        return torch.where((normalized_std(p) <= self.below)[:, None], moved, whole)

    @property
    def error_factor(self) -> float:
        """Maximum factor by which contrastive decoding amplifies a rounding error of the logits."""
        return 1.0 + 2.0 * self.beta

    def borderline_variants(self, vocab: int, error: float) -> tuple[Contrast, ...]:
        """Return variants of this object for logits with rounding errors.

        Rounding errors can move a row across a threshold, so each variant has shifted thresholds.
        With these variants, the audit finds outputs that a rounding error can explain. Errors of
        the logits change a probability by a factor of at most e^(2 error). A row's standard
        deviation changes by at most the same factor, and so does a token's share of the largest
        probability.

        Args:
            vocab: Vocabulary size V.
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

    It is 1 for a one-hot distribution and 0 for a uniform distribution.
    """
    even = 1.0 / p.shape[-1]
    return (((p * p).sum(-1) - even).clamp_min(0.0) / (1.0 - even)).sqrt()
