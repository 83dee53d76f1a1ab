"""The laws of some points: what grows along which size where all else is alike.

Each law is fitted to all points of its line. Before that, what it would have said of the largest
size had this not been measured: the held-out point, beside what it came to.
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
    """The largest size of a line, predicted from the others. value: the mean of its `of` points;
    beyond: how many decades it lies beyond the others."""

    size: float
    value: float
    n: int
    predicted: IntervalEstimate
    decades_beyond: float

    @property
    def is_inside(self) -> bool:
        """Whether the interval holds it."""
        return self.predicted.low <= self.value <= self.predicted.high


@dataclass(frozen=True, slots=True)
class ScalingLaw:
    """A figure along a size. where: what else the points have, as far as lines differ in it. held:
    None of a line of two sizes, or whose largest lies too far from the others."""

    figure: str
    along: str
    where: str
    points: Pairs
    fit: LogLinear
    held_out: HeldOutPoint | None

    @property
    def name(self) -> str:
        """As messages call it."""
        return " ".join(filter(None, (FIGURES[self.figure][0], "along", self.along, self.where)))

    @property
    def warnings(self) -> list[str]:
        """Why not to believe it, or not what it says of the held-out point."""
        found = list(self.fit.warnings)
        if self.held_out is not None and self.held_out.decades_beyond:
            found.append(
                f"held-out point {self.held_out.decades_beyond:.2f} decades beyond the others"
            )
        return found


def fit_scaling_laws(points: Sequence[ScalingPoint]) -> list[ScalingLaw]:
    """All laws that some points have, a line for each set of points that differ in one size.

    Raises:
        UsageError: there is none.
    """
    told, found = _differing(points), []
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
                    where = ", ".join(f"{what} {value}" for what, value in key if what in told)
                    found.append(_fit_line(figure, along, where, sorted(pairs)))
    if not found:
        raise UsageError(
            f"no two of {len(points)} points differ in one size alone: {', '.join(SIZES)}",
            "python -m recipes.studies grid --out DIR; or runs of one command with several --batch",
        )
    return found


def _differing(points: Sequence[ScalingPoint]) -> set[str]:
    """What points have several values of."""
    values: dict[str, set[object]] = {}
    for point in points:
        both: Mapping[str, object] = {**point.sizes, **point.alike}
        for what, value in both.items():
            values.setdefault(what, set()).add(value)
    return {what for what, own in values.items() if len(own) > 1}


def _fit_line(figure: str, along: str, where: str, pairs: Pairs) -> ScalingLaw:
    return ScalingLaw(figure, along, where, pairs, fit_loglinear(pairs), _predict_held_out(pairs))


def _predict_held_out(pairs: Pairs) -> HeldOutPoint | None:
    """The largest size by the others."""
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


# ---- what is asked of laws -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScalingPrediction:
    """What a law says of a size that was asked for; None, with the reason, where it is refused."""

    law: ScalingLaw
    size: float
    predicted: IntervalEstimate | None
    note: str


def predict_size(laws: Sequence[ScalingLaw], along: str, size: float) -> list[ScalingPrediction]:
    """What the laws along a size say of one more point there.

    Raises:
        UsageError: no law goes along it, or none reaches so far.
    """
    asked = [law for law in laws if law.along == along]
    if not asked:
        known = ", ".join(dict.fromkeys(law.along for law in laws))
        raise UsageError(f"no law goes along {along}; these go along {known}", "--at SIZE=NUMBER")
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
