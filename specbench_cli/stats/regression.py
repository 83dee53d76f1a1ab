"""Whether anything became slower between two sides: all figures of all rows judged at once.

A figure's logarithms are values[i, p] = a_i + l_p + noise. Prompts i are the same on both sides, so
their a_i take nothing from what is found; processes p (a run has one or several) have levels l_p;
the change is the mean level of NEW minus that of BASE.

1. Levels by a robust two-way fit (`two_way`): a machine hiccups, and a hiccup is no change.
2. The noise of a cell: a row has few prompts to tell it from, so all rows of a figure share theirs,
   and all figures a little (moderated variances: Smyth, Stat. Appl. Genet. Mol. Biol. 3:3, 2004).
   A row noisier than that keeps its own; none profits from a calm that few prompts suggest.
3. The variance of a level is noise / (prompts - 1) + drift^2. Drift is what processes differ by
   though nothing changed. One process a side shows none of it: it is assumed (`_assumed_drift`),
   the wider the noisier the cells and the farther the machine's own speed differs between the
   sides, until several processes say better.
4. t = change / error against Student's t, for all simultaneously (Sidak, J. Am. Stat. Assoc. 62,
   1967).

Where processes of both sides took turns, neighbours in time are a pair: what outlasts a process
hits both, and what is left shows in how the pairs' differences scatter. Their variance is taken
with that of step 3 less the part of drift that outlasts a process (`_PAIR_PRIOR_DF`).

Times that grow by whatever disturbs them may have their levels where nothing did
(`fit_lower_envelope`).

How often it is right: docs/explanations/statistics.md.
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
"""Of the simultaneous two-sided intervals: two comparisons in a thousand are wrong about "slower",
fewer where the tolerance is the higher bar.
A gate is run for every change; at 95% it would cry wolf every month."""
POWER = 0.8
"""With which a change of `SlowdownEstimate.detectable` is found: the convention, as in
`stats.detectable`."""
MIN_PROMPTS = 3
"""With fewer, no majority of prompts outvotes one that met a hiccup."""

MIN_PAIRS = 5
"""With fewer, pairs do not tell how far they scatter."""
UNPAIRED = -1
"""The number of no pair."""

_SHARED_DF = 8.0
"""Degrees of freedom that the mean noise of all figures counts in one figure's, and a figure's in a
row's: between them standard deviations differ by a factor of two, as under an F distribution of so
many."""
_PRIOR_DF = 10.0
"""Degrees of freedom that the assumed drift counts against what several processes show of it: two
sides of six processes have as many."""
_PAIR_PRIOR_DF = 1.0
"""Degrees of freedom that the variance assumed of a pair's difference counts against what pairs
show of it: few, as some machines place each process anew and others do not."""
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
    """One figure of one row.

    figure: series of the same one share what is learnt of noise. values: [prompts, processes],
    logarithms; nan where missing. new: [processes], whether a process is NEW's. apart: logarithm of
    how much slower the machine itself was on NEW's side. pair: [processes], the number of the pair
    that a process belongs to, or `ALONE`, where they took turns. disturbed: whether whatever
    disturbs a value makes it larger.
    """

    figure: Hashable
    values: Floats
    is_new: NDArray[np.bool_]
    machine_slowdown: float = 0.0
    pair: NDArray[np.int_] | None = None
    one_sided_noise: bool = False


@dataclass(frozen=True, slots=True)
class SlowdownEstimate:
    """A change, as logarithms: above 0 slower.

    low, high: simultaneous interval. detects: the smallest that would be found with `POWER`.
    """

    log_ratio: float
    low: float
    high: float
    detectable: float

    @property
    def significant(self) -> bool:
        """Whether no change is excluded."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class _SeriesFit:
    """levels: [processes]. noise: variance of a cell, as levels feel it. df: its degrees of
    freedom. counts: [processes], prompts."""

    series: RegressionSeries
    levels: Floats
    noise: float
    df: int
    counts: Floats


def estimate_slowdowns(
    series: Sequence[RegressionSeries], *, tolerance: float = 0.0, level: float = LEVEL
) -> list[SlowdownEstimate | None]:
    """The change of every series; None where a side has no process with `MIN_PROMPTS` prompts that
    both have, or fewer than `MIN_PAIRS` pairs are left of those that took turns.

    Args:
        above: logarithm of the slowdown that is let pass, for `SlowdownEstimate.detectable`.
        level: of all intervals together.
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
    """Which processes have the other side's beside them."""
    both = np.intersect1d(pair[new], pair[~new])
    found: NDArray[np.bool_] = np.isin(pair, both[both != UNPAIRED])
    return found


def _keep_common(series: RegressionSeries) -> RegressionSeries | None:
    """The prompts that both sides have, in the processes that have enough of them and, where they
    took turns, their partner."""
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
    """The two-way fit, with fit_lower_envelope levels where they are asked for."""
    fit = fit_two_way(series.values)
    levels = fit_lower_envelope(series.values) if series.one_sided_noise else fit.levels
    counts = np.isfinite(series.values).sum(0).astype(float)
    return _SeriesFit(series, levels, fit.noise, fit.df, counts)


def _estimate_noise(fits: Sequence[_SeriesFit]) -> dict[Hashable, tuple[float, float]]:
    """Variance of a cell by figure, and its degrees of freedom."""
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
    """Of the levels of a row's processes [processes], but for what sides have in common."""
    variance = _value_variance(fit, noise)
    # One prompt fewer: with three, weights follow the noise that they are to keep out.
    return variance / (fit.counts - 1) + _assumed_drift(math.sqrt(variance)) ** 2


def _value_variance(fit: _SeriesFit, noise: float) -> float:
    """Of a row's cells."""
    own = (fit.df * fit.noise + _SHARED_DF * noise) / (fit.df + _SHARED_DF)
    return max(own, noise)


def _assumed_drift(noise: float) -> float:
    """What processes differ by, as a standard deviation, where cells do by `noise`."""
    share = _NOISY_DRIFT * min(1.0, noise / _NOISY_LEVEL)
    return math.hypot(_QUIET_DRIFT, share * noise)


def _estimate_deviations(
    fits: Sequence[_SeriesFit], noises: dict[Hashable, tuple[float, float]]
) -> dict[Hashable, float]:
    """By figure: how much farther the processes of a side differ than assumed, as a ratio of
    variances; 1 where no side has two."""
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
    """A row's change of a figure."""
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
    """A row's change of a figure, by pairs of processes that took turns."""
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
    """A change with its interval, and what would have been found."""
    critical, power_quantile = stats.t.isf([tail, 1 - POWER], df)
    width = float(critical) * error
    needed = max(width, tolerance) + float(power_quantile) * error
    return SlowdownEstimate(change, change - width, change + width, needed)
