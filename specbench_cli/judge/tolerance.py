"""Tolerance of near-ties: how much the logits of two correct programs may differ.

In exact arithmetic, one forward over n tokens gives the same logits as n cached forwards over one
token each. Rounding makes the logits differ. This module measures the difference with the
transformers model of the target. It does not use the engine, because the engine is being judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbench_cli.judge.oracle import Oracle

POSITIONS = 512
"""Maximum number of positions that are measured."""

CEILING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}
"""Largest difference of logits that counts as rounding, by the dtype of the weights."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A measured tolerance, in units of logits.

    value: A token counts as tied if its logit is at most this far below the best logit. The value
        is twice `largest`, but at most `ceiling`.
    largest: Largest measured difference of a logit between one long forward and several short
        forwards.
    ceiling: Upper limit of `value` for the dtype of the model (`CEILING`).
    positions: Number of measured positions.
    """

    value: float
    largest: float
    ceiling: float
    positions: int


def measure_tolerance(
    module: Any, sequences: Iterable[Sequence[int]], positions: int = POSITIONS
) -> Tolerance:
    """Measure the tolerance of a transformers model.

    Args:
        module: A language model of transformers.
        sequences: Token ids of texts, preferably of the run's prompts.
        positions: Number of tokens to measure. After this number, no further sequence is read.

    Raises:
        ValueError: the sequences contain no token.
        ArithmeticError: the logits are not finite.
    """
    oracle, largest, done = Oracle(module), 0.0, 0
    for sequence in sequences:
        ids = list(sequence)[: positions - done]
        if ids:
            largest = max(largest, _largest_difference(oracle, ids))
            done += len(ids)
        if done == positions:
            break
    if done == 0:
        raise ValueError("at least one token is needed to measure the tolerance")
    ceiling = CEILING[module.dtype]
    return Tolerance(min(2 * largest, ceiling), largest, ceiling, done)


def _largest_difference(oracle: Oracle, text: Sequence[int]) -> float:
    source = oracle.self_source(text)
    at_once = oracle.logits(text, source, len(text))
    worst = torch.zeros((), device=oracle.device)
    for row, alone in zip(at_once, oracle.stepwise_logits(text, source), strict=True):
        # Two infinite logits of the same sign are equal, but their difference would be NaN. Use 0.
        difference = torch.where(alone == row, 0.0, (alone - row).abs())
        worst = torch.maximum(worst, difference.max())
    if not bool(worst.isfinite()):
        raise ArithmeticError("the target's logits are not finite for the questions of this run")
    return float(worst)
