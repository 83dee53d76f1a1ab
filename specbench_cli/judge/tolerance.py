"""The tolerance of near-ties: how much two correct forwards of one model differ.

In exact arithmetic, one forward over n tokens equals n cached forwards over one token. Rounding
makes them differ. The difference is measured on transformers' own module, because the engine is
being judged.
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
"""Maximum difference that rounding may explain, in logits, by the dtype of the weights."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A measured tolerance, in logits.

    value: Maximum gap between a token's score and the best one: twice `largest`, at most `ceiling`.
    largest: Largest difference of a logit between the two computations.
    ceiling: Limit for the dtype.
    positions: Number of measured positions.
    """

    value: float
    largest: float
    ceiling: float
    positions: int


def measure_tolerance(
    module: Any, sequences: Iterable[Sequence[int]], positions: int = POSITIONS
) -> Tolerance:
    """Measure the tolerance of a transformers module.

    Args:
        module: A language model of transformers.
        sequences: Token ids, preferably of texts of the run. Read until `positions` are measured.
        positions: Number of positions to measure.

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
        raise ValueError("a tolerance needs at least one token to be measured on")
    ceiling = CEILING[module.dtype]
    return Tolerance(min(2 * largest, ceiling), largest, ceiling, done)


def _largest_difference(oracle: Oracle, text: Sequence[int]) -> float:
    source = oracle.self_source(text)
    at_once = oracle.logits(text, source, len(text))
    worst = torch.zeros((), device=oracle.device)
    for row, alone in zip(at_once, oracle.stepwise_logits(text, source), strict=True):
        difference = torch.where(alone == row, 0.0, (alone - row).abs())  # of infinities too
        worst = torch.maximum(worst, difference.max())
    if not bool(worst.isfinite()):
        raise ArithmeticError("the target's logits are not finite on the run's own questions")
    return float(worst)
