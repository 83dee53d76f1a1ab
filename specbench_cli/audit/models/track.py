"""Tables that lead a text along a fixed track and leave doubt at chosen places of it alone.

All chance is in these places, so that few outcomes show what a method does late in a draft, late in
a text, or behind a given history of accepted and rejected tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Literal

import torch
from torch import Tensor

TrackPlace = Literal["sure", "wrong", "fork", "doubt"]
"""What the models say at a place. "sure": both are sure of the same token. "wrong": the draft is
sure of another token than the target. "fork": both draw from two tokens; "doubt": from several."""

START = (1, 0)
"""The last two tokens of the prompt that a track begins behind."""


@lru_cache(maxsize=64)
def track_pair(
    places: tuple[TrackPlace, ...], choices: int = 2, seed: int = 21
) -> tuple[Tensor, Tensor]:
    """Return the tables [V, V, V] of a target and its draft, for an output of `len(places)` tokens.

    A token is `base + B * choice`. Two bases in a row occur at one place only, so the last two
    tokens say which place it is, and what was chosen at the last two places. At a place in doubt
    the two distributions depend on these choices.

    Args:
        places: output token by output token.
        choices: tokens that a place in doubt may have.
        seed: seeds the distributions of the places in doubt.
    """
    bases = _bases(len(places))
    size = 1 + max(*bases, *START)
    vocab = size * choices
    generator = torch.Generator().manual_seed(seed)
    # Sure rows differ in their one logit, so that a head can tell places apart by their features.
    named = torch.arange(vocab * vocab, dtype=torch.float64).view(vocab, vocab) / vocab**2
    target = torch.full((vocab,) * 3, -math.inf, dtype=torch.float64)
    target[..., 0] = named
    draft = target.clone()
    text = (*START, *bases)
    for at, place in enumerate(places):
        before, last, base = text[at : at + 3]
        for a in range(before, vocab, size):
            for b in range(last, vocab, size):
                target[a, b, 0] = draft[a, b, 0] = -math.inf
                if place in ("doubt", "fork"):
                    n = 2 if place == "fork" else choices
                    both = 1.5 * torch.randn(2, n, generator=generator, dtype=torch.float64)
                    ids = slice(base, base + n * size, size)
                    target[a, b, ids], draft[a, b, ids] = both
                else:
                    target[a, b, base] = named[a, b]
                    wrong = (base + size) % vocab if place == "wrong" else base
                    draft[a, b, wrong] = named[a, b]
    return target, draft


def _bases(n: int) -> Sequence[int]:
    """Return n numbers below the least possible prime; no two occur next to each other twice, and
    (1, 0), which the prompt ends with, never."""
    size = next(
        size
        for size in count(3)
        if size * (size - 2) + 1 >= n and all(size % d for d in range(2, size))
    )
    return [step * k % size for step in range(1, size) for k in range(1, size + 1)][:n]
