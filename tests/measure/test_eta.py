"""Tests of the estimated time left, with a simulated clock."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.measure import quiet, repeat_progress
from specbench_cli.measure.eta import (
    EtaEstimator,
    Work,
    estimate_report_seconds,
    estimate_seconds_left,
    process_age,
)
from specbench_cli.measure.measurement import Measurement
from specbench_cli.measure.view import PromptProgress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_work(total, units, seconds):
    row = Work(total)
    row.add(units, seconds)
    return row


def test_time_left_is_unknown_before_the_first_output():
    assert estimate_seconds_left({"vanilla": Work(10)}, 0.0) is None


def test_each_method_continues_at_its_own_speed():
    rows = {"slow": make_work(4, 2, 20), "fast": make_work(10, 2, 2)}
    assert estimate_seconds_left(rows, 22) == 2 * 10 + 8 * 1


def test_a_method_without_outputs_is_assumed_as_fast_as_the_others():
    rows = {"known": make_work(2, 2, 6), "new": Work(due=2)}
    assert estimate_seconds_left(rows, 6) == 2 * 3


def test_time_outside_outputs_is_extrapolated():
    assert estimate_seconds_left({"vanilla": make_work(4, 2, 10)}, elapsed=15) == 10 * 1.5


def test_later_passes_include_their_start_time():
    clock = Clock()
    estimator = EtaEstimator(
        {"vanilla": Work(due=2, later=4)}, later_processes=2, start_s=7, clock=clock
    )
    with estimator.time_work("vanilla", 1):
        clock.now += 3
    assert estimator.seconds_left() == (1 + 4) * 3 + 14


def test_judging_is_first_estimated_and_then_measured():
    clock = Clock()
    estimator = EtaEstimator(
        {"vanilla": Work(4, later=4)}, later_processes=1, start_s=7, first_judging_s=3, clock=clock
    )
    with estimator.time_work("vanilla", 1):
        clock.now += 2
    assert estimator.seconds_left() == (3 + 4) * 2 + 3 + (7 + 3)
    with estimator.time_judging():
        clock.now += 5
    assert estimator.seconds_left() == (3 + 4) * 2 + (7 + 5)


def test_a_dropped_method_has_no_time_left():
    clock = Clock()
    estimator = EtaEstimator({"vanilla": Work(2), "faulty": Work(2, later=9)}, clock=clock)
    for label in ("vanilla", "faulty"):
        with estimator.time_work(label, 1):
            clock.now += 5
    estimator.drop("faulty")
    assert estimator.seconds_left() == 5


@given(
    seconds=st.lists(st.floats(0.1, 100), min_size=1, max_size=6),
    judging=st.floats(0, 10),
    loading=st.floats(0, 1000),
    prompts=st.integers(3, 30),
)
def test_time_left_is_exact_from_the_second_prompt_on_if_prompts_are_equal(
    seconds, judging, loading, prompts
):
    """The speeds of the methods and the judge's loading time on the first prompt do not matter."""
    clock = Clock()
    estimator = EtaEstimator({str(row): Work(prompts) for row in range(len(seconds))}, clock=clock)
    estimates = []
    for prompt in range(prompts):
        for row, cost in enumerate(seconds):
            with estimator.time_work(str(row), 1):
                clock.now += cost
        with estimator.time_judging():
            clock.now += judging + (loading if prompt == 0 else 0)
        estimates.append((clock.now, estimator.seconds_left()))
    end = clock.now
    for now, left in estimates[1:-1]:
        assert left == pytest.approx(end - now, rel=1e-6)
    assert all(one > next_ for (_, one), (_, next_) in pairwise(estimates[1:]))


@pytest.mark.parametrize(("first", "then"), [(10.0, 1.0), (1.0, 10.0)])
def test_time_left_follows_a_machine_that_becomes_quiet_or_busy(first, then):
    clock = Clock()
    estimator = EtaEstimator({"vanilla": Work(200), "sps": Work(200)}, clock=clock)
    for prompt in range(100):
        for label in ("vanilla", "sps"):
            with estimator.time_work(label, 1):
                clock.now += first if prompt < 60 else then
    assert estimator.seconds_left() == pytest.approx(100 * 2 * then, rel=0.5)


def test_a_run_reports_its_stages_and_each_prompt_with_the_time_left(specbench, log):
    view = log()
    specbench("sps", limit=3, max_new_tokens=4, repeats=1, log=view)
    loading, warming_up, *prompts, last_stage = view.events
    assert (loading, warming_up) == ("loading embedded-7m, embedded-1m", "warming up 2 methods")
    assert last_stage == "decoding the first prompt once more"
    assert [(progress.part, progress.prompt, progress.prompts) for progress in prompts] == [
        ("", 1, 3), ("", 2, 3), ("", 3, 3)
    ]  # fmt: skip
    *times_left, last_time_left = (progress.left_s for progress in prompts)
    assert min(times_left) > 0
    assert last_time_left is None  # after the last prompt only a stage is left


def test_progress_of_slow_methods_is_reported_only_between_outputs(specbench, log, monkeypatch):
    """The time left is then reported after each method, outside of outputs and windows."""
    monkeypatch.setattr(repeat_progress, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(quiet, "WINDOW_S", 0.0)
    view, open_measurements, at = log(), [], []
    measure, report_prompt = Measurement.measure, view.prompt

    def measure_watched(measurement):
        open_measurements.append(measurement)
        measure(measurement)
        open_measurements.pop()

    monkeypatch.setattr(Measurement, "measure", measure_watched)
    monkeypatch.setattr(
        view,
        "prompt",
        lambda progress: (at.append(len(open_measurements)), report_prompt(progress)),
    )
    specbench("sps", limit=2, max_new_tokens=4, repeats=1, log=view)
    assert at == [0] * 6  # two methods and the end of the prompt, twice
    assert [each.prompt for each in view.events if isinstance(each, PromptProgress)] == [
        0,
        0,
        1,
        1,
        1,
        2,
    ]


def test_report_time_grows_with_outputs_and_with_the_slowness_of_the_machine():
    small = estimate_report_seconds(2.0, methods=5, outputs=70)
    assert (
        small
        < estimate_report_seconds(2.0, methods=14, outputs=196)
        < estimate_report_seconds(2.0, 45, 4365)
    )
    assert estimate_report_seconds(4.0, methods=5, outputs=70) == 2 * small
    assert estimate_report_seconds(0.0, methods=5, outputs=70) == 0


def test_process_age_grows():
    assert 0 < process_age() < process_age()
