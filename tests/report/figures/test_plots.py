"""Tests of plots: legends, shared axes, and intervals that extend beyond the axes."""

from __future__ import annotations

from matplotlib.collections import PathCollection

from specbench_cli.report.figures.drawing import plots, style
from specbench_cli.report.figures.drawing.plots import Axis, Panel, PlotPoint, PlotSeries

POINTS = [PlotPoint(1, 1, 0.5, 9), PlotPoint(2, 2, 1.5, 2.5)]


def test_a_legend_has_each_style_once(check_legible):
    first = [
        PlotSeries(POINTS, style.series_look(0), "b"),
        plots.RuleLine(y=1),
        plots.RuleLine(x=1, label="a"),
    ]
    second = [
        PlotSeries(POINTS, style.series_look(0), "b"),
        PlotSeries([], style.series_look(1), "not drawn"),
    ]
    figure = plots.page([Panel(first, Axis("x"))], [Panel(second, Axis("x"))])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["b", "a"]
    check_legible(figure)


def test_a_panel_without_an_x_label_has_no_tick_labels():
    marks = [PlotSeries(POINTS, style.series_look(0))]
    upper, lower = plots.page([Panel(marks), Panel(marks, Axis("x (s)"))]).axes
    has_labels = [axes.xaxis.get_tick_params()["labelbottom"] for axes in (upper, lower)]
    assert has_labels == [False, True]


def test_an_interval_beyond_the_axes_has_an_arrowhead_unless_intervals_are_not_drawn():
    for look, arrowheads in ((style.series_look(0), [(1.0, 4.0)]), (style.guide_look(), [])):
        (axes,) = plots.page([Panel([PlotSeries(POINTS, look)], Axis("x"), Axis("y", 0, 4))]).axes
        marks = [each for each in axes.collections if isinstance(each, PathCollection)]
        assert [tuple(at) for each in marks for at in each.get_offsets()] == arrowheads


def test_rows_without_a_right_column_use_the_whole_width(check_legible):
    bars = Panel(
        [plots.PlotBars([plots.BarBox(0, -0.3, 2, 0.6)], style.OURS)], Axis("seconds", 0, 2)
    )
    rows = [("a method", 0.0), ("a method", 1.0)]
    plain, with_heading = (plots.row_plot(rows, [bars], 0.3, heading=word) for word in ("", "MAT"))
    assert plain.axes[0].bbox.width > with_heading.axes[0].bbox.width
    for figure in (plain, with_heading):
        check_legible(figure)
