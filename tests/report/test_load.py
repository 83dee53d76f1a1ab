"""What requests met under load: of a queue whose times are known."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from specbench_cli.config.arrivals import Arrivals
from specbench_cli.report.content import report
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.report.figures.load import draw
from specbench_cli.report.markdown import render
from specbench_cli.report.report_data import Incidents
from specbench_cli.report.terminal.table import load_lines
from specbench_cli.store.schema import LOAD_PASS_OFFSET, BatchMembership
from specbench_cli.summary.columns import write_csv
from specbench_cli.summary.load import (
    as_dict,
    latency_errors,
    load_rows,
    resample_blocks,
    saturation_index,
    saturation_notes,
)
from specbench_cli.summary.summary import summarise

SECOND = 1_000_000_000


@pytest.fixture
def queue(synthetic):
    """Records of one server: a request waits for those before it, and takes 0.05 s until its first
    token and 0.2 s in all, so that it is outrun above 5 requests a second."""

    def make(*loads, n=96, passes=1):
        found = []
        for at, load in enumerate(loads):
            arrivals = Arrivals.parse(load)
            for pass_ in range(1, passes + 1):
                free = 0.0
                for place, came in enumerate(arrivals.times(n, seed=3)):
                    begin, free = max(came, free), max(came, free) + 0.2
                    times = (round(came * 1e9), round((begin + 0.05) * 1e9), round(free * 1e9))
                    found.append((pass_ + LOAD_PASS_OFFSET * at, place, load, times))
        (like,) = synthetic.records([synthetic.vanilla], prompts=1, tokens=31)
        end = max(times[2] for *_, times in found)
        return [
            replace(
                like,
                prompt_id=f"mini/{place}",
                pass_=pass_,
                batch=BatchMembership(n, place, end, times[2], 1, times[0], times[1], load),
            )
            for pass_, place, load, times in found
        ]

    return make


def test_rates_and_times_of_a_row_are_those_of_its_requests(queue):
    (row,) = load_rows(queue("burst:1:0.5", n=20))
    assert (row.load, row.requests, row.offered_rate, row.saturated) == (
        "burst:1:0.5",
        20,
        2,
        False,
    )
    assert row.throughput == pytest.approx(20 / (19 * 0.5 + 0.2))
    assert row.goodput == pytest.approx(31 * row.throughput)
    for name, due in (("ttft_s", 0.05), ("ms_per_token", 5.0), ("latency_s", 0.2)):
        for percent in (50, 90, 99):
            assert row.figures[f"{name}_p{percent}"] == pytest.approx((due,) * 3)


def test_a_row_is_saturated_from_where_arrivals_outrun_it(queue):
    rows = load_rows(queue("poisson:8", "poisson:2", "poisson:16", "poisson:1"))
    assert [row.load for row in rows] == ["poisson:1", "poisson:2", "poisson:8", "poisson:16"]
    assert [row.saturated for row in rows] == [False, False, True, True]
    assert saturation_index(rows) == 2
    (line,) = saturation_notes(rows)
    at = [f"{row.offered_rate:.3g}" for row in rows]
    assert line.startswith(
        f"vanilla: saturated from {at[2]} requests/s on, not at {at[1]}; at most"
    )
    assert max(row.throughput for row in rows) == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        (("poisson:0.5", "poisson:1"), "not saturated up to"),
        (("poisson:20", "poisson:40"), "requests/s on, the lowest rate; at most"),
    ],
)
def test_what_is_saturated_nowhere_or_everywhere_is_said(queue, loads, said):
    assert said in saturation_notes(load_rows(queue(*loads)))[0]
    assert saturation_notes(load_rows(queue(loads[0]))) == []


def test_an_interval_holds_its_figure_and_narrows_with_requests(queue):
    few, many = (load_rows(queue("poisson:3", n=n))[0] for n in (24, 400))
    for row in (few, many):
        for value, low, high in row.figures.values():
            assert low <= value * 1.0001 and value <= high * 1.0001
    widths = [high - low for _, low, high in (row.figures["tokens_per_s"] for row in (few, many))]
    assert widths[1] < widths[0]


def test_neighbours_are_drawn_together_within_their_pass():
    parts = [np.arange(27.0), 100 + np.arange(8.0)]
    drawn = resample_blocks(parts)
    assert drawn.shape[1] == 35
    assert (drawn[:, :27] < 27).all() and (drawn[:, 27:] >= 100).all()
    steps = np.diff(drawn[:, :27].reshape(-1, 9, 3)) % 27
    assert (steps == 1).all()  # blocks of 27^(1/3)


def test_several_passes_are_one_row_and_their_waits_are_not_mixed(queue):
    once, twice = (load_rows(queue("poisson:3", passes=n))[0] for n in (1, 2))
    assert twice.requests == 2 * once.requests
    assert twice.throughput == pytest.approx(once.throughput)
    assert twice.figures["latency_s_p50"][0] == once.figures["latency_s_p50"][0]


def test_a_simulation_is_held_against_each_requests_median_over_the_passes(queue):
    (modelled,) = load_rows(queue("poisson:3", passes=2))
    first, *others = queue("poisson:3", passes=3)
    stalled = replace(first, batch=replace(first.batch, finished=first.batch.finished + 9 * SECOND))
    (measured,) = load_rows([stalled, *others])
    assert measured.figures["latency_s_p99"][0] > modelled.figures["latency_s_p99"][0]
    (off,) = latency_errors([modelled], [measured])
    assert off["latency_s_p50_error"] == pytest.approx(0) == off["latency_s_p99_error"]
    (cut,) = load_rows(others)  # a pass lacks a request: which is which is not known
    assert len(cut.typical()) == 3 * 96 - 1


def test_table_page_file_and_figure_say_the_same(queue, manifest, tmp_path):
    records = queue("poisson:2", "poisson:8")
    rows = load_rows(records)
    lines = [line.plain for line in load_lines(rows)]
    assert lines[-2].endswith("saturated") and not lines[-3].endswith("saturated")
    assert lines[-1] == saturation_notes(rows)[0]
    summary = summarise(records, manifest, resamples=9)
    page = render(report(summary, manifest, Incidents(), [], loads=rows))
    assert "## Under load" in page and f"- {lines[-1]}" in page
    with write_csv(list(map(as_dict, rows)), tmp_path / "load.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [line["load"] for line in written] == ["poisson:2", "poisson:8"]
    assert float(written[1]["tokens_per_s"]) == as_dict(rows[1])["tokens_per_s"]
    figure = draw(FigureData(summary, manifest, {"vanilla": records}))
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "goodput (tokens/s)",
        "TTFT (s)",
        "latency (s)",
    ]
    assert draw(FigureData(summary, manifest, {"vanilla": queue("poisson:2")})) is None
