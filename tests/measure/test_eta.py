"""The time left, with a clock made of numbers."""

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


def worked(due, units, seconds):
    row = Work(due)
    row.add(units, seconds)
    return row


def test_nothing_is_known_before_the_first_cell():
    assert estimate_seconds_left({"vanilla": Work(10)}, 0.0) is None


def test_each_row_is_left_at_its_own_speed():
    rows = {"slow": worked(4, 2, 20), "fast": worked(10, 2, 2)}
    assert estimate_seconds_left(rows, 22) == 2 * 10 + 8 * 1


def test_a_row_without_a_cell_counts_as_the_others():
    rows = {"known": worked(2, 2, 6), "new": Work(due=2)}
    assert estimate_seconds_left(rows, 6) == 2 * 3


def test_time_outside_cells_goes_on_as_it_came():
    assert estimate_seconds_left({"vanilla": worked(4, 2, 10)}, elapsed=15) == 10 * 1.5


def test_later_passes_count_with_their_starts():
    clock = Clock()
    pace = EtaEstimator(
        {"vanilla": Work(due=2, later=4)}, later_processes=2, start_s=7, clock=clock
    )
    with pace.time_work("vanilla", 1):
        clock.now += 3
    assert pace.seconds_left() == (1 + 4) * 3 + 14


def test_the_first_judging_counts_as_it_is_thought_and_in_passes_to_come_as_it_was():
    clock = Clock()
    pace = EtaEstimator(
        {"vanilla": Work(4, later=4)}, later_processes=1, start_s=7, first_judging_s=3, clock=clock
    )
    with pace.time_work("vanilla", 1):
        clock.now += 2
    assert pace.seconds_left() == (3 + 4) * 2 + 3 + (7 + 3)
    with pace.time_judging():
        clock.now += 5
    assert pace.seconds_left() == (3 + 4) * 2 + (7 + 5)


def test_a_dropped_row_has_nothing_left():
    clock = Clock()
    pace = EtaEstimator({"vanilla": Work(2), "faulty": Work(2, later=9)}, clock=clock)
    for label in ("vanilla", "faulty"):
        with pace.time_work(label, 1):
            clock.now += 5
    pace.drop("faulty")
    assert pace.seconds_left() == 5


@given(
    seconds=st.lists(st.floats(0.1, 100), min_size=1, max_size=6),
    judging=st.floats(0, 10),
    loading=st.floats(0, 1000),
    prompts=st.integers(3, 30),
)
def test_time_left_is_right_from_the_second_prompt_on_where_prompts_are_alike(
    seconds, judging, loading, prompts
):
    """However the rows differ, and whatever the judge loads on the first prompt."""
    clock = Clock()
    pace = EtaEstimator({str(row): Work(prompts) for row in range(len(seconds))}, clock=clock)
    said = []
    for prompt in range(prompts):
        for row, cost in enumerate(seconds):
            with pace.time_work(str(row), 1):
                clock.now += cost
        with pace.time_judging():
            clock.now += judging + (loading if prompt == 0 else 0)
        said.append((clock.now, pace.seconds_left()))
    end = clock.now
    for now, left in said[1:-1]:
        assert left == pytest.approx(end - now, rel=1e-6)
    assert all(one > next_ for (_, one), (_, next_) in pairwise(said[1:]))


@pytest.mark.parametrize(("first", "then"), [(10.0, 1.0), (1.0, 10.0)])
def test_time_left_follows_a_machine_that_becomes_quiet_or_busy(first, then):
    clock = Clock()
    pace = EtaEstimator({"vanilla": Work(200), "sps": Work(200)}, clock=clock)
    for prompt in range(100):
        for label in ("vanilla", "sps"):
            with pace.time_work(label, 1):
                clock.now += first if prompt < 60 else then
    assert pace.seconds_left() == pytest.approx(100 * 2 * then, rel=0.5)


def test_a_run_says_its_stages_and_each_prompt_with_the_time_left(specbench, log):
    view = log()
    specbench("sps", limit=3, max_new_tokens=4, repeats=1, log=view)
    loading, warming_up, *prompts, back = view.said
    assert (loading, warming_up) == ("loading embedded-7m, embedded-1m", "warming up 2 methods")
    assert back == "decoding the first prompt once more"
    assert [(told.part, told.prompt, told.prompts) for told in prompts] == [
        ("", 1, 3), ("", 2, 3), ("", 3, 3)
    ]  # fmt: skip
    *before, over = (told.left_s for told in prompts)
    assert min(before) > 0
    assert over is None  # what is left is a stage, not a prompt


def test_slow_rows_are_told_of_between_two_outputs_and_never_within_one(
    specbench, log, monkeypatch
):
    """The time left comes after each row then, while neither an output nor a window is open."""
    monkeypatch.setattr(repeat_progress, "REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(quiet, "WINDOW_S", 0.0)
    view, timed, at = log(), [], []
    measure, told = Measurement.measure, view.prompt

    def watched(cell):
        timed.append(cell)
        measure(cell)
        timed.pop()

    monkeypatch.setattr(Measurement, "measure", watched)
    monkeypatch.setattr(view, "prompt", lambda progress: (at.append(len(timed)), told(progress)))
    specbench("sps", limit=2, max_new_tokens=4, repeats=1, log=view)
    assert at == [0] * 6  # two rows and the prompt's end, twice
    assert [each.prompt for each in view.said if isinstance(each, PromptProgress)] == [
        0,
        0,
        1,
        1,
        1,
        2,
    ]


def test_a_report_takes_longer_the_more_there_is_to_tell_and_the_slower_the_machine():
    little = estimate_report_seconds(2.0, methods=5, outputs=70)
    assert (
        little
        < estimate_report_seconds(2.0, methods=14, outputs=196)
        < estimate_report_seconds(2.0, 45, 4365)
    )
    assert estimate_report_seconds(4.0, methods=5, outputs=70) == 2 * little
    assert estimate_report_seconds(0.0, methods=5, outputs=70) == 0


def test_seconds_of_this_process_grow():
    assert 0 < process_age() < process_age()
