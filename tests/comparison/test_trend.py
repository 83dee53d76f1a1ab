"""Tests of trends over runs: compatible runs, change points, the table, the JSON and the plot."""

import dataclasses
import json
import re

import numpy as np
import pytest

from specbench_cli.comparison import trend
from specbench_cli.comparison.compared_output import Counters, PairKey, Times
from specbench_cli.comparison.pages import figure
from specbench_cli.comparison.pages.as_dict import trends_as_dict
from specbench_cli.comparison.pages.text import print_trends
from specbench_cli.comparison.side import RowFacts
from specbench_cli.errors import UsageError
from tests.comparison.sides import make_output, make_side_of

PROMPTS = 10
FACTS = {"machine": "cpu, 2 cores, 0123abcd", "seed": "0", "torch": "2.13.0"}


def output(i, label, *, decode, steps=10, verdict="identical"):
    counters = Counters(41, 40, steps, 50, 50, 45, 30, steps + 1, 50)
    if label == "vanilla":
        counters = Counters(41, 40, 40, 0, 0, 0, 0, 41, 0)
    return make_output(
        PairKey(f"mini/qa-{i:03}", 1, label, 0, 0),
        counters=counters,
        verdict=verdict,
        times=None if decode is None else Times(decode, 1, 1, 1, None, None),
    )


def run(day, speedup=1.4, *, steps=10, length=5, bad=0, noisy=False, label="sps", **facts):
    """Return a run whose method `label` has this decode speedup and 40 / steps tokens per step."""
    outputs = [output(i, "vanilla", decode=14_000_000) for i in range(PROMPTS)]
    for i in range(PROMPTS):
        verdict = "mismatch" if i < bad else "identical"
        day_runs = None if speedup is None else round(14_000_000 / speedup)
        outputs.append(output(i, label, decode=day_runs, steps=steps, verdict=verdict))
    rows = {
        name: RowFacts(label=name, method=name, params=params, timing_free=True)
        for name, params in (("vanilla", {}), (label, {"length": length}))
    }
    return make_side_of(
        outputs,
        name=f"run-{day:02}",
        created_utc=f"2026-01-{day:02}T12:00:00Z",
        facts={**FACTS, "commit": f"{day:08x}", **facts},
        machine="0123abcd",
        noisy=noisy,
        rows=rows,
    )


def series_of(found, name, label="sps"):
    (series,) = (s for s in found.series if (s.figure, s.key.label) == (name, label))
    return series


@pytest.fixture(scope="module")
def history():
    """Trends of 24 runs: 10% slower from the 13th on, fewer tokens per step from the 19th on."""
    rng = np.random.default_rng(0)
    speed = np.exp(rng.normal(0, 0.01, 24)) * np.repeat([1.4, 1.26], 12)
    runs = [
        run(day, speed[day - 1], steps=10 if day < 19 else 11, length=5 if day < 19 else 4)
        for day in range(1, 25)
    ]
    return trend.find_trends(runs)


def test_figures_are_computed_from_the_outputs():
    found = trend.find_trends([run(1, 1.5, bad=2), run(2, 1.5)])
    assert series_of(found, trend.SPEEDUP).values == pytest.approx((1.5, 1.5), rel=1e-6)
    assert series_of(found, trend.MAT).values == (4.0, 4.0)
    assert series_of(found, trend.ACCEPTANCE).values == (0.6, 0.6)
    assert series_of(found, trend.BAD).values == (2.0, 0.0)
    assert series_of(found, trend.MAT, "vanilla").values == (1.0, 1.0)


def test_a_slowdown_is_located_between_two_commits(history):
    (point,) = series_of(history, trend.SPEEDUP).changes
    assert (point.last, point.first) == (11, 12)
    assert (point.before, point.after) == pytest.approx((1.4, 1.26), rel=0.02)
    assert point.p < history.level
    assert history.runs[point.last].commit == f"{12:08x}"


def test_a_change_of_a_deterministic_counter_names_the_changed_parameter(history):
    (point,) = series_of(history, trend.MAT).changes
    assert (point.first, point.before, point.p) == (18, 4.0, 0)
    assert point.params == ("length 5 -> 4",)


def test_runs_are_sorted_by_time(history):
    runs = [run(day) for day in (3, 1, 2)]
    assert [r.name for r in trend.find_trends(runs).runs] == ["run-01", "run-02", "run-03"]


def test_methods_have_the_order_of_the_newest_run_with_removed_ones_last():
    old, new = run(1, label="gone"), run(2)
    found = trend.find_trends(
        [old, dataclasses.replace(new, outputs=dict(reversed(new.outputs.items())))]
    )
    labels = list(dict.fromkeys(series.key.label for series in found.series))
    assert labels == ["vanilla", "sps", "gone"]


def test_runs_incompatible_with_the_newest_are_listed():
    found = trend.find_trends([run(1), run(2, machine="gpu"), run(3), run(4)])
    assert [r.name for r in found.runs] == ["run-01", "run-03", "run-04"]
    assert found.left_out == ("run-02 is not compatible with run-04: machine (gpu)",)


def test_versions_and_commits_may_differ():
    assert len(trend.find_trends([run(1, specbench="0.1.0"), run(2, specbench="0.2.0")]).runs) == 2


