"""Distributions by context, the last token, and a grammar's matcher in plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbench_cli.audit.models.table import random_table
from specbench_cli.engine.verify.sampling import Sampling, warp

PLAIN = Sampling("rejection", 1.0)


def distributions(
    kind: str, vocab: int = 3, sampling: Sampling = PLAIN, seed: int = 41
) -> tuple[Tensor, Tensor]:
    """Return q and p [V + 1, V] by context; row V, index -1, is for the root."""
    scale = {"peaked": 4.0, "flat": 0.2}.get(kind, 1.5)
    target, draft = (random_table(vocab + 1, s, scale)[0, :, :vocab] for s in (seed, seed + 1))
    if kind == "near":
        draft = target + 0.3 * draft
    if kind == "equal":
        draft = target.clone()
    if kind == "disjoint":
        draft[:, : (vocab + 1) // 2] = target[:, (vocab + 1) // 2 :] = -torch.inf
    if kind == "cut":  # as with top-k: each excludes a token of the other
        draft[:, 0] = target[:, -1] = -torch.inf
    return warp(draft, sampling), warp(target, sampling)


def distribution_of_target(p: Tensor, n: int) -> dict[tuple[int, ...], float]:
    """Return the distribution of n tokens by the chain rule."""
    distribution = {}
    for ids in itertools.product(range(p.shape[-1]), repeat=n):
        weight = float(p[[-1, *ids[:-1]], ids].prod())
        if weight > 0:
            distribution[ids] = weight
    return distribution


class Matcher:
    """A matcher of the texts that `fitting` allows.

    Args:
        fitting: returns the tokens allowed behind a text, by all of it.
    """

    def __init__(self, fitting: Callable[[list[int]], set[int]], text: Sequence[int] = ()) -> None:
        self.fitting, self.text = fitting, [*text]

    def deep_copy(self) -> Matcher:
        return Matcher(self.fitting, self.text)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        fits = {*tokens} <= self.fitting(self.text)
        self.text += tokens if fits else []
        return int(fits)

    def rollback(self, n: int) -> bool:
        del self.text[len(self.text) - n :]
        return True

    def compute_bitmask(self) -> bytes:
        return bytes([sum(1 << token for token in self.fitting(self.text))])

    def is_error(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""
