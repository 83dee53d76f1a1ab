"""Training recipes of draft heads for `specbench train`: sizes, number of updates and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from methods._heads.vocabulary import HeadVocabulary


@dataclass(frozen=True)
class Objective:
    """Training loss of a head: a weighted mean of the losses of its draft steps.

    Attributes:
        steps: Number of draft steps. From the second step on, the head reads its own output instead
            of the target's features.
        decay: Draft step k = 0, 1, ... has weight decay^k.
        ce: Weight of the cross-entropy against the target's distribution at temperature 1.
        feature: Weight of the smooth L1 distance to the target's features before the output matrix.
        noise: Width of the uniform noise that is added to the input features, as in EAGLE.
        text_labels: Whether the labels of the cross-entropy are the tokens of the text, instead of
            the target's distribution.
    """

    steps: int
    decay: float = 0.8
    ce: float = 1.0
    feature: float = 0.0
    noise: float = 0.0
    text_labels: bool = False


def parallel_losses(steps: int) -> dict[str, Objective]:
    """Return the losses of a head that drafts `steps` tokens in one forward.

    Both losses are cross-entropies. The loss `paper` uses the tokens of the text as labels. The
    loss `ttt` uses the target's distributions.
    """
    return {"paper": Objective(steps, text_labels=True), "ttt": Objective(steps)}


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """Training recipe of a draft head for the small target models that specbench includes.

    The draft head has the hidden size and the attention heads of the target.

    Attributes:
        corpus_updates: Number of updates on synthetic text. Each update uses new text.
        reply_updates: Number of further updates on text that the target generated. Such text is
            what the head predicts in decoding.
        sequences: Number of sequences of 512 tokens per update.
        losses: Losses by name. `paper` is the published loss. `ttt` uses several draft steps
            (EAGLE-3's training-time test), and the target's distributions as labels.
        mlp: Intermediate size of the layer's MLP.
        draft_vocab_size: Size of the draft vocabulary, which contains the most frequent tokens of
            the target's answers. None uses all tokens.
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
    """Statistics of the target that the training of a head uses.

    Attributes:
        frequent_ids: Function that takes n and returns the n most frequent token ids of the
            target's answers, in ascending order. With None it returns all ids.
        row_scale: Function that takes layer numbers and returns the approximate magnitude of the
            hidden states after these layers, [layers * width].
    """

    n_layers: int
    vocab_size: int
    frequent_ids: Callable[[int | None], Tensor]
    row_scale: Callable[[tuple[int, ...]], Tensor]

    def choose_vocabulary(self, n: int | None) -> HeadVocabulary:
        """Return the draft vocabulary of the n most frequent token ids."""
        ids = self.frequent_ids(n)
        return HeadVocabulary(self.vocab_size, None if len(ids) == self.vocab_size else ids)
