"""Tests of a sweep: its points, its Pareto front, and its table."""

from __future__ import annotations

import csv

import pytest

from specbench_cli.report.content import report
from specbench_cli.report.markdown import render
from specbench_cli.report.report_data import Incidents
from specbench_cli.summary.pareto import find_sweep, write_points


def test_points_have_the_order_of_the_options_and_the_swept_values(swept_run):
    sweep = find_sweep(*swept_run())
    assert sweep.params == ("length",)
    assert [(p.row.label, p.swept, p.along, p.series) for p in sweep.points[:3]] == [
        ("vanilla", {}, None, "vanilla"),
        ("sps length=1", {"length": 1}, "length", "sps"),
        ("sps length=3", {"length": 3}, "length", "sps"),
    ]
    assert [p.row.label for p in sweep.points[-2:]] == ["pld", "hf:vanilla"]


def test_discard_and_verification_rates_are_computed_from_counters(swept_run):
    rows = {row.label: row for row in swept_run()[0].rows}
    assert (rows["vanilla"].discard_rate, rows["vanilla"].verification_rate) == (0, 1)
    assert (rows["hf:vanilla"].discard_rate, rows["hf:vanilla"].verification_rate) == (0, 1)
    for row in rows.values():
        tokens = 12 * 64
        assert row.verification_rate == pytest.approx(row.target_forwards / tokens)
        if row.acceptance_rate is not None:
            drafted = row.draft_forwards
            assert row.discard_rate == pytest.approx(drafted * (1 - row.acceptance_rate) / tokens)


def test_front_has_exactly_the_points_that_no_other_dominates(swept_run):
    sweep = find_sweep(*swept_run())
    ranked = [p for p in sweep.points if not p.row.peer]
    for point in ranked:
        at = point.row.discard_rate, point.row.verification_rate
        others = [(p.row.discard_rate, p.row.verification_rate) for p in ranked]
        dominated = any(d <= at[0] and v <= at[1] and (d, v) != at for d, v in others)
        assert point.front is not dominated
    assert ranked[0].front


def test_lossy_broken_and_other_engines_methods_are_not_on_the_front(swept_run, synthetic):
    best = {"length": 9, "alpha": 0.99}
    lossy = synthetic.Fake("relaxed", guarantee="quality_only", **best)
    broken = synthetic.Fake("bad", verdict="mismatch", **best)
    peer = synthetic.Fake("hf:assisted", peer=True, **best)
    front = {p.row.label for p in find_sweep(*swept_run(lossy, broken, peer)).points if p.front}
    assert not front & {"relaxed", "bad", "hf:assisted"}
    assert "sps length=1" in front


@pytest.mark.parametrize("config", [{"sweep": {}}, {"tune": 8}])
def test_run_without_a_sweep_has_no_points(swept_run, config):
    assert find_sweep(*swept_run(**config)) is None


def test_lines_follow_the_parameter_with_most_numeric_values(swept_run):
    swept = {"sps": {"rule": ["author", "other"], "length": [1, 3], "max": [20]}}
    points = find_sweep(*swept_run(sweep=swept)).points
    assert {p.along for p in points if p.row.method == "sps"} == {"length"}
    assert points[1].series == "sps rule=None max=None"


def test_csv_has_the_figures_of_every_point(swept_run, tmp_path):
    sweep = find_sweep(*swept_run())
    with write_points(sweep, tmp_path / "figures" / "pareto.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == [p.row.label for p in sweep.points]
    assert [row["length"] for row in rows[:5]] == ["0", "1", "3", "5", "heuristic"]
    assert float(rows[1]["discard_rate"]) == sweep.points[1].row.discard_rate
    assert rows[0]["front"] == "true"


def test_report_has_the_table_and_the_plot(swept_run):
    summary, manifest = swept_run()
    figures = ["figures/speedup.svg", "figures/pareto.svg"]
    page = render(report(summary, manifest, Incidents(), figures, find_sweep(summary, manifest)))
    section = page.split("## Sweep")[1].split("\n## ")[0]
    head, _, *rows = (line for line in section.splitlines() if line.startswith("|"))
    assert head.startswith("| method | length | MAT | accepted | speedup | 95% CI |")
    assert [row.split(" | ")[1] for row in rows[1:5]] == ["1", "3", "5", "heuristic"]
    assert "](figures/pareto.svg)" in section
    assert "![speedup over vanilla](figures/pareto" not in page


def test_report_describes_the_tuning(swept_run):
    summary, manifest = swept_run(tune=4)
    manifest["tuning"] = {
        "budget": 4,
        "by": "time",
        "development": {"qa": 2, "rag": 1},
        "held_out": {"qa": 5, "rag": 3},
        "rows": {
            "sps": {
                "tried": 2,
                "prompts": 3,
                "passed": {"length": 3},
                "candidates": [
                    {"params": {"length": 3}, "cost": 1.25, "chosen": True},
                    {"params": {"length": 5}, "cost": None, "chosen": False},
                ],
            }
        },
    }
    page = render(report(summary, manifest, Incidents(), []))
    assert "on the same development questions (qa 2, rag 1), compared by decode time" in page
    assert "from the held-out questions (qa 5, rag 3)" in page
    assert "| sps | length=3 | 1.250 | yes | 3 |" in page
    assert "tuned: the best by decode time of at most 4 a method on 3 development questions" in page
