"""Nodes of drafts in reports, apart from their levels; and the costs that sizes were chosen by."""

from dataclasses import replace

import pytest

from specbench_cli.report.content import report
from specbench_cli.report.markdown import render
from specbench_cli.report.report_data import Incidents
from specbench_cli.summary.summary import summarise


@pytest.fixture
def summary_of_trees(synthetic):
    """Every step of `sps` has three nodes a level."""
    records = [
        replace(r, steps=replace(r.steps, nodes=[3 * n for n in r.steps.levels]))
        if r.label == "sps"
        else r
        for r in synthetic.records((synthetic.vanilla, synthetic.sps), prompts=4)
    ]
    return summarise(records, {}, resamples=9)


def test_nodes_are_counted_apart_from_levels(summary_of_trees):
    vanilla, sps = (
        next(row for row in summary_of_trees.rows if row.label == label)
        for label in ("vanilla", "sps")
    )
    assert (vanilla.nodes_per_step, vanilla.node_yield) == (0.0, None)
    assert 10 < sps.nodes_per_step <= 15
    assert sps.node_yield == pytest.approx(sps.acceptance_rate / 3)


def test_page_has_nodes_and_the_costs_that_sizes_were_chosen_by(summary_of_trees):
    costs = {"source": "measured", "relative": {"target": {"1": 1.0, "64": 2.5}}}
    page = render(report(summary_of_trees, {"step_costs": costs}, Incidents(), ()))
    assert "| nodes/step | node yield |" in page
    assert "| step_costs.source | measured |" in page
    assert "target {'1': 1.0, '64': 2.5}" in page


def test_reuse_rate_is_of_the_drafts_that_could_have_been_ready(synthetic):
    counts = [{"reused": 3.0, "missed": 1.0, "prepared": 40.0}, {"reused": 1.0, "missed": 0.0}]
    records = [
        replace(r, extra=counts[i % 2]) if r.label == "sps" else r
        for i, r in enumerate(synthetic.records((synthetic.vanilla, synthetic.sps), prompts=4))
    ]
    given = [r.extra for r in records if r.extra]
    reused = sum(extra["reused"] for extra in given)
    due = reused + sum(extra["missed"] for extra in given)
    vanilla, sps = (
        next(row for row in summarise(records, {}, resamples=9).rows if row.label == label)
        for label in ("vanilla", "sps")
    )
    assert (vanilla.reuse_rate, sps.reuse_rate) == (None, pytest.approx(reused / due))
