"""How far two honest forwards of one model lie apart: the tolerance of near-ties.

One forward over n tokens and n cached forwards over one token each are the same function in exact
arithmetic. They round differently, and by how much is measured, on transformers' own module and
never on ours, which is what is being judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specbench_cli.judge.oracle import Oracle

POSITIONS = 512
"""Positions measured, as far as the sequences given have so many."""

CEILING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}
"""The most that rounding is allowed to explain, in logits, by the dtype of the weights."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A measured tolerance; all in units of logits.

    value: what a token's score may lack of the best one: twice `largest`, at most `ceiling`.
    largest: the largest difference of any logit between the two ways of computing it.
    ceiling: the bound that the dtype sets.
    positions: number of positions measured.
    """

    value: float
    largest: float
    ceiling: float
    positions: int


def measure_tolerance(
    module: Any, sequences: Iterable[Sequence[int]], positions: int = POSITIONS
) -> Tolerance:
    """Compare the two kinds of forward on a transformers module.

    Args:
        module: a language model of transformers.
        sequences: ids, best the texts that the model was run on; read until `positions` are done.
        positions: how many to measure.
    Raises:
        ValueError: the sequences hold no token at all.
        ArithmeticError: the module's logits are not finite.
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
