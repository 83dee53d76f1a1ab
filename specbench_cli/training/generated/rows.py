"""Rows of a split, as a pure function of (seed, split, index)."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Literal, TypedDict, get_args

from specbench_cli.errors import UsageError
from specbench_cli.training.generated.template import FAMILIES, TEMPLATES, Draw

Split = Literal["train", "open", "mini"]
"""`train`: all wordings; `open`: those that are not held out; `mini`: the held-out on half B."""


class GeneratedConversation(TypedDict):
    """One generated conversation; `reference` holds the whole answer expected at each turn."""

    id: str
    family: str
    category: str
    template: str
    turns: list[str]
    reference: list[str]


def generate_row(seed: int, split: Split, index: int) -> GeneratedConversation:
    """Row `index` of a split: families take turns, and so do templates inside a family."""
    rng = random.Random(f"{split}/{seed}/{index}")  # a text seed is hashed, the same everywhere
    family = FAMILIES[index % len(FAMILIES)]
    known = [
        t
        for t in TEMPLATES
        if t.family == family and (split == "train" or t.held_out == (split == "mini"))
    ]
    chosen = known[index // len(FAMILIES) % len(known)]
    half = 1 if split == "mini" else 0 if chosen.held_out else None
    turns = chosen.write(Draw(rng, half))
    return GeneratedConversation(
        id=f"{split}-{index:06d}",
        family=family,
        category=chosen.category,
        template=chosen.name,
        turns=[question for question, _ in turns],
        reference=[answer for _, answer in turns],
    )


def generate_rows(seed: int, split: Split) -> Iterator[GeneratedConversation]:
    """The endless rows of a split, from the first; rows may repeat."""
    if split not in get_args(Split):
        raise UsageError(f"unknown split {split!r}", f"one of {', '.join(get_args(Split))}")
    return (generate_row(seed, split, index) for index in count())
