"""Upper bound of a failure rate, from a count of failures."""

from __future__ import annotations


def upper_bound(failures: int, trials: int, level: float = 0.95) -> float:
    """Return the one-sided Clopper-Pearson upper bound of a rate (Biometrika 26, 1934).

    Args:
        failures: number of trials that failed.
        trials: number of independent trials. Without trials the bound is 1.
        level: confidence level.

    Raises:
        ValueError: more failures than trials, or a negative number.
    """
    from scipy.special import betaincinv

    if not 0 <= failures <= trials:
        raise ValueError(f"{failures} failures of {trials} trials")
    if failures == trials:
        return 1.0
    return float(betaincinv(failures + 1, trials - failures, level))
