"""Tables in which only a few chosen positions of the text are random (a "track").

At all other positions, one token has probability 1. So there are few outcomes, even for cases that
test a method late in a draft, late in a text, or after accepted and rejected tokens.
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
"""Kind of a text position. "sure": both models give the same token probability 1. "wrong": the
draft gives another token probability 1. "fork": two tokens are possible. "doubt": several are."""

START = (1, 0)
"""The last two prompt tokens before a track."""


@lru_cache(maxsize=64)
def track_pair(
    places: tuple[TrackPlace, ...], choices: int = 2, seed: int = 21
) -> tuple[Tensor, Tensor]:
    """Return the tables [V, V, V] of a target and its draft, for an output of `len(places)` tokens.

    A token is `base + B * choice`. Each pair of consecutive bases occurs at one place only. So the
    last two tokens identify the place and the choices at the last two places. At a "doubt" place
    the two distributions depend on these choices.

    Args:
        places: kind of each output token.
        choices: number of possible tokens at a "doubt" place.
        seed: random seed of the distributions at "doubt" places.
    """
    bases = _bases(len(places))
    size = 1 + max(*bases, *START)
    vocab = size * choices
    generator = torch.Generator().manual_seed(seed)
    # The features of a text are its logits. At a place where the next token is certain, all logits
    # but one are -inf, and the value of that one is free. It is different at each place, so that a
    # head can identify the place.
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
    """Return n numbers in which no pair of neighbours occurs twice.

    All numbers are below the smallest prime that suffices. The pair (1, 0) does not occur, because
    the
    prompt ends with it.
    """
    size = next(
        size
        for size in count(3)
        if size * (size - 2) + 1 >= n and all(size % d for d in range(2, size))
    )
    return [step * k % size for step in range(1, size) for k in range(1, size + 1)][:n]
