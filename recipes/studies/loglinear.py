"""Log-linear regression: y = a + b log10(x), by ordinary least squares. x is called the size.

All intervals use Student's t. If a size has several points, their scatter measures the noise of one
point. If the means at the sizes are farther from the line than this noise explains, the relation is
not a straight line. This is the lack-of-fit test (Draper & Smith, Applied Regression Analysis,
3rd ed. 1998, 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
FEW_POINTS, LOW_R2, BENDS = 4, 0.9, 0.05
"""A fit has a warning if it has fewer points, a smaller R2, or a smaller p-value of the lack-of-fit
test."""
FARTHEST = 1.0
"""Maximum distance of a prediction from the measured sizes, in decades (factors of ten)."""
_EPS = 1e-9
"""Rounding error of a size, in decades."""


@dataclass(frozen=True, slots=True)
class IntervalEstimate:
    """An estimate with its 95% interval. The interval is infinite if there are too few points."""

    value: float
    low: float = -math.inf
    high: float = math.inf


class TooFar(ValueError):
    """Error for a size that is more than `FARTHEST` decades outside the range of the fitted
    points.
    """


@dataclass(frozen=True, slots=True)
class LogLinear:
    """A line y = a + b log10(x), fitted to n points with `smallest` <= x <= `largest`.

    r2: share of the variance of y that the line explains; 0 if y does not vary.
    lack_of_fit_p: p-value of the test whether a straight line fits. None if there are only two
        sizes, or if no size has several points.
    noise: standard deviation of the points around the line.
    df: degrees of freedom of `noise`.
    mean, spread: mean of log10(x), and sum of the squared deviations from this mean.
    """

    a: IntervalEstimate
    b: IntervalEstimate
    r2: float
    lack_of_fit_p: float | None
    n: int
    smallest: float
    largest: float
    noise: float
    df: int
    mean: float
    spread: float

    def decades_beyond(self, x: float) -> float:
        """Return how many decades a size is outside the range of the fitted points; 0 if it is
        inside.
        """
        found = max(math.log10(self.smallest / x), math.log10(x / self.largest))
        return found if found > _EPS else 0.0

    def predict(self, x: float, n_points: int = 1) -> IntervalEstimate:
        """Predict the mean of `n_points` new points at size x, with its interval.

        Raises:
            TooFar: x is more than `FARTHEST` decades outside the range of the points.
            ValueError: x is not above 0.
        """
        if not x > 0:
            raise ValueError(f"a size must be above 0, got {x:g}")
        if self.decades_beyond(x) > FARTHEST + _EPS:
            raise TooFar(
                f"{x:g} lies {self.decades_beyond(x):.1f} decades beyond the points,"
                f" {self.smallest:g} to {self.largest:g}; at most {FARTHEST:g} is predicted"
            )
        far = math.log10(x) - self.mean
        error = self.noise * math.sqrt(1 / n_points + 1 / self.n + far**2 / self.spread)
        return _estimate(self.a.value + self.b.value * math.log10(x), error, self.df)

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt that the line describes the points."""
        found = []
        if self.n < FEW_POINTS:
            found.append(f"{self.n} points, fewer than {FEW_POINTS}")
        if not self.b.value and not self.noise:
            found.append("the same at all sizes")
        elif self.r2 < LOW_R2:
            found.append(f"R2 {self.r2:.3f}, below {LOW_R2}")
        if self.lack_of_fit_p is not None and self.lack_of_fit_p < BENDS:
            found.append(f"no straight line (lack of fit, p {self.lack_of_fit_p:.2g})")
        return found


def fit_loglinear(points: Iterable[tuple[float, float]]) -> LogLinear:
    """Fit a line to points (x, y).

    Raises:
        ValueError: there are fewer than two sizes, a size is not above 0, or a y is not finite.
    """
    sizes, y = (np.array(part, dtype=float) for part in zip(*points, strict=True))
    if not (np.isfinite(sizes) & (sizes > 0)).all() or not np.isfinite(y).all():
        raise ValueError("sizes must be above 0, and figures must be finite")
    levels, group = np.unique(sizes, return_inverse=True)
    if len(levels) < 2:
        raise ValueError(f"a fit needs two sizes, but all points have {levels[0]:g}")
    x = np.log10(sizes)
    n, mean, first = len(x), float(x.mean()), float(y[0])
    y = y - first  # if all y are equal, rounding must not give a slope
    spread = float(((x - mean) ** 2).sum())
    b = float(((x - mean) * y).sum()) / spread
    squares = float(((y - y.mean() - b * (x - mean)) ** 2).sum())
    a = first + float(y.mean()) - b * mean
    total = float(((y - y.mean()) ** 2).sum())
    df = n - 2
    noise = math.sqrt(squares / df) if df else math.inf
    return LogLinear(
        a=_estimate(a, noise * math.sqrt(1 / n + mean**2 / spread), df),
        b=_estimate(b, noise / math.sqrt(spread), df),
        r2=1 - squares / total if total > 0 else 0.0,
        lack_of_fit_p=_lack(y, group, squares),
        n=n,
        smallest=float(levels[0]),
        largest=float(levels[-1]),
        noise=noise,
        df=df,
        mean=mean,
        spread=spread,
    )


def _estimate(value: float, error: float, df: int) -> IntervalEstimate:
    if not df:
        return IntervalEstimate(value)
    wide = float(stats.t.ppf((1 + LEVEL) / 2, df)) * error
    return IntervalEstimate(value, value - wide, value + wide)


def _lack(y: np.ndarray, group: np.ndarray, squares: float) -> float | None:
    """Return the p-value of the lack-of-fit test, or None if the test is not possible.

    Args:
        y: values [n].
        group: index of each point's size [n].
        squares: sum of the squared residuals of the line.
    """
    counts = np.bincount(group)
    means = np.bincount(group, y) / counts
    pure, pure_df = float(((y - means[group]) ** 2).sum()), len(y) - len(counts)
    bent_df = len(counts) - 2
    if not pure_df or not bent_df or not pure > 0:
        return None
    ratio = max(0.0, squares - pure) / bent_df / (pure / pure_df)
    return float(stats.f.sf(ratio, bent_df, pure_df))
