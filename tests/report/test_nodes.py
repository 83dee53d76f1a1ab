"""Tests of draft nodes, step costs and the reuse rate in reports."""

from dataclasses import replace

import pytest

from specbench_cli.report.content import report
from specbench_cli.report.markdown import render
from specbench_cli.report.report_data import Incidents
from specbench_cli.summary.summary import summarise


@pytest.fixture
def summary_of_trees(synthetic):
    """A summary in which every step of `sps` has three nodes per level."""
    records = [
        replace(r, steps=replace(r.steps, nodes=[3 * n for n in r.steps.levels]))
        if r.label == "sps"
        else r
        for r in synthetic.records((synthetic.vanilla, synthetic.sps), prompts=4)
    ]
    return summarise(records, {}, resamples=9)


def test_nodes_are_counted_separately_from_levels(summary_of_trees):
    vanilla, sps = (
        next(row for row in summary_of_trees.rows if row.label == label)
        for label in ("vanilla", "sps")
    )
    assert (vanilla.nodes_per_step, vanilla.node_yield) == (0.0, None)
    assert 10 < sps.nodes_per_step <= 15
    assert sps.node_yield == pytest.approx(sps.acceptance_rate / 3)


def test_page_has_node_columns_and_step_costs(summary_of_trees):
    costs = {"source": "measured", "relative": {"target": {"1": 1.0, "64": 2.5}}}
    page = render(report(summary_of_trees, {"step_costs": costs}, Incidents(), ()))
    assert "| nodes/step | node yield |" in page
    assert "| step_costs.source | measured |" in page
    assert "target {'1': 1.0, '64': 2.5}" in page


def test_reuse_rate_is_the_share_of_reused_drafts(synthetic):
    counts = [{"reused": 3.0, "missed": 1.0, "prepared": 40.0}, {"reused": 1.0, "missed": 0.0}]
    records = [
        replace(r, extra=counts[i % 2]) if r.label == "sps" else r
        for i, r in enumerate(synthetic.records((synthetic.vanilla, synthetic.sps), prompts=4))
    ]
    extras = [r.extra for r in records if r.extra]
    reused = sum(extra["reused"] for extra in extras)
    total = reused + sum(extra["missed"] for extra in extras)
    vanilla, sps = (
        next(row for row in summarise(records, {}, resamples=9).rows if row.label == label)
        for label in ("vanilla", "sps")
    )
    assert (vanilla.reuse_rate, sps.reuse_rate) == (None, pytest.approx(reused / total))
