"""Arrival times of requests: accepted forms and their times."""

from __future__ import annotations

import pytest

from specbench_cli.config.arrivals import Arrivals


def test_poisson_arrivals_are_independent_with_the_given_rate():
    times = Arrivals.parse("poisson:5").times(4000, seed=1)
    gaps = [b - a for a, b in zip([0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.08)  # as for an exponential distribution
    assert times == Arrivals.parse("poisson:5").times(4000, seed=1)
    assert times != Arrivals.parse("poisson:5").times(4000, seed=2)


def test_requests_of_a_burst_arrive_together():
    assert Arrivals.parse("burst:3:0.5").times(7, seed=0) == [0, 0, 0, 0.5, 0.5, 0.5, 1]


def test_a_trace_gives_the_arrival_times(tmp_path):
    file = tmp_path / "trace.txt"
    file.write_text("0\n0.25\n\n0.25\n1e0\n")
    arrivals = Arrivals.parse(f"trace:{file}")
    assert arrivals.times(3, seed=0) == [0, 0.25, 0.25]
    with pytest.raises(ValueError, match=r"4 arrival times for 5 prompts.*--limit 4"):
        arrivals.times(5, seed=0)


@pytest.mark.parametrize(
    "text",
    ["", "poisson", "poisson:", "poisson:0", "poisson:-1", "poisson:nan", "poisson:inf",
     "poisson:fast", "burst:4", "burst:0:1", "burst:2.5:1", "burst:2:0", "trace:", "uniform:3"],
)  # fmt: skip
def test_an_invalid_load_names_the_allowed_forms(text):
    with pytest.raises(ValueError, match=r"poisson:RATE .*burst:SIZE:SECONDS or trace:FILE"):
        Arrivals.parse(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "has no arrival time"),
        ("0\nsoon\n", "line 2: 'soon' is not a time"),
        ("0\n-1\n", "line 2: '-1' is not a time"),
        ("0\n2\n1\n", "arrival 3 at 1 s comes before the one at 2"),
    ],
)
def test_an_invalid_trace_is_named_with_its_line(tmp_path, lines, message):
    file = tmp_path / "trace.txt"
    file.write_text(lines)
    with pytest.raises(ValueError, match=message):
        Arrivals.parse(f"trace:{file}")
    with pytest.raises(ValueError, match="cannot be read"):
        Arrivals.parse(f"trace:{tmp_path}/none")


def test_several_rates_give_several_loads():
    for text in ("poisson:1,2,4", "poisson:1:4:1.5,8"):
        loads = Arrivals.parse_sweep(text)
        assert [each.text for each in loads] == [f"poisson:{each.rate:g}" for each in loads]
    assert [each.rate for each in Arrivals.parse_sweep("poisson:1,2,4")] == [1, 2, 4]
    slow, fast = Arrivals.parse_sweep("poisson:2,4")
    for at, twice in zip(fast.times(9, seed=1), slow.times(9, seed=1), strict=True):
        assert 2 * at == pytest.approx(twice)  # the same pattern at twice the rate
    assert [each.text for each in Arrivals.parse_sweep("burst:3:1")] == ["burst:3:1"]


@pytest.mark.parametrize(
    "text",
    ["poisson:", "poisson:1,", "poisson:1,1", "poisson:4:1:1", "poisson:1:4:0", "poisson:0:2:1",
     "poisson:1,soon", "poisson:2,inf", "poisson:1:999:1", "poisson:nan"],
)  # fmt: skip
def test_invalid_rates_name_the_allowed_forms(text):
    with pytest.raises(ValueError, match=r"RATE .*burst:SIZE:SECONDS or trace:FILE"):
        Arrivals.parse_sweep(text)
