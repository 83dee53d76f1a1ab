"""Log-linear fits: known slopes are recovered, intervals have their coverage, doubts warn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from recipes.studies.loglinear import TooFar, fit_loglinear

SIZES = (1e5, 3e5, 1e6, 3e6, 1e7)


def exact_points(a, b, sizes=SIZES):
    return [(x, a + b * math.log10(x)) for x in sizes]


def noisy_points(a, b, sigma, seed, seeds=3):
    draw = np.random.default_rng(seed)
    return [
        (x, y + sigma * draw.standard_normal()) for x, y in exact_points(a, b) for _ in range(seeds)
    ]


@given(st.floats(-2, 2), st.floats(-1, 1))
def test_a_noiseless_line_is_recovered_exactly(a, b):
    fit = fit_loglinear(exact_points(a, b))
    assert fit.a.value == pytest.approx(a, abs=1e-9)
    assert fit.b.value == pytest.approx(b, abs=1e-9)
    assert fit.predict(2e6).value == pytest.approx(a + b * math.log10(2e6), abs=1e-9)


def test_the_fit_equals_scipy_s_linregress():
    points = noisy_points(0.1, 0.08, 0.02, 3)
    fit, expected = fit_loglinear(points), stats.linregress(*zip(*line_logs(points), strict=True))
    t = stats.t.ppf(0.975, len(points) - 2)
    assert (fit.b.value, fit.a.value) == pytest.approx((expected.slope, expected.intercept))
    assert fit.b.high - fit.b.value == pytest.approx(t * expected.stderr)
    assert fit.a.high - fit.a.value == pytest.approx(t * expected.intercept_stderr)
    assert fit.r2 == pytest.approx(expected.rvalue**2)


def line_logs(points):
    return [(math.log10(x), y) for x, y in points]


def test_intervals_have_their_nominal_coverage():
    """600 draws must have 95% coverage within three standard deviations.

    Tested are intervals of a, of b, and of predictions inside the points and half a decade beyond.
    """
    a, b, sigma, draws = 0.1, 0.08, 0.02, 600
    draw = np.random.default_rng(0)
    covered = np.zeros(4)
    for seed in range(draws):
        fit = fit_loglinear(noisy_points(a, b, sigma, seed))
        new = [a + b * math.log10(x) + sigma * draw.standard_normal(3) for x in (1e6, 3e7)]
        inside, outside = fit.predict(1e6), fit.predict(3e7, n_points=3)
        values = (a, b, new[0][0], new[1].mean())
        for at, (value, found) in enumerate(
            zip(values, (fit.a, fit.b, inside, outside), strict=True)
        ):
            covered[at] += found.low <= value <= found.high
    error = 3 * math.sqrt(0.95 * 0.05 / draws)
    assert np.all(np.abs(covered / draws - 0.95) < error), covered / draws


def test_a_bent_line_warns_and_a_straight_one_at_the_nominal_rate():
    draw = np.random.default_rng(1)
    bent = [
        (x, 1 / (1 + math.exp(-2 * (math.log10(x) - 6))) + 0.01 * draw.standard_normal())
        for x in SIZES
        for _ in range(3)
    ]
    assert fit_loglinear(bent).lack_of_fit_p < 0.01
    assert "no straight line" in " ".join(fit_loglinear(bent).warnings)
    false = sum(
        fit_loglinear(noisy_points(0.1, 0.08, 0.02, seed)).lack_of_fit_p < 0.05
        for seed in range(300)
    )
    assert false / 300 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_few_points_and_a_low_r2_warn():
    assert fit_loglinear(exact_points(0.1, 0.1, SIZES[:3])).warnings == ["3 points, fewer than 4"]
    assert fit_loglinear(exact_points(0.1, 0.1, SIZES[:4])).warnings == []
    (warning,) = fit_loglinear([(1, 0.0), (10, 1.0), (100, 0.0), (1000, 1.0)]).warnings
    assert "below 0.9" in warning
    same = fit_loglinear([(x, 0.1) for x in (1, 10, 100, 1000)])
    assert (same.r2, same.warnings) == (0, ["the same at all sizes"])


def test_two_points_have_a_line_without_an_interval():
    fit = fit_loglinear([(1, 1.0), (100, 3.0)])
    assert (fit.b.value, fit.b.low, fit.b.high) == (1.0, -math.inf, math.inf)
    assert fit.predict(10).value == pytest.approx(2.0)


def test_extrapolation_is_measured_in_decades_and_limited_to_one():
    fit = fit_loglinear(exact_points(0.1, 0.08))
    assert fit.decades_beyond(1e6) == fit.decades_beyond(1e5) == fit.decades_beyond(1e7) == 0
    assert fit.decades_beyond(1e8) == pytest.approx(1) and fit.decades_beyond(1e4) == pytest.approx(
        1
    )
    fit.predict(1e8)
    with pytest.raises(TooFar, match=r"1\.3 decades beyond the points, 100000 to 1e\+07"):
        fit.predict(2e8)
    with pytest.raises(TooFar):
        fit.predict(0.9e4)


@pytest.mark.parametrize(
    "points", [[(1, 1.0), (1, 2.0)], [(0, 1.0), (1, 2.0)], [(1, 1.0), (2, math.nan)]]
)
def test_points_without_a_line_are_refused(points):
    with pytest.raises(ValueError, match=r"two sizes|above 0"):
        fit_loglinear(points)
