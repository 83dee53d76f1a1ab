"""Training recipe of a draft head: sizes, number of updates, losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from methods._heads.vocabulary import HeadVocabulary


@dataclass(frozen=True)
class Objective:
    """Loss of a head: the weighted mean over draft steps.

    Attributes:
        steps: Number of draft steps in training. After the first, the head reads its own output.
        decay: Factor by which the weight of a step decreases from one step to the next.
        ce: Weight of the cross-entropy with the target's distribution at temperature 1.
        feature: Weight of the smooth L1 distance to the target's final features.
        noise: Width of the uniform noise added to the input features (EAGLE's augmentation).
        text: Use the text, not the target's distribution, for the cross-entropy.
    """

    steps: int
    decay: float = 0.8
    ce: float = 1.0
    feature: float = 0.0
    noise: float = 0.0
    text_labels: bool = False


def parallel_losses(steps: int) -> dict[str, Objective]:
    """Return the losses of heads that draft `steps` tokens in one forward.

    The `paper` loss uses the text as labels, and `ttt` the target's distribution.
    """
    return {"paper": Objective(steps, text_labels=True), "ttt": Objective(steps)}


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """Training recipe of an embedded target's head. Width and attention are the target's.

    Attributes:
        corpus: Number of updates on the corpus. It is unlimited, so the head does not memorise it.
        replies: Number of updates after these, on text that the target generated, which the head
            has to predict later.
        sequences: Number of sequences of 512 tokens per update.
        losses: Losses by name. `paper` is the published loss. `ttt` drafts several steps in
            training (EAGLE-3's training-time test) with the target's distribution as label. Only
            this trains the second and later tokens of a chain.
        mlp: Width of the layer's MLP.
        draft_vocab_size: Size of the draft vocabulary, the most frequent tokens in the target's
            answers. None: all.
        peak_lr: Peak learning rate.
    """

    corpus_updates: int
    reply_updates: int
    sequences: int = 4
    losses: Mapping[str, Objective]
    mlp: int = 704
    draft_vocab_size: int | None = None
    peak_lr: float = 5e-3


@dataclass(frozen=True)
class TargetStatistics:
    """Statistics of the target that head training uses.

    Attributes:
        frequent_ids: Function that returns the n most frequent token ids of the target's answers,
            in ascending order. None returns all ids.
        row_scale: Function that returns the approximate magnitude of the hidden states after the
            given layers, [layers * width].
    """

    n_layers: int
    vocab_size: int
    frequent_ids: Callable[[int | None], Tensor]
    row_scale: Callable[[tuple[int, ...]], Tensor]

    def choose_vocabulary(self, n: int | None) -> HeadVocabulary:
        """Return the draft vocabulary of the n most frequent ids."""
        ids = self.frequent_ids(n)
        return HeadVocabulary(self.vocab_size, None if len(ids) == self.vocab_size else ids)
