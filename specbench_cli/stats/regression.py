"""Test for slowdowns between two versions of a program, for all metrics and methods at once.

BASE is the old version, and NEW the new one. A figure is one metric, such as decode time. The model
of its logarithms is values[i, p] = a_i + l_p + noise, with a level a_i for prompt i and a level l_p
for process p. Both sides have the same prompts, so the levels a_i cancel. BASE and NEW have one or
several processes each. The change is the mean process level of NEW minus that of BASE.

1. Estimate the levels by a robust two-way fit (`fit_two_way`), so that a short disturbance of the
   machine is not taken for a change.
2. Estimate the noise of a value. One method has few prompts for this, so all methods share an
   estimate per figure, which is also influenced by the other figures (moderated variances: Smyth,
   Stat. Appl. Genet. Mol. Biol. 3:3, 2004). A method with more noise keeps its own estimate. A
   method with less noise does not, because few prompts do not prove that.
3. The variance of a level is noise / (prompts - 1) + drift^2. Drift is the standard deviation
   between processes of the same program. With one process per side it cannot be measured, so a
   value is assumed (`_assumed_drift`). The assumed drift is larger for noisier values, and if the
   speed of the machine itself differs more. Several processes per side give a better estimate,
   which is then used.
4. Compare t = change / error with Student's t distribution, simultaneously for all figures and
   methods (Sidak, J. Am. Stat. Assoc. 62, 1967).

If processes of BASE and NEW ran alternately, two consecutive processes form a pair. Slow changes of
the machine affect both processes of a pair alike. The variance of the differences within pairs
shows the remaining noise. This variance is combined with the variance of step 3, which is then
computed without slow drift (`_PAIR_PRIOR_DF`).

If disturbances can only increase a time, `fit_lower_envelope` estimates the levels in step 1.

docs/explanations/statistics.md lists the measured error rates.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from specbench_cli.stats.two_way import Floats, fit_lower_envelope, fit_two_way

LEVEL = 0.996
"""Confidence level of the simultaneous two-sided intervals. At most two comparisons in a thousand
wrongly report "slower". The test runs for every change of a program, so a level of 95% would give a
false alarm every month."""
POWER = 0.8
"""Probability of finding a change as large as `SlowdownEstimate.detectable`."""
MIN_PROMPTS = 3
"""Minimum number of prompts. With fewer, one disturbed prompt can decide the result."""

MIN_PAIRS = 5
"""Minimum number of pairs. With fewer, their variance is too uncertain."""
UNPAIRED = -1
"""Pair index of a process without a partner."""

_SHARED_DF = 8.0
"""Prior degrees of freedom: weight of the mean noise of all figures in the estimate of one figure,
and of a figure's noise in the estimate of one method. Their standard deviations typically differ by
a factor of two, as in an F distribution with this many degrees of freedom."""
_PRIOR_DF = 10.0
"""Prior degrees of freedom of the assumed drift: its weight against the observed drift. Two sides
with six processes each have the same weight."""
_PAIR_PRIOR_DF = 1.0
"""Prior degrees of freedom of the assumed variance of a pair's difference: its weight against the
observed variance. The weight is low, because this variance differs between machines."""
_QUIET_DRIFT = 0.006
"""Drift on a quiet machine. Each process has a different memory layout, so a ratio of times changes
by about 1% from run to run, which is 0.6 to 0.7% per process."""
_NOISY_DRIFT, _NOISY_LEVEL = 0.6, 0.1
"""Drift as a share of the noise of a value, for a noise of 10% or more. For less noise, the share
is proportionally smaller. Measured on a busy virtual machine: values had 10% noise, and twelve runs
of the same program differed by about 6%, because the load of the host changed slowly."""
_ELASTICITY = 0.25
"""Change of a ratio of times, per change of the machine's own speed (both as logarithms). If a
machine becomes slower, memory-bound and compute-bound methods do not slow down equally. In the same
twelve runs, the slopes on vanilla's speed were 0.05 to 0.45."""


@dataclass(frozen=True, slots=True)
class RegressionSeries:
    """Values of one metric of one method in the processes of BASE and NEW.

    figure: Name of the metric. Series of the same figure share their noise estimate.
    values: [prompts, processes], logarithms of the metric, nan if missing.
    is_new: [processes], True for processes of NEW.
    machine_slowdown: Logarithm of how much slower the machine itself was for NEW.
    pair: [processes], index of each process's pair, or `UNPAIRED`. None if the processes of the two
        sides did not alternate.
    one_sided_noise: True if disturbances can only increase values.
    """

    figure: Hashable
    values: Floats
    is_new: NDArray[np.bool_]
    machine_slowdown: float = 0.0
    pair: NDArray[np.int_] | None = None
    one_sided_noise: bool = False


