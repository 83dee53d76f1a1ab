"""What a count of failures proves of their rate."""

from __future__ import annotations


def upper_bound(failures: int, trials: int, level: float = 0.95) -> float:
    """The one-sided Clopper-Pearson upper bound of a rate (Biometrika 26, 1934).

    Args:
        failures: how many of the trials failed.
        trials: independent trials; none prove nothing (bound 1).
        level: the confidence.

    Raises:
        ValueError: more failures than trials, or a negative number.
    """
    from scipy.special import betaincinv

    if not 0 <= failures <= trials:
        raise ValueError(f"{failures} failures of {trials} trials")
    if failures == trials:
        return 1.0
    return float(betaincinv(failures + 1, trials - failures, level))
