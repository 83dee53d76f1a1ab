"""Test for slowdowns between two sides, for all figures of all methods at once.

The logarithms of a figure are values[i, p] = a_i + l_p + noise. Prompts i are the same on both
sides, so their a_i cancel. Processes p have levels l_p; a run has one or several processes. The
change is the mean level of NEW minus that of BASE.

1. Estimate levels by a robust two-way fit (`fit_two_way`), so that a hiccup of the machine is no
   change.
2. Estimate the noise of a value. One method has few prompts for this, so all methods share an
   estimate per figure, and all figures share a little (moderated variances: Smyth, Stat. Appl.
   Genet. Mol. Biol. 3:3, 2004). A method noisier than that keeps its own estimate. A method that
   seems calmer does not, because few prompts do not show that.
3. The variance of a level is noise / (prompts - 1) + drift^2. Drift is the difference between
   processes of the same program. One process per side does not show it, so it is assumed
   (`_assumed_drift`). It is wider for noisier values and for a larger difference of the machine's
   own speed, until several processes give a better estimate.
4. Compare t = change / error with Student's t, simultaneously for all (Sidak, J. Am. Stat. Assoc.
   62, 1967).

If processes of both sides took turns, neighbours in time form a pair. Whatever outlasts a process
affects both, and the rest shows in the variance of the pairs' differences. That variance is
combined with the one of step 3, without the part of drift that outlasts a process
(`_PAIR_PRIOR_DF`).

Times that any disturbance can only increase may use the levels of `fit_lower_envelope`.

docs/statistics.md lists the measured error rates.
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
"""Confidence level of the simultaneous two-sided intervals. Two comparisons in a thousand wrongly
report "slower", and fewer if the tolerance decides. A gate runs for every change of a program: at
95% it would raise a false alarm every month."""
POWER = 0.8
"""With which a change of `SlowdownEstimate.detectable` is found: the convention, as in
`stats.detectable`."""
MIN_PROMPTS = 3
"""Minimum number of prompts. With fewer, no majority can outvote one disturbed prompt."""

MIN_PAIRS = 5
"""Minimum number of pairs. With fewer, their variance is too uncertain."""
UNPAIRED = -1
"""Pair index of a process without a partner."""

_SHARED_DF = 8.0
"""Prior degrees of freedom: of the mean noise of all figures in that of a figure, and of a figure's
noise in that of a method. Their standard deviations differ by a factor of two, as in an F
distribution with this many degrees of freedom."""
_PRIOR_DF = 10.0
"""Prior degrees of freedom of the assumed drift, against the observed drift. Two sides with six
processes each have as many."""
_PAIR_PRIOR_DF = 1.0
"""Prior degrees of freedom of the assumed variance of a pair's difference, against the observed
one. Few, because some machines place each process anew and others do not."""
_QUIET_DRIFT = 0.006
"""Drift on the quietest machine: memory is laid out anew in every process, which moves a ratio of
times by about 1% from run to run, that is 0.6 or 0.7% a process."""
_NOISY_DRIFT, _NOISY_LEVEL = 0.6, 0.1
"""Drift as a share of the noise of a cell where that is 10% or more (in proportion less below): on
a virtual machine in a bad phase twelve runs of the same program differed by about 6% beside cells
of 10%, because phases of its host outlast a run; mere hiccups do not, and are what is left on a
quiet one."""
_ELASTICITY = 0.25
"""Ratios of times shift with the machine's own speed, by about so much of it: in the same twelve
runs what is bound by memory and what by the processor did not slow down alike (regression slopes
on vanilla's speed from 0.05 to 0.45)."""


@dataclass(frozen=True, slots=True)
class RegressionSeries:
    """One figure of one method.

    figure: series with the same figure share their noise estimate. values: [prompts, processes],
    logarithms; nan if missing. is_new: [processes], True for processes of NEW. machine_slowdown:
    logarithm of how much slower the machine itself was on NEW's side. pair: [processes], index of
    each process's pair, or `UNPAIRED`, if the sides took turns. one_sided_noise: True if
    disturbances can only increase values.
    """

    figure: Hashable
    values: Floats
    is_new: NDArray[np.bool_]
    machine_slowdown: float = 0.0
    pair: NDArray[np.int_] | None = None
    one_sided_noise: bool = False


@dataclass(frozen=True, slots=True)
class SlowdownEstimate:
    """A change as a logarithm; above 0 means slower.

    low, high: simultaneous interval. detectable: smallest change that would be found with `POWER`.
    """

    log_ratio: float
    low: float
    high: float
    detectable: float

    @property
    def significant(self) -> bool:
        """Return True if the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class _SeriesFit:
    """Fitted levels of a series.

    levels: [processes]. noise: variance of a value. df: degrees of freedom of the noise. counts:
    [processes], number of prompts.
    """

    series: RegressionSeries
    levels: Floats
    noise: float
    df: int
    counts: Floats


def estimate_slowdowns(
    series: Sequence[RegressionSeries], *, tolerance: float = 0.0, level: float = LEVEL
) -> list[SlowdownEstimate | None]:
    """Return the change of every series.

    A change is None if a side has no process with `MIN_PROMPTS` shared prompts, or if the sides
    took turns and fewer than `MIN_PAIRS` pairs are left.

    Args:
        tolerance: logarithm of the allowed slowdown, for `SlowdownEstimate.detectable`.
        level: simultaneous confidence level of all intervals.
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
    """Return which processes have a process of the other side in their pair."""
    both = np.intersect1d(pair[new], pair[~new])
    found: NDArray[np.bool_] = np.isin(pair, both[both != UNPAIRED])
    return found


def _keep_common(series: RegressionSeries) -> RegressionSeries | None:
    """Keep prompts that both sides have, in processes with enough of them and, if paired, a
    partner."""
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
    """Fit the two-way model; for one-sided noise take the levels of the lower envelope."""
    fit = fit_two_way(series.values)
    levels = fit_lower_envelope(series.values) if series.one_sided_noise else fit.levels
    counts = np.isfinite(series.values).sum(0).astype(float)
    return _SeriesFit(series, levels, fit.noise, fit.df, counts)


def _estimate_noise(fits: Sequence[_SeriesFit]) -> dict[Hashable, tuple[float, float]]:
    """Return the variance of a value and its degrees of freedom, by figure."""
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
    """Return the variances of a method's process levels [processes], without what both sides
    share."""
    variance = _value_variance(fit, noise)
    # Minus one: with three prompts the robust weights fit the noise that they should suppress.
    return variance / (fit.counts - 1) + _assumed_drift(math.sqrt(variance)) ** 2


def _value_variance(fit: _SeriesFit, noise: float) -> float:
    """Return the variance of a method's values, moderated by the figure's."""
    own = (fit.df * fit.noise + _SHARED_DF * noise) / (fit.df + _SHARED_DF)
    return max(own, noise)


def _assumed_drift(noise: float) -> float:
    """Return the assumed standard deviation between processes, given that of values."""
    share = _NOISY_DRIFT * min(1.0, noise / _NOISY_LEVEL)
    return math.hypot(_QUIET_DRIFT, share * noise)


def _estimate_deviations(
    fits: Sequence[_SeriesFit], noises: dict[Hashable, tuple[float, float]]
) -> dict[Hashable, float]:
    """Return by figure the observed over the assumed variance between processes of a side.

    1 if no side has two processes.
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
    """Return the change of one method's figure."""
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
    """Return the change of one method's figure from pairs of processes that took turns."""
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
    """Return a change with its interval and the smallest detectable change."""
    critical, power_quantile = stats.t.isf([tail, 1 - POWER], df)
    width = float(critical) * error
    needed = max(width, tolerance) + float(power_quantile) * error
    return SlowdownEstimate(change, change - width, change + width, needed)
