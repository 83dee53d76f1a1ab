"""Evaluation of trained predictors (`judge`, `specee`) on questions that training did not use."""

from torch import Tensor

HELD_OUT = 5
"""Every n-th question is held out from training, with this n."""


def area_under_roc(scores: Tensor, truth: Tensor) -> float:
    """Return the area under the ROC curve (AUC), or 0.5 if all labels are equal.

    The AUC is the probability that a random positive example scores higher than a random negative
    one. A tie counts half.

    Args:
        scores: Scores of the examples, [n].
        truth: Labels of the examples, [n] bool.
    """
    good, bad = scores[truth], scores[~truth]
    if not len(good) or not len(bad):
        return 0.5
    ahead = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad).double()
    return float(ahead.mean())
