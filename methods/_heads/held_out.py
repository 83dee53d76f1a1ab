"""Measurement of small predictors on held-out questions."""

from torch import Tensor

HELD_OUT = 5
"""One question in so many is not trained on; it measures."""


def area_under_roc(scores: Tensor, truth: Tensor) -> float:
    """The chance that a true one's score is above a false one's, ties half: the area under the ROC
    curve; one half where all are of one kind."""
    good, bad = scores[truth], scores[~truth]
    if not len(good) or not len(bad):
        return 0.5
    ahead = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad).double()
    return float(ahead.mean())
