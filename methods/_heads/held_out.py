"""Measurement of small predictors on held-out questions."""

from torch import Tensor

HELD_OUT = 5
"""One in this many questions is held out from training."""


def area_under_roc(scores: Tensor, truth: Tensor) -> float:
    """Return the area under the ROC curve, or 0.5 if all labels are equal.

    This is the probability that a positive example scores higher than a negative one. A tie counts
    half.
    """
    good, bad = scores[truth], scores[~truth]
    if not len(good) or not len(bad):
        return 0.5
    ahead = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad).double()
    return float(ahead.mean())