@dataclass(frozen=True, slots=True)
class SlowdownEstimate:
    """Estimated change of a metric from BASE to NEW, as a logarithm. A value above 0 means slower.

    low, high: Ends of the simultaneous confidence interval.
    detectable: Smallest change that would be found with probability `POWER`.
    """

    log_ratio: float
    low: float
    high: float
    detectable: float

    @property
    def significant(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class _SeriesFit:
    """Fitted process levels of one metric of one method.

    levels: [processes], level of each process: how slow it was compared with the others.
    noise: Variance of a value.
    df: Degrees of freedom of the noise.
    counts: [processes], number of prompts of each process.
    """

    series: RegressionSeries
    levels: Floats
    noise: float
    df: int
    counts: Floats


def estimate_slowdowns(
    series: Sequence[RegressionSeries], *, tolerance: float = 0.0, level: float = LEVEL
) -> list[SlowdownEstimate | None]:
    """Estimate the change of each series from BASE to NEW.

    A change is None if BASE or NEW has no process with `MIN_PROMPTS` shared prompts. It is also
    None if the processes are paired, but there are fewer than `MIN_PAIRS` pairs.

    Args:
        tolerance: Logarithm of the allowed slowdown, for `SlowdownEstimate.detectable`.
        level: Simultaneous confidence level of all intervals.
    """
    fits = [_fit_series(shared) if (shared := _keep_common(one)) else None for one in series]
    kept = [fit for fit in fits if fit is not None]
    if not kept:
        return [None] * len(series)
    tail = -math.expm1(math.log(level) / len(kept)) / 2
    noises = _estimate_noise(kept)
    deviations = _estimate_deviations(kept, noises)
    return [
        None
        if fit is None
        else _estimate_slowdown(fit, *noises[fit.series.figure], deviations, tolerance, tail)
        for fit in fits
    ]


def has_partner(pair: NDArray[np.int_], new: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which processes are paired with a process of the other side: [processes]."""
    both = np.intersect1d(pair[new], pair[~new])
    found: NDArray[np.bool_] = np.isin(pair, both[both != UNPAIRED])
    return found


def _keep_common(series: RegressionSeries) -> RegressionSeries | None:
    """Keep the prompts that both BASE and NEW have.

    Drop processes with too few prompts or without a partner. Return None if too little is left.
    """
    values, new, pair = series.values, series.is_new, series.pair
    while values.size and new.any() and not new.all():
        seen = np.isfinite(values)
        both = seen[:, new].any(1) & seen[:, ~new].any(1)
        kept = seen[both].sum(0) >= MIN_PROMPTS
        if pair is not None:
            kept &= has_partner(np.where(kept, pair, UNPAIRED), new)
        if both.all() and kept.all():
            if pair is not None and len(np.unique(pair)) < MIN_PAIRS:
                return None
            return replace(series, values=values, is_new=new, pair=pair)
        values, new = values[both][:, kept], new[kept]
        pair = None if pair is None else pair[kept]
    return None


def _fit_series(series: RegressionSeries) -> _SeriesFit:
    """Fit the two-way model of prompt levels and process levels.

    If disturbances can only increase values, use the levels of the lower envelope.
    """
    fit = fit_two_way(series.values)
    levels = fit_lower_envelope(series.values) if series.one_sided_noise else fit.levels
    counts = np.isfinite(series.values).sum(0).astype(float)
    return _SeriesFit(series, levels, fit.noise, fit.df, counts)


def _estimate_noise(fits: Sequence[_SeriesFit]) -> dict[Hashable, tuple[float, float]]:
    """Return the variance of a value and its degrees of freedom, by metric (figure)."""
    total_df = sum(fit.df for fit in fits)
    mean = sum(fit.df * fit.noise for fit in fits) / total_df
    shared_df = min(_SHARED_DF, total_df)
    found: dict[Hashable, tuple[float, float]] = {}
    for figure in {fit.series.figure: None for fit in fits}:
        own = [fit for fit in fits if fit.series.figure == figure]
        df = sum(fit.df for fit in own)
        variance = sum(fit.df * fit.noise for fit in own) / df
        found[figure] = (df * variance + shared_df * mean) / (df + shared_df), df + shared_df
    return found


def _level_variances(fit: _SeriesFit, noise: float) -> Floats:
    """Return the variances of a method's process levels: [processes]."""
    variance = _value_variance(fit, noise)
    # Divide by the number of prompts minus one: a robust fit to few prompts follows part of the
    # noise.
    return variance / (fit.counts - 1) + _assumed_drift(math.sqrt(variance)) ** 2


def _value_variance(fit: _SeriesFit, noise: float) -> float:
    """Return the variance of a method's values.

    It combines the method's own variance with the variance of all methods (`noise`).
    """
    own = (fit.df * fit.noise + _SHARED_DF * noise) / (fit.df + _SHARED_DF)
    return max(own, noise)


def _assumed_drift(noise: float) -> float:
    """Return the assumed standard deviation between processes of the same program (drift).

    Args:
        noise: Standard deviation of the values.
    """
    share = _NOISY_DRIFT * min(1.0, noise / _NOISY_LEVEL)
    return math.hypot(_QUIET_DRIFT, share * noise)


def _estimate_deviations(
    fits: Sequence[_SeriesFit], noises: dict[Hashable, tuple[float, float]]
) -> dict[Hashable, float]:
    """Return the ratio of observed to assumed variance between processes, by metric (figure).

    The observed variance is that between processes of the same side (BASE or NEW). The ratio is 1
    if no side has two processes.
    """
    found: dict[Hashable, float] = {}
    for figure, (noise, _) in noises.items():
        squares, df = 0.0, 0
        for fit in (fit for fit in fits if fit.series.figure == figure):
            variances = _level_variances(fit, noise)
            for side in (fit.series.is_new, ~fit.series.is_new):
                residuals = fit.levels[side] - fit.levels[side].mean()
                squares += float((residuals**2 / variances[side]).sum())
                df += int(side.sum()) - 1
        found[figure] = squares / df if df else 1.0
    return found


def _estimate_slowdown(
    fit: _SeriesFit,
    noise: float,
    noise_df: float,
    deviations: dict[Hashable, float],
    tolerance: float,
    tail: float,
) -> SlowdownEstimate:
    """Return the change of one metric of one method from BASE to NEW."""
    if fit.series.pair is not None:
        return _estimate_from_pairs(fit, noise, tolerance, tail)
    sides = (fit.series.is_new, ~fit.series.is_new)
    variances = _level_variances(fit, noise)
    measured = len(fit.series.is_new) - 2
    weight = measured / (_PRIOR_DF + measured)
    factor = 1 + weight * (deviations[fit.series.figure] - 1)
    variance = factor * sum(float(variances[side].mean() / side.sum()) for side in sides)
    error = math.hypot(math.sqrt(variance), _ELASTICITY * fit.series.machine_slowdown)
    change = float(fit.levels[sides[0]].mean() - fit.levels[sides[1]].mean())
    return _make_estimate(change, error, noise_df + measured, tolerance, tail)


def _estimate_from_pairs(
    fit: _SeriesFit, noise: float, tolerance: float, tail: float
) -> SlowdownEstimate:
    """Return the change of one metric of one method, from pairs of consecutive processes."""
    series, pair = fit.series, fit.series.pair
    assert pair is not None
    spread = _value_variance(fit, noise) / (fit.counts - 1) + _QUIET_DRIFT**2
    changes, assumed = [], 0.0
    for number in np.unique(pair):
        sides = [(pair == number) & side for side in (series.is_new, ~series.is_new)]
        new, base = (float(fit.levels[side].mean()) for side in sides)
        changes.append(new - base)
        assumed += sum(float(spread[side].mean() / side.sum()) for side in sides)
    n = len(changes)
    observed = float(np.var(changes, ddof=1))
    variance = (_PAIR_PRIOR_DF * assumed / n + (n - 1) * observed) / (_PAIR_PRIOR_DF + n - 1)
    error = math.sqrt(variance / n)
    return _make_estimate(float(np.mean(changes)), error, _PAIR_PRIOR_DF + n - 1, tolerance, tail)


def _make_estimate(
    change: float, error: float, df: float, tolerance: float, tail: float
) -> SlowdownEstimate:
    """Return a change with its interval and the smallest detectable change.

    Args:
        change: Estimated change, as a logarithm.
        error: Standard error of the change.
        df: Degrees of freedom of the standard error.
        tolerance: Logarithm of the allowed slowdown.
        tail: Probability of each tail outside the interval.
    """
    critical, power_quantile = stats.t.isf([tail, 1 - POWER], df)
    width = float(critical) * error
    needed = max(width, tolerance) + float(power_quantile) * error
    return SlowdownEstimate(change, change - width, change + width, needed)
