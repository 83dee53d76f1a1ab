"""Whether anything became slower between two sides: all figures of all rows judged at once.

A figure's logarithms are values[i, p] = a_i + l_p + noise. Prompts i are the same on both sides, so
their a_i take nothing from what is found; processes p (a run has one or several) have levels l_p;
the change is the mean level of NEW minus that of BASE.

1. Levels by a two-way fit with Huber's weights ("Robust estimation of a location parameter", Ann.
   Math. Stat. 35, 1964): a machine hiccups, and a hiccup is no change.
2. The noise of a cell: a row has few prompts to tell it from, so all rows of a figure share theirs,
   and all figures a little (moderated variances: Smyth, Stat. Appl. Genet. Mol. Biol. 3:3, 2004).
   A row noisier than that keeps its own; none profits from a calm that few prompts suggest.
3. The variance of a level is noise / (prompts - 1) + drift^2. Drift is what processes differ by
   though nothing changed. One process a side shows none of it: it is assumed (`_drift`), the wider
   the noisier the cells and the farther the machine's own speed differs between the sides, until
   several processes say better.
4. t = change / error against Student's t, for all simultaneously (Sidak, J. Am. Stat. Assoc. 62,
   1967).

How often it is right: docs/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

LEVEL = 0.996
"""Of the simultaneous two-sided intervals: two comparisons in a thousand are wrong about "slower",
fewer where the tolerance is the higher bar.
A gate is run for every change; at 95% it would cry wolf every month."""
POWER = 0.8
"""With which a change of `Shift.detects` is found: the convention, as in `stats.detectable`."""
MIN_PROMPTS = 3
"""With fewer, no majority of prompts outvotes one that met a hiccup."""

_HUBER = 1.345
"""Where weights begin to fall, in standard deviations: 95% efficient at the normal law (Huber)."""
_ROUNDS = 10
"""Of the alternating fit, which is exact after one where nothing is missing or outlying."""
_FLOOR = 0.003
"""Nobody's times repeat better than to 0.3%: a smaller deviation is a coincidence."""
_LENT = 8.0
"""Degrees of freedom that the mean noise of all figures counts in one figure's, and a figure's in a
row's: between them standard deviations differ by a factor of two, as under an F law of so many."""
_PRIOR_DF = 10.0
"""Degrees of freedom that the assumed drift counts against what several processes show of it: two
sides of six processes have as many."""
_QUIET_DRIFT = 0.006
"""Drift on the quietest machine: memory is laid out anew in every process, which moves a ratio of
times by about 1% from run to run, that is 0.6 or 0.7% a process."""
_BAD_DRIFT, _BAD_NOISE = 0.6, 0.1
"""Drift as a share of the noise of a cell where that is 10% or more (in proportion less below): on
a virtual machine in a bad phase twelve runs of the same program differed by about 6% beside cells
of 10%, because phases of its host outlast a run; mere hiccups do not, and are what is left on a
quiet one."""
_ELASTICITY = 0.25
"""Ratios of times shift with the machine's own speed, by about so much of it: in the same twelve
runs what is bound by memory and what by the processor did not slow down alike (regression slopes
on vanilla's speed from 0.05 to 0.45)."""


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one row.

    figure: series of the same one share what is learnt of noise. values: [prompts, processes],
    logarithms; nan where missing. new: [processes], whether a process is NEW's. apart: logarithm of
    how much slower the machine itself was on NEW's side.
    """

    figure: Hashable
    values: Floats
    new: NDArray[np.bool_]
    apart: float = 0.0


@dataclass(frozen=True, slots=True)
class Shift:
    """A change, as logarithms: above 0 slower.

    low, high: simultaneous interval. detects: the smallest that would be found with `POWER`.
    """

    change: float
    low: float
    high: float
    detects: float

    @property
    def significant(self) -> bool:
        """Whether no change is excluded."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class _Fit:
    """levels: [processes]. noise: variance of a cell, as levels feel it. df: its degrees of
    freedom. counts: [processes], prompts."""

    of: Series
    levels: Floats
    noise: float
    df: int
    counts: Floats


def shifts(
    series: Sequence[Series], *, above: float = 0.0, level: float = LEVEL
) -> list[Shift | None]:
    """The change of every series; None where a side has no process with `MIN_PROMPTS` prompts that
    both have.

    Args:
        above: logarithm of the slowdown that is let pass, for `Shift.detects`.
        level: of all intervals together.
    """
    fits = [_fit(shared) if (shared := _common(one)) else None for one in series]
    kept = [fit for fit in fits if fit is not None]
    if not kept:
        return [None] * len(series)
    tail = -math.expm1(math.log(level) / len(kept)) / 2
    noises = _noises(kept)
    surprise = _surprise(kept, noises)
    return [
        None if fit is None else _shift(fit, *noises[fit.of.figure], surprise, above, tail)
        for fit in fits
    ]


