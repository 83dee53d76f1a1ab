"""Tests that figures draw the values of the summary and the records."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from specbench_cli.predict.lanes import make_lanes
from specbench_cli.report.figures import (
    acceptance,
    contexts,
    cost,
    lanes,
    lengths,
    prompts,
    prompts_seen,
    waterfall,
)
from specbench_cli.report.figures.drawing import style


@pytest.fixture
def figure_data(make_figure_data, many):
    return make_figure_data(many)


def markers(axes):
    """Return the points that are drawn as markers."""
    unconnected = [line for line in axes.lines if line.get_linestyle() == "None"]
    return [tuple(at) for line in unconnected for at in line.get_xydata()]


def rows_with(figure_data, name):
    return [row for row in figure_data.summary.rows if getattr(row, name)]


def test_fields_show_acceptance_by_position_and_are_darker_if_it_is_higher(figure_data):
    (axes,) = acceptance.draw_levels(figure_data).axes
    drawn = {}
    for text in axes.texts:
        level, place = text.get_position()
        drawn[place, level] = text.get_text()
    shades = {}
    for bar in (bar for container in axes.containers for bar in container):
        at = round(bar.get_y() + bar.get_height() / 2), round(bar.get_x() + bar.get_width() / 2)
        shades[at] = sum(to_rgb(bar.get_facecolor()[:3]))
    rates = {}
    for place, row in enumerate(rows_with(figure_data, "acceptance_by_position")):
        for level, rate in enumerate(row.acceptance_by_position):
            if (place, level) in drawn:
                assert drawn[place, level] == f"{100 * rate:.0f}"
                rates[place, level] = rate
    assert drawn.keys() == shades.keys() == rates.keys()
    ordered = sorted(rates, key=rates.__getitem__)
    assert [shades[at] for at in ordered] == sorted(shades.values(), reverse=True)


def test_text_in_fields_has_enough_contrast(figure_data, luminance):
    (axes,) = acceptance.draw_levels(figure_data).axes
    bars = [bar for container in axes.containers for bar in container]
    for text, bar in zip(axes.texts, bars, strict=True):
        contrast = luminance(text.get_color()) - luminance(bar.get_facecolor()[:3])
        assert abs(contrast) > 0.3, text.get_text()


def test_bars_of_accepted_lengths_are_shares_of_steps(figure_data):
    (axes,) = acceptance.draw_counts(figure_data).axes
    drafting = [row for row in figure_data.summary.rows if row.acceptance_rate is not None]
    assert len(axes.containers) == len(drafting)
    for row, bars in zip(drafting, axes.containers, strict=True):
        counts = Counter(n for steps in figure_data.steps(row.label) for n in steps.accepted)
        heights = {round(bar.get_x() + bar.get_width() / 2): -bar.get_height() for bar in bars}
        tallest = max(counts.values())
        for n, height in heights.items():
            assert height / max(heights.values()) == pytest.approx(counts[n] / tallest)
        assert heights.keys() == counts.keys()
    texts = [text.get_text() for text in axes.texts if text.get_text().endswith("%")]
    assert len(texts) == len(drafting)


def test_cost_figure_has_points_at_mat_with_the_decode_speedup_as_ratio(figure_data):
    (axes,) = cost.draw(figure_data).axes
    points = markers(axes)
    rows = [row for row in figure_data.summary.rows if row.mat and row.decode_speedup]
    assert [y for _, y in points] == [row.mat for row in rows]
    assert [y / x for x, y in points] == pytest.approx([row.decode_speedup for row in rows])


def test_waterfall_starts_at_mat_and_ends_at_the_speedup_of_the_table(figure_data):
    rows = {row.label: row for row in figure_data.summary.rows}
    losses = waterfall.compute_losses(figure_data)
    assert {loss.label for loss in losses} == {row.label for row in figure_data.with_speedup}
    for loss in losses:
        row = rows[loss.label]
        assert loss.ideal == pytest.approx(row.mat)
        assert loss.remaining["host"] == pytest.approx(row.decode_speedup)
        assert loss.measured == loss.remaining["prefill"] == pytest.approx(row.speedup)
        assert list(loss.remaining) == ["verify", "draft", "host", "prefill"]


def test_overlap_of_workers_is_a_gain_in_the_waterfall(make_figure_data, synthetic):
    found = make_figure_data([synthetic.vanilla, synthetic.sps])
    for record in found.records["sps"]:
        hidden = record.ns.draft // 2
        record.ns.decode -= hidden
        record.ns.total -= hidden
    (loss,) = waterfall.compute_losses(found)
    assert list(loss.remaining) == ["verify", "draft", "host", "overlap", "prefill"]
    assert loss.remaining["overlap"] > loss.remaining["host"]


def test_learning_is_the_last_bar_of_the_waterfall(make_figure_data, synthetic):
    found = make_figure_data([synthetic.vanilla, synthetic.sps])
    (previous,) = waterfall.compute_losses(found)
    for record in found.records["sps"]:
        record.ns.learn = record.ns.total
        record.ns.total += record.ns.learn
    (loss,) = waterfall.compute_losses(found)
    assert list(loss.remaining)[-1] == "learn"
    assert loss.remaining["prefill"] == pytest.approx(previous.measured)
    assert loss.measured == pytest.approx(previous.measured / 2)


def test_bars_of_the_waterfall_are_the_losses(figure_data):
    (axes,) = waterfall.draw(figure_data).axes
    expected = []
    for loss in waterfall.compute_losses(figure_data):
        previous = loss.ideal
        for after in loss.remaining.values():
            expected.append((after, previous - after))
            previous = after
        expected.append((0, loss.measured))
    drawn = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches)
    assert np.array(drawn) == pytest.approx(np.array(sorted(expected)))


def test_parts_of_the_waterfall_and_forwards_of_lanes_differ_in_grey(figure_data, check_grey):
    for draw in (waterfall.draw, lanes.draw):
        (legend,) = draw(figure_data).legends
        check_grey(
            [(patch.get_facecolor()[:3], patch.get_hatch()) for patch in legend.get_patches()]
        )


def test_length_figure_has_speedups_at_the_mean_drafted_levels(figure_data):
    (axes,) = lengths.draw(figure_data).axes
    rows = sorted(
        (sum(counts) / len(counts), row.speedup)
        for row in figure_data.with_speedup
        if row.method == "sps"
        and (counts := [n for steps in figure_data.steps(row.label) for n in steps.levels])
    )
    (drawn,) = (each for each in axes.containers if each.get_label() == "sps")
    assert list(zip(*drawn.lines[0].get_data(), strict=True)) == rows


def test_series_have_different_markers():
    assert len({style.series_look(place).marker for place in range(7)}) == 7


def test_context_bins_have_every_output_once_and_the_ratio_of_summed_times(figure_data):
    groups = contexts.make_context_bins(figure_data)
    assert len(groups) == 4
    ordered = sorted(figure_data.prompt_tokens, key=figure_data.prompt_tokens.__getitem__)
    vanilla = {(r.prompt_id, r.turn): r for r in figure_data.baseline}
    own = {(r.prompt_id, r.turn): r for r in figure_data.records["pld"]}
    for place, group in enumerate(groups):
        part = ordered[6 * place : 6 * (place + 1)]
        ratio = sum(vanilla[at].ns.decode for at in part) / sum(own[at].ns.decode for at in part)
        assert group.speedups["pld"].ratio == pytest.approx(ratio)
        mean = sum(figure_data.prompt_tokens[at] + 64 / 2 for at in part) / 6
        assert group.context == pytest.approx(mean)


def test_panel_of_a_method_draws_its_context_bins(figure_data):
    groups = contexts.make_context_bins(figure_data)
    figure = contexts.draw(figure_data)
    axes = {each.get_title().replace("\n", " "): each for each in figure.axes}["pld"]
    drawn = axes.containers[-1]
    assert list(drawn.lines[0].get_xdata()) == [group.context for group in groups]
    assert list(drawn.lines[0].get_ydata()) == [group.speedups["pld"].ratio for group in groups]


def test_context_figure_is_left_out_if_all_prompts_have_one_length(figure_data):
    same = dict.fromkeys(figure_data.prompt_tokens, 100)
    assert contexts.draw(replace(figure_data, prompt_tokens=same)) is None
    assert contexts.draw(replace(figure_data, prompt_tokens={})) is None


def test_mat_along_a_pass_is_a_moving_window_of_methods_that_learn(figure_data):
    own = (
        replace(r, state_scope="run" if r.label == "pld" else "prompt")
        for r in figure_data.summary.rows
    )
    summary = replace(figure_data.summary, lossless=tuple(own), lossy=())
    figure = prompts_seen.draw(replace(figure_data, summary=summary))
    assert [axes.get_title() for axes in figure.axes] == ["pld"]
    records = figure_data.records["pld"]
    expected_mat = []
    for first in range(24 - 6 + 1):
        steps = [record.steps for record in records[first : first + 6]]
        expected_mat.append(
            sum(sum(s.committed) for s in steps) / sum(len(s.committed) for s in steps)
        )
    line = figure.axes[0].lines[-1]
    assert list(line.get_ydata()) == pytest.approx(expected_mat)
    assert list(line.get_xdata()) == [first + 3.5 for first in range(19)]
    (band,) = figure.axes[0].collections
    assert len(figure.axes[0].lines) == sum(r.acceptance_rate is not None for r in summary.rows)
    heights = {round(y, 9) for _, y in band.get_paths()[0].vertices}
    assert {round(p.high, 9) for p in prompts_seen.points(figure_data, "pld")} <= heights
    assert prompts_seen.draw(figure_data) is None, "the run does not store state_scope"


def test_interval_of_mat_along_a_pass_has_95_percent_coverage():
    drawn, expected_mat, covered = np.random.default_rng(3), 3.0, 0
    for _ in range(600):
        steps = drawn.integers(10, 30, size=8)
        prompts = [(at, int(drawn.poisson(expected_mat * n)), int(n)) for at, n in enumerate(steps)]
        point = prompts_seen._point(prompts)
        covered += point.low <= expected_mat <= point.high
    assert 0.92 <= covered / 600 <= 0.97


def test_more_passes_over_the_same_prompts_do_not_narrow_the_interval(figure_data):
    records = figure_data.records["pld"]
    twice = [*records, *(replace(record, pass_=1) for record in records)]
    both = replace(figure_data, records={**figure_data.records, "pld": twice})
    ends = [[p.low for p in prompts_seen.points(each, "pld")] for each in (both, figure_data)]
    assert ends[0] == pytest.approx(ends[1])
    few = replace(figure_data, records={**figure_data.records, "pld": records[:11]})
    assert prompts_seen.points(few, "pld") == []


def test_scatter_has_every_pair_of_outputs_except_noisy_ones(figure_data):
    figure_data.records["pld"][3].void = True
    figure = prompts.draw(figure_data)
    axes = {each.get_title().replace("\n", " "): each for each in figure.axes}["pld"]
    points = sorted(markers(axes))
    assert len(points) == 23
    vanilla = {r.prompt_id: r.ns.total for r in figure_data.baseline}
    own = [r for r in figure_data.records["pld"] if not r.void]
    expected = sorted((vanilla[r.prompt_id] / 1e9, r.ns.total / 1e9) for r in own)
    assert points == [pytest.approx(pair) for pair in expected]


def test_lanes_draw_every_forward_of_the_first_steps(figure_data):
    (axes,) = lanes.draw(figure_data).axes
    window = float(axes.get_xlim()[1])
    drawn = {
        (round(1e6 * bar.get_x()), round(1e6 * (bar.get_x() + bar.get_width())))
        for bar in axes.patches
    }
    for record in figure_data.traced:
        own = make_lanes(record)
        for span in own.decoding:
            start, end = span.start - own.prefill, span.end - own.prefill
            assert ((start, end) in drawn) is (start / 1e6 < window)


def test_messages_are_arrows_between_lanes_and_cancelled_forwards_are_empty(figure_data):
    (record,) = (r for r in figure_data.traced if r.label == "sps length=3")
    record.forwards.kinds[1] = replace(record.forwards.kinds[1], worker=1)
    record.forwards.unused = [0]
    t = record.ns.prefill
    record.forwards.messages = [[0, 1, t, t + 1000, 8], [1, 0, t + 5000, t + 9000, 8]]
    figure = lanes.draw(replace(figure_data, traced=[record]))
    (axes,) = figure.axes
    arrows = [note for note in axes.texts if getattr(note, "arrow_patch", None) is not None]
    assert [round(1e6 * note.xy[0]) for note in arrows] == [1000, 9000]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "sps length=3: target",
        "sps length=3: draft",
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "draft",
        "verify",
        "unused",
    ]


def test_steps_end_with_their_number_of_committed_tokens(figure_data):
    record = next(r for r in figure_data.traced if r.label == "sps length=8")
    figure = lanes.draw_lanes([make_lanes(record)], style.PAGE_IN, 6)
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == [str(n) for n in record.steps.committed[: len(texts)]]
    assert len(texts) >= 5


def test_learning_has_a_lane_with_its_duration(figure_data):
    learning_record = next(record for record in figure_data.traced if record.label != "vanilla")
    learning_record.ns.learn = 7_500_000
    (axes,) = lanes.draw(figure_data).axes
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts.count("7.5 ms, before prefill") == 1
    assert f"{learning_record.label}: learning" in [
        name.get_text() for name in axes.get_yticklabels()
    ]
    begin = axes.get_xlim()[0]
    assert begin < 0 <= min(tick for tick in axes.get_xticks() if tick >= begin)
