"""Generated conversations (rows) of a split.

A row depends only on the seed, the split (such as "train") and its index.
"""

import random
from collections.abc import Iterator
from itertools import count
from typing import Literal, TypedDict, get_args

from specbench_cli.errors import UsageError
from specbench_cli.training.generated.template import FAMILIES, TEMPLATES, Draw

Split = Literal["train", "open", "mini"]
"""Split of the rows.

"train" has all wordings. "open" has the wordings that are not held out. "mini" has the held-out
wordings with half B of the lexicons.
"""


class GeneratedConversation(TypedDict):
    """One generated conversation, with the expected answer of each turn in `reference`."""

    id: str
    family: str
    category: str
    template: str
    turns: list[str]
    reference: list[str]


def generate_row(seed: int, split: Split, index: int) -> GeneratedConversation:
    """Return conversation number `index` of a split.

    Task families are used in turn, and so are the question templates of a family.
    """
    rng = random.Random(f"{split}/{seed}/{index}")  # the hash of a text is equal on all machines
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
    """Return an endless iterator of the generated conversations of a split.

    Conversations may repeat.

    Raises:
        UsageError: the split is unknown.
    """
    if split not in get_args(Split):
        raise UsageError(f"unknown split {split!r}", f"one of {', '.join(get_args(Split))}")
    return (generate_row(seed, split, index) for index in count())