def _common(one: Series) -> Series | None:
    """The prompts that both sides have, in the processes that have enough of them."""
    values, new = one.values, one.new
    while values.size and new.any() and not new.all():
        seen = np.isfinite(values)
        both = seen[:, new].any(1) & seen[:, ~new].any(1)
        enough = seen[both].sum(0) >= MIN_PROMPTS
        if both.all() and enough.all():
            return Series(one.figure, values, new, one.apart)
        values, new = values[both][:, enough], new[enough]
    return None


def _fit(one: Series) -> _Fit:
    """The two-way fit. Its residuals are smaller than noise, by what levels and prompts took."""
    seen = np.isfinite(one.values)
    df = max(1, int(seen.sum()) - sum(seen.shape) + 1)
    taken = math.sqrt(seen.sum() / df)
    levels = _medians((one.values - _medians(one.values)[:, None]).T)
    prompts = _medians(one.values - levels)
    rest = np.abs(one.values - prompts[:, None] - levels)[seen] * taken
    bound = _HUBER * max(1.4826 * float(np.median(rest)), _FLOOR) / taken
    y = np.where(seen, one.values, 0.0)
    for _ in range(_ROUNDS):
        far = np.abs(y - prompts[:, None] - levels)
        weights = np.where(seen, bound / np.maximum(far, bound), 0.0)
        levels = (weights * (y - prompts[:, None])).sum(0) / weights.sum(0)
        prompts = (weights * (y - levels)).sum(1) / weights.sum(1)
    rest = (y - prompts[:, None] - levels)[seen]
    inside = max(0.5, float((np.abs(rest) <= bound).mean()))
    noise = float((np.clip(rest, -bound, bound) ** 2).sum()) / df / inside**2
    return _Fit(one, levels, max(noise, _FLOOR**2), df, seen.sum(0).astype(float))


def _medians(values: Floats) -> Floats:
    """Of every row of what is there: np.nanmedian, which is slow on many short rows."""
    ordered = np.sort(values, axis=1)
    last = np.isfinite(values).sum(1) - 1
    rows = np.arange(len(values))
    found: Floats = (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2
    return found


def _noises(fits: Sequence[_Fit]) -> dict[Hashable, tuple[float, float]]:
    """Variance of a cell by figure, and its degrees of freedom."""
    everything = sum(fit.df for fit in fits)
    mean = sum(fit.df * fit.noise for fit in fits) / everything
    lent = min(_LENT, everything)
    found: dict[Hashable, tuple[float, float]] = {}
    for figure in {fit.of.figure: None for fit in fits}:
        own = [fit for fit in fits if fit.of.figure == figure]
        df = sum(fit.df for fit in own)
        variance = sum(fit.df * fit.noise for fit in own) / df
        found[figure] = (df * variance + lent * mean) / (df + lent), df + lent
    return found


def _variances(fit: _Fit, noise: float) -> Floats:
    """Of the levels of a row's processes [processes], but for what sides have in common."""
    own = (fit.df * fit.noise + _LENT * noise) / (fit.df + _LENT)
    variance = max(own, noise)
    # One prompt fewer: with three, weights follow the noise that they are to keep out.
    return variance / (fit.counts - 1) + _drift(math.sqrt(variance)) ** 2


def _drift(noise: float) -> float:
    """What processes differ by, as a standard deviation, where cells do by `noise`."""
    share = _BAD_DRIFT * min(1.0, noise / _BAD_NOISE)
    return math.hypot(_QUIET_DRIFT, share * noise)


def _surprise(
    fits: Sequence[_Fit], noises: dict[Hashable, tuple[float, float]]
) -> dict[Hashable, float]:
    """By figure: how much farther the processes of a side differ than assumed, as a ratio of
    variances; 1 where no side has two."""
    found: dict[Hashable, float] = {}
    for figure, (noise, _) in noises.items():
        squares, df = 0.0, 0
        for fit in (fit for fit in fits if fit.of.figure == figure):
            variances = _variances(fit, noise)
            for side in (fit.of.new, ~fit.of.new):
                apart = fit.levels[side] - fit.levels[side].mean()
                squares += float((apart**2 / variances[side]).sum())
                df += int(side.sum()) - 1
        found[figure] = squares / df if df else 1.0
    return found


def _shift(
    fit: _Fit,
    noise: float,
    noise_df: float,
    surprise: dict[Hashable, float],
    above: float,
    tail: float,
) -> Shift:
    """A row's change of a figure."""
    sides = (fit.of.new, ~fit.of.new)
    variances = _variances(fit, noise)
    measured = len(fit.of.new) - 2
    weight = measured / (_PRIOR_DF + measured)
    factor = 1 + weight * (surprise[fit.of.figure] - 1)
    variance = factor * sum(float(variances[side].mean() / side.sum()) for side in sides)
    error = math.hypot(math.sqrt(variance), _ELASTICITY * fit.of.apart)
    change = float(fit.levels[sides[0]].mean() - fit.levels[sides[1]].mean())
    critical, beyond = stats.t.isf([tail, 1 - POWER], noise_df + measured)
    width = float(critical) * error
    needed = max(width, above) + float(beyond) * error
    return Shift(change, change - width, change + width, needed)
