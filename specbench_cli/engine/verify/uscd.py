"""USCD: contrastive decoding with a weakened prompt, for tokens where the target is unsure.

Shuai Wang, Liang Ding, Li Shen, Yong Luo, Zheng He, Wei Yu, Dacheng Tao: USCD: Improving Code
Generation of LLMs by Uncertainty-Aware Selective Contrastive Decoding, 2024, arXiv:2409.05923.

The contrast (`--contrast`) changes the target's distribution, as temperature does. It applies to
all methods of a run, and is not a method itself. `weakened_prompt` runs the target on the weakened
prompt.
Differs from the paper, which removes the examples of a few-shot prompt to weaken it. Here the
weakened prompt is the end of the request's own prompt, so it exists for every task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contrast:
    """Combination of the logits for the full prompt and for the weakened prompt.

    A row of logits is contrasted if the normalized standard deviation of its distribution is at
    most
    `below`: the target is then unsure. Each logit becomes z + beta (z - z_weakened). Tokens with
    less than `floor` times the largest probability get -inf. All other rows do not change.

    Attributes:
        beta: Strength of the contrast; 0 for none.
        keep: Length of the weakened prompt, as a share of the prompt. The first token is not
            counted.
        below: Maximum normalized standard deviation of a contrasted row, 0 to 1.
        floor: Minimum probability of a token, as a share of the largest one; 0 keeps all tokens.
    """

    beta: float = 0.5
    keep: float = 0.5
    below: float = 0.45
    floor: float = 0.1

    def weaken(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the first token and the last ones of a prompt.

        The first token stays because it is an attention sink in many models.
        """
        rest = len(prompt) - 1
        kept = min(rest, max(1, round(self.keep * rest)))
        return (*prompt[:1], *prompt[1 + rest - kept :])

    def apply(self, rows: Tensor, weak: Tensor) -> Tensor:
        """Return the contrasted logits.

        Args:
            rows, weak: [n, V] each, logits with the full and with the weakened prompt, after the
                same output tokens.

        Returns:
            [n, V] in float32, or float64 for float64 logits.
        """
        kind = torch.promote_types(rows.dtype, torch.float32)
        whole, weak = rows.to(kind), weak.to(kind)
        p = whole.softmax(-1)
        # -inf in one of the two has no useful difference; treat it as 0.
        differs = (whole - weak).masked_fill(whole.isneginf() | weak.isneginf(), 0.0)
        moved = whole + self.beta * differs
        moved = moved.masked_fill(p < self.floor * p.amax(-1, keepdim=True), -math.inf)
        return torch.where((normalized_std(p) <= self.below)[:, None], moved, whole)

    @property
    def error_factor(self) -> float:
        """Maximum factor by which the contrast amplifies a rounding error of the logits."""
        return 1.0 + 2.0 * self.beta

    def borderline_variants(self, vocab: int, error: float) -> tuple[Contrast, ...]:
        """Return this contrast with thresholds shifted by the effect of rounding errors.

        The judge uses the variants to find outputs that a rounding error can explain. Errors of the
        logits change a probability by a factor of at most e^(2 error). A row's standard deviation
        and a token's share of the largest probability change by at most the same factor.

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
