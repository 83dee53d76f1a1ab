"""Every figure, with few rows and many, short labels and long: words inside the paper, none on
another."""

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


def seen_of(cells):
    """The figure where all rows but vanilla learn from prompt to prompt."""
    own = (replace(row, state_scope="run") for row in cells.summary.lossless)
    return prompts_seen.draw(replace(cells, summary=replace(cells.summary, lossless=tuple(own))))


FIGURES = {
    "accepted": acceptance.draw_counts,
    "contexts": contexts.draw,
    "cost": cost.draw,
    "lanes": lanes.draw,
    "lengths": lengths.draw,
    "positions": acceptance.draw_levels,
    "prompts": prompts.draw,
    "seen": seen_of,
    "speedup": lambda cells: speedup.draw(cells.summary),
    "waterfall": waterfall.draw,
}


@pytest.fixture(params=[3, 14])
def cells(request, cells_of, many):
    return cells_of(many[: request.param], aa_noise=0.02)


@pytest.mark.parametrize("name", FIGURES)
def test_words_are_inside_a_column_and_clear_of_each_other(cells, check_legible, name):
    figure = FIGURES[name](cells)
    assert figure.get_size_inches()[0] == style.COLUMN_IN
    check_legible(figure)


@pytest.mark.parametrize("name", FIGURES)
def test_one_method_beside_vanilla_makes_a_figure_too(cells_of, synthetic, check_legible, name):
    figure = FIGURES[name](cells_of([synthetic.vanilla, synthetic.sps]))
    if name == "lengths":
        assert figure is None
    else:
        check_legible(figure)


@pytest.mark.parametrize("name", ["speedup", "lanes"])
def test_figures_of_vanilla_alone_are_legible(cells_of, synthetic, check_legible, name):
    check_legible(FIGURES[name](cells_of([synthetic.vanilla])))


def test_all_parts_of_the_waterfall_have_room_in_its_legend(cells_of, synthetic, check_legible):
    found = cells_of([synthetic.vanilla, synthetic.sps])
    for record in found.records["sps"]:
        hidden = record.ns.draft // 2  # of a draft beside the target
        record.ns.decode -= hidden
        record.ns.learn = record.ns.total
        record.ns.total += record.ns.learn - hidden
    figure = waterfall.draw(found)
    assert len(figure.legends[0].get_texts()) == 7
    check_legible(figure)
