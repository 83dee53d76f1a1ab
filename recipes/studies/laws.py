"""Scaling laws: how a figure such as MAT depends on one size, such as the number of training
tokens.

All else is equal among the points of a law. The law is a line y = a + b log10(x) through them
(`loglinear`). As a check, a line through the smaller sizes predicts the largest size, which is
called the held-out point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from recipes.studies.loglinear import IntervalEstimate, LogLinear, TooFar, fit_loglinear
from recipes.studies.numbers import short
from recipes.studies.points import FIGURES, SIZES, ScalingPoint
from specbench_cli.errors import UsageError

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class HeldOutPoint:
    """The largest size among a law's points, predicted from the smaller sizes.

    value: mean of the measured points at the largest size.
    n: number of measured points at the largest size.
    decades_beyond: distance from the next smaller size in decades (factors of ten).
    """

    size: float
    value: float
    n: int
    predicted: IntervalEstimate
    decades_beyond: float

    @property
    def is_inside(self) -> bool:
        """True if the interval of the prediction contains the mean that was measured at the
        largest size.
        """
        return self.predicted.low <= self.value <= self.predicted.high


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """Scaling law: how one figure depends on one kind of size.

    figure, along: names of the figure and of the kind of size, from `points.FIGURES` and
        `points.SIZES`.
    where: other sizes and settings of the points as text. Only those that differ between laws.
    held_out: prediction of the largest size. None if there are only two sizes, or if the largest
        one is too far from the others.
    """

    figure: str
    along: str
    where: str
    points: Pairs
    fit: LogLinear
    held_out: HeldOutPoint | None

    @property
    def name(self) -> str:
        """Name of the scaling law in messages."""
        return " ".join(filter(None, (FIGURES[self.figure][0], "along", self.along, self.where)))

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the law, or its prediction of the largest size."""
        found = list(self.fit.warnings)
        if self.held_out is not None and self.held_out.decades_beyond:
            found.append(
                f"held-out point {self.held_out.decades_beyond:.2f} decades beyond the others"
            )
        return found


def fit_scaling_laws(points: Sequence[ScalingPoint]) -> list[ScalingLaw]:
    """Fit a scaling law to each set of points that differ in one kind of size only.

    Raises:
        UsageError: there is no such set.
    """
    varying, found = _find_varying(points), []
    points = sorted(points, key=lambda point: [*point.sizes.items()])
    for figure in FIGURES:
        for along in SIZES:
            lines: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
            for point in points:
                if along in point.sizes and figure in point.figures:
                    others = {
                        size: short(value) for size, value in point.sizes.items() if size != along
                    }
                    key = tuple({**others, **point.alike}.items())
                    pair = point.sizes[along], point.figures[figure]
                    lines.setdefault(key, []).append(pair)
            for key, pairs in lines.items():
                if len({size for size, _ in pairs}) > 1:
                    where = ", ".join(f"{what} {value}" for what, value in key if what in varying)
                    found.append(_fit_line(figure, along, where, sorted(pairs)))
    if not found:
        raise UsageError(
            f"none of the {len(points)} points differ in only one of these sizes:"
            f" {', '.join(SIZES)}",
            "python -m recipes.studies grid --out DIR; or runs of one command with several --batch",
        )
    return found


def _find_varying(points: Sequence[ScalingPoint]) -> set[str]:
    """Return the names of those sizes and settings that differ between the points."""
    values: dict[str, set[object]] = {}
    for point in points:
        both: Mapping[str, object] = {**point.sizes, **point.alike}
        for what, value in both.items():
            values.setdefault(what, set()).add(value)
    return {what for what, own in values.items() if len(own) > 1}


def _fit_line(figure: str, along: str, where: str, pairs: Pairs) -> ScalingLaw:
    return ScalingLaw(figure, along, where, pairs, fit_loglinear(pairs), _predict_held_out(pairs))


def _predict_held_out(pairs: Pairs) -> HeldOutPoint | None:
    """Predict the value at the largest size from the smaller sizes.

    Return None if there are fewer than two smaller sizes.
    """
    largest = pairs[-1][0]
    rest = [pair for pair in pairs if pair[0] < largest]
    if len({size for size, _ in rest}) < 2:
        return None
    fit, values = fit_loglinear(rest), [value for size, value in pairs if size == largest]
    try:
        predicted = fit.predict(largest, n_points=len(values))
    except TooFar:
        return None
    return HeldOutPoint(largest, mean(values), len(values), predicted, fit.decades_beyond(largest))


# ---- predictions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScalingPrediction:
    """Value that a scaling law predicts at a size.

    predicted: None if the size is too far from the measured sizes.
    note: how far the law is extrapolated, or why there is no prediction.
    """

    law: ScalingLaw
    size: float
    predicted: IntervalEstimate | None
    note: str


def predict_size(laws: Sequence[ScalingLaw], along: str, size: float) -> list[ScalingPrediction]:
    """Return the predictions at one size of all laws over this kind of size.

    Args:
        along: kind of size, such as "tokens".
        size: the size at which to predict.

    Raises:
        UsageError: there is no law over this kind of size, or the size is too far from all points.
    """
    asked = [law for law in laws if law.along == along]
    if not asked:
        known = ", ".join(dict.fromkeys(law.along for law in laws))
        raise UsageError(
            f"--at {along}: there is no law over {along}; there are laws over {known}",
            "--at SIZE=NUMBER",
        )
    found = []
    for law in asked:
        beyond = law.fit.decades_beyond(size)
        try:
            note = f"extrapolated by {beyond:.2f} decades" if beyond else ""
            found.append(ScalingPrediction(law, size, law.fit.predict(size), note))
        except TooFar as fault:
            found.append(ScalingPrediction(law, size, None, str(fault)))
    if all(said.predicted is None for said in found):
        fit = found[0].law.fit
        nearest = 10 * fit.largest if size > fit.largest else fit.smallest / 10
        raise UsageError(
            f"--at {along}={short(size)}: {found[0].note}", f"--at {along}={short(nearest)}"
        )
    return found