def test_counters_of_noisy_runs_are_used_but_not_their_times():
    found = trend.find_trends([run(1), run(2, 9.0, noisy=True), run(3)])
    assert series_of(found, trend.SPEEDUP).values[1] is None
    assert series_of(found, trend.MAT).values == (4.0, 4.0, 4.0)
    assert "run-02 is labelled noisy: its times are not used" in found.left_out


def test_a_row_with_too_few_times_has_no_speedup():
    first = run(1)
    lost = dict(list(first.outputs.items())[:-2])
    first_outputs = [c for c in first.outputs.values() if c.key in lost]
    outputs_without_times = [output(i, "sps", decode=None) for i in (8, 9)]
    outputs = {c.key: c for c in (*first_outputs, *outputs_without_times)}
    run_with_lost_times = dataclasses.replace(
        first, outputs=outputs, processes=(tuple(outputs.values()),)
    )
    assert (
        series_of(trend.find_trends([run_with_lost_times, run(2)]), trend.SPEEDUP).values[0] is None
    )


def test_a_run_given_twice_counts_once():
    assert len(trend.find_trends([run(1), run(1), run(2)]).runs) == 2


def test_one_run_is_rejected():
    with pytest.raises(UsageError, match="needs two compatible runs"):
        trend.find_trends([run(1), run(2, seed="1")])


def test_false_alarms_for_unchanged_code_are_rare():
    rng = np.random.default_rng(7)
    n_with_changes = 0
    for _ in range(20):
        speeds = 1.4 * np.exp(rng.normal(0, 0.03, 20))
        found = trend.find_trends([run(day, speeds[day - 1]) for day in range(1, 21)])
        n_with_changes += any(series.changes for series in found.series)
    assert n_with_changes <= 4


def test_json_has_run_date_and_commits_of_a_change(history):
    document = json.loads(json.dumps(trends_as_dict(history), allow_nan=False))
    assert (document["schema"], document["kind"], len(document["runs"])) == (1, "trends", 24)
    (series,) = (
        s for s in document["series"] if (s["figure"], s["label"]) == ("decode speedup", "sps")
    )
    (change,) = series["changes"]
    assert change["run"] == "run-13"
    assert change["created_utc"] == "2026-01-13T12:00:00Z"
    assert change["commit"] == {"before": f"{12:08x}", "after": f"{13:08x}"}


def test_tsv_has_one_line_per_run_and_figure_and_changes_on_stderr(history, capsys):
    print_trends(history, "tsv")
    out, err = capsys.readouterr()
    heading, *lines = (line.split("\t") for line in out.splitlines())
    assert len(lines) == 24 * len(history.series)
    changed = [dict(zip(heading, line, strict=True)) for line in lines if line[-1] == "yes"]
    assert {(line["run"], line["figure"]) for line in changed} >= {
        ("run-13", "decode speedup"),
        ("run-19", "MAT"),
    }
    assert "mini sps MAT 4.00 -> 3.64 at 2026-01-19T12:00:00Z" in err
    assert "commit 00000012 -> 00000013); length 5 -> 4" in err


def test_output_to_a_file_has_the_table_of_a_100_column_terminal(history, capsys, monkeypatch):
    print_trends(history)
    log = capsys.readouterr()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    print_trends(history)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert (log.out.splitlines(), log.err) == (lines, "")
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert any("4.00 -> 3.64 *" in line for line in lines)


def test_only_figures_that_vary_are_plotted(history, tmp_path):
    names = [file.name for file in figure.write(history, tmp_path)]
    assert names == [f"trend-{name}.{ext}" for name in ("speedup", "mat") for ext in ("svg", "png")]
    assert (tmp_path / "trend-speedup.svg").read_text().startswith("<?xml")
    assert (tmp_path / "trend-mat.png").read_bytes().startswith(b"\x89PNG")


def test_panel_marks_bad_outputs_and_values_outside_its_range(tmp_path):
    speeds = [1.4, 1.41, 1.39] * 10
    speeds[3] = 0.7
    found = trend.find_trends([run(day, v, bad=day == 7) for day, v in enumerate(speeds, start=1)])
    axes = figure.draw(found, [series_of(found, trend.SPEEDUP)]).axes[0]
    places = {
        line.get_marker(): list(line.get_xdata()) for line in axes.lines if len(line.get_xdata())
    }
    assert places["D"] == [4]
    assert places["x"] == [7]
    assert len(places["o"]) == 29
    _, high = axes.get_ylim()
    assert high < 0.1


def test_thirteen_methods_need_two_plots(tmp_path, monkeypatch):
    many = [run(day, 1 + day / 100, label=f"m{i}") for day in (1, 2) for i in range(13)]
    sides = []
    for day in (1, 2):
        day_runs = [side for side in many if side.name == f"run-{day:02}"]
        outputs = {k: c for side in day_runs for k, c in side.outputs.items()}
        rows = {k: r for side in day_runs for k, r in side.rows.items()}
        sides.append(
            dataclasses.replace(
                day_runs[0], outputs=outputs, rows=rows, processes=(tuple(outputs.values()),)
            )
        )
    monkeypatch.setattr(figure.style, "write", lambda drawn, _, name: [(name, len(drawn.axes))])
    assert figure.write(trend.find_trends(sides), tmp_path)[:2] == [
        ("trend-speedup-1", 12),
        ("trend-speedup-2", 1),
    ]
