"""Tests of figures under load, on a simulated queue with known times."""

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
    """Return a function that makes the records of one server that handles requests in order.

    A request takes 0.05 s to its first token and 0.2 s in total. Above 5 requests per second, the
    server is saturated.
    """

    def make(*loads, n=96, passes=1):
        found = []
        for at, load in enumerate(loads):
            arrivals = Arrivals.parse(load)
            for pass_ in range(1, passes + 1):
                free = 0.0
                for place, arrival in enumerate(arrivals.times(n, seed=3)):
                    begin, free = max(arrival, free), max(arrival, free) + 0.2
                    times = (round(arrival * 1e9), round((begin + 0.05) * 1e9), round(free * 1e9))
                    found.append((pass_ + LOAD_PASS_OFFSET * at, place, load, times))
        (template,) = synthetic.records([synthetic.vanilla], prompts=1, tokens=31)
        end = max(times[2] for *_, times in found)
        return [
            replace(
                template,
                prompt_id=f"mini/{place}",
                pass_=pass_,
                batch=BatchMembership(n, place, end, times[2], 1, times[0], times[1], load),
            )
            for pass_, place, load, times in found
        ]

    return make


def test_rates_and_times_are_computed_from_the_requests(queue):
    (row,) = load_rows(queue("burst:1:0.5", n=20))
    assert (row.load, row.requests, row.offered_rate, row.saturated) == (
        "burst:1:0.5",
        20,
        2,
        False,
    )
    assert row.throughput == pytest.approx(20 / (19 * 0.5 + 0.2))
    assert row.goodput == pytest.approx(31 * row.throughput)
    for name, expected in (("ttft_s", 0.05), ("ms_per_token", 5.0), ("latency_s", 0.2)):
        for percent in (50, 90, 99):
            assert row.figures[f"{name}_p{percent}"] == pytest.approx((expected,) * 3)


def test_a_method_is_saturated_above_its_capacity(queue):
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
    ("loads", "message"),
    [
        (("poisson:0.5", "poisson:1"), "not saturated up to"),
        (("poisson:20", "poisson:40"), "requests/s on, the lowest rate; at most"),
    ],
)
def test_saturation_at_no_rate_or_every_rate_has_a_note(queue, loads, message):
    assert message in saturation_notes(load_rows(queue(*loads)))[0]
    assert saturation_notes(load_rows(queue(loads[0]))) == []


def test_an_interval_contains_its_figure_and_narrows_with_requests(queue):
    few_requests, many_requests = (load_rows(queue("poisson:3", n=n))[0] for n in (24, 400))
    for row in (few_requests, many_requests):
        for value, low, high in row.figures.values():
            assert low <= value * 1.0001 and value <= high * 1.0001
    widths = [
        high - low
        for _, low, high in (row.figures["tokens_per_s"] for row in (few_requests, many_requests))
    ]
    assert widths[1] < widths[0]


def test_bootstrap_blocks_stay_within_their_pass():
    parts = [np.arange(27.0), 100 + np.arange(8.0)]
    resampled = resample_blocks(parts)
    assert resampled.shape[1] == 35
    assert (resampled[:, :27] < 27).all() and (resampled[:, 27:] >= 100).all()
    steps = np.diff(resampled[:, :27].reshape(-1, 9, 3)) % 27
    assert (steps == 1).all()  # blocks of 27^(1/3)


def test_several_passes_are_combined_without_mixing_their_waits(queue):
    once, twice = (load_rows(queue("poisson:3", passes=n))[0] for n in (1, 2))
    assert twice.requests == 2 * once.requests
    assert twice.throughput == pytest.approx(once.throughput)
    assert twice.figures["latency_s_p50"][0] == once.figures["latency_s_p50"][0]


def test_a_simulation_is_compared_with_the_median_over_passes(queue):
    (modelled,) = load_rows(queue("poisson:3", passes=2))
    first, *others = queue("poisson:3", passes=3)
    stalled = replace(first, batch=replace(first.batch, finished=first.batch.finished + 9 * SECOND))
    (measured,) = load_rows([stalled, *others])
    assert measured.figures["latency_s_p99"][0] > modelled.figures["latency_s_p99"][0]
    (errors,) = latency_errors([modelled], [measured])
    assert errors["latency_s_p50_error"] == pytest.approx(0) == errors["latency_s_p99_error"]
    (incomplete,) = load_rows(others)  # with a missing request, the passes cannot be matched
    assert len(incomplete.typical()) == 3 * 96 - 1


def test_table_page_file_and_figure_have_the_same_values(queue, manifest, tmp_path):
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
