"""A head's training in numbers: how large it is, how long it learns, towards what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from methods._heads.vocabulary import HeadVocabulary


@dataclass(frozen=True)
class Objective:
    """A loss: the mean over `steps` of what each step adds, later ones weighing `decay` less each.

    steps: drafted in training; after the first the head reads its own output.
    ce: weight of the cross-entropy to the target's distribution at temperature 1.
    feature: weight of the smooth L1 distance to the target's final features.
    noise: width of the uniform noise on the features read (EAGLE's augmentation).
    text: cross-entropy to the text in place of the target's distribution.
    """

    steps: int
    decay: float = 0.8
    ce: float = 1.0
    feature: float = 0.0
    noise: float = 0.0
    text: bool = False


def parallel_losses(steps: int) -> dict[str, Objective]:
    """The losses of drafters that say so many tokens at once: by the text, and by the target."""
    return {"paper": Objective(steps, text=True), "ttt": Objective(steps)}


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """How the embedded target's head was made; its width and its attention are the target's.

    corpus: updates on the corpus, which has no end, so that little is learnt by heart.
    replies: updates after these, on the target's own words, whose like the head will have to
        foresee.
    sequences: of 512 tokens, that an update reads.
    losses: by name. `paper`: as published. `ttt`: every kind is drafted from for a few steps in
        training (EAGLE-3's training-time test), towards the target's distribution: what a chain
        needs from its second token on is learnt nowhere else.
    mlp: width of the layer's MLP.
    says: how many tokens it can say, the most frequent in the target's answers; None: all.
    """

    corpus: int
    replies: int
    sequences: int = 4
    losses: Mapping[str, Objective]
    mlp: int = 704
    draft_vocab_size: int | None = None
    peak_lr: float = 5e-3


@dataclass(frozen=True)
class TargetStatistics:
    """What a head that is to be trained may ask of its target.

    says: the n tokens, rising, that it answers with most often; of None, all.
    size: [taps * width], about how large its rows are at such taps.
    """

    n_layers: int
    vocab_size: int
    frequent_ids: Callable[[int | None], Tensor]
    row_scale: Callable[[tuple[int, ...]], Tensor]

    def vocabulary(self, n: int | None) -> HeadVocabulary:
        """That of the `says(n)`."""
        ids = self.frequent_ids(n)
        return HeadVocabulary(self.vocab_size, None if len(ids) == self.vocab_size else ids)
