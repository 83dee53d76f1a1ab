"""Tests that every figure is legible, with few and many methods, and short and long labels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbench_cli.report.figures import (
    acceptance,
    contexts,
    cost,
    lanes,
    lengths,
    prompts,
    prompts_seen,
    speedup,
    waterfall,
)
from specbench_cli.report.figures.drawing import style


def draw_prompts_seen(figure_data):
    """Return the figure of methods that learn from prompt to prompt, with all methods learning."""
    own = (replace(row, state_scope="run") for row in figure_data.summary.lossless)
    return prompts_seen.draw(
        replace(figure_data, summary=replace(figure_data.summary, lossless=tuple(own)))
    )


FIGURES = {
    "accepted": acceptance.draw_counts,
    "contexts": contexts.draw,
    "cost": cost.draw,
    "lanes": lanes.draw,
    "lengths": lengths.draw,
    "positions": acceptance.draw_levels,
    "prompts": prompts.draw,
    "seen": draw_prompts_seen,
    "speedup": lambda figure_data: speedup.draw(figure_data.summary),
    "waterfall": waterfall.draw,
}


@pytest.fixture(params=[3, 14])
def figure_data(request, make_figure_data, many):
    return make_figure_data(many[: request.param], aa_noise=0.02)


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_inside_a_column_without_overlap(figure_data, check_legible, name):
    figure = FIGURES[name](figure_data)
    assert figure.get_size_inches()[0] == style.COLUMN_IN
    check_legible(figure)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_one_method_and_vanilla_are_legible(
    make_figure_data, synthetic, check_legible, name
):
    figure = FIGURES[name](make_figure_data([synthetic.vanilla, synthetic.sps]))
    if name == "lengths":
        assert figure is None
    else:
        check_legible(figure)


@pytest.mark.parametrize("name", ["speedup", "lanes"])
def test_figures_of_vanilla_alone_are_legible(make_figure_data, synthetic, check_legible, name):
    check_legible(FIGURES[name](make_figure_data([synthetic.vanilla])))


def test_legend_of_a_waterfall_with_all_parts_is_legible(
    make_figure_data, synthetic, check_legible
):
    found = make_figure_data([synthetic.vanilla, synthetic.sps])
    for record in found.records["sps"]:
        hidden = record.ns.draft // 2  # the draft model runs in parallel with the target
        record.ns.decode -= hidden
        record.ns.learn = record.ns.total
        record.ns.total += record.ns.learn - hidden
    figure = waterfall.draw(found)
    assert len(figure.legends[0].get_texts()) == 7
    check_legible(figure)
