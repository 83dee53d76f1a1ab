"""Figures draw the values of the summary and the records."""

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
def cells(cells_of, many):
    return cells_of(many)


def markers(axes):
    """Return the points that are drawn as markers."""
    alone = [line for line in axes.lines if line.get_linestyle() == "None"]
    return [tuple(at) for line in alone for at in line.get_xydata()]


def rows_with(cells, name):
    return [row for row in cells.summary.rows if getattr(row, name)]


def test_fields_say_the_acceptance_by_position_and_are_darker_where_it_is_higher(cells):
    (axes,) = acceptance.draw_levels(cells).axes
    drawn = {}
    for word in axes.texts:
        level, place = word.get_position()
        drawn[place, level] = word.get_text()
    shades = {}
    for bar in (bar for container in axes.containers for bar in container):
        at = round(bar.get_y() + bar.get_height() / 2), round(bar.get_x() + bar.get_width() / 2)
        shades[at] = sum(to_rgb(bar.get_facecolor()[:3]))
    rates = {}
    for place, row in enumerate(rows_with(cells, "acceptance_by_position")):
        for level, rate in enumerate(row.acceptance_by_position):
            if (place, level) in drawn:
                assert drawn[place, level] == f"{100 * rate:.0f}"
                rates[place, level] = rate
    assert drawn.keys() == shades.keys() == rates.keys()
    ordered = sorted(rates, key=rates.__getitem__)
    assert [shades[at] for at in ordered] == sorted(shades.values(), reverse=True)


def test_words_in_fields_stand_out_from_them(cells, luminance):
    (axes,) = acceptance.draw_levels(cells).axes
    bars = [bar for container in axes.containers for bar in container]
    for word, bar in zip(axes.texts, bars, strict=True):
        apart = luminance(word.get_color()) - luminance(bar.get_facecolor()[:3])
        assert abs(apart) > 0.3, word.get_text()


def test_bars_of_accepted_lengths_are_shares_of_steps(cells):
    (axes,) = acceptance.draw_counts(cells).axes
    drafting = [row for row in cells.summary.rows if row.acceptance_rate is not None]
    assert len(axes.containers) == len(drafting)
    for row, bars in zip(drafting, axes.containers, strict=True):
        counts = Counter(n for steps in cells.steps(row.label) for n in steps.accepted)
        heights = {round(bar.get_x() + bar.get_width() / 2): -bar.get_height() for bar in bars}
        tallest = max(counts.values())
        for n, height in heights.items():
            assert height / max(heights.values()) == pytest.approx(counts[n] / tallest)
        assert heights.keys() == counts.keys()
    said = [word.get_text() for word in axes.texts if word.get_text().endswith("%")]
    assert len(said) == len(drafting)


def test_points_of_cost_stand_at_mat_and_divide_to_the_decode_speedup(cells):
    (axes,) = cost.draw(cells).axes
    points = markers(axes)
    rows = [row for row in cells.summary.rows if row.mat and row.decode_speedup]
    assert [y for _, y in points] == [row.mat for row in rows]
    assert [y / x for x, y in points] == pytest.approx([row.decode_speedup for row in rows])


def test_waterfall_falls_from_mat_to_the_speedups_of_the_table(cells):
    rows = {row.label: row for row in cells.summary.rows}
    falls = waterfall.compute_losses(cells)
    assert {fall.label for fall in falls} == {row.label for row in cells.with_speedup}
    for fall in falls:
        row = rows[fall.label]
        assert fall.ideal == pytest.approx(row.mat)
        assert fall.remaining["host"] == pytest.approx(row.decode_speedup)
        assert fall.measured == fall.remaining["prefill"] == pytest.approx(row.speedup)
        assert list(fall.remaining) == ["verify", "draft", "host", "prefill"]


def test_overlap_of_workers_gives_back_what_both_took(cells_of, synthetic):
    found = cells_of([synthetic.vanilla, synthetic.sps])
    for record in found.records["sps"]:
        hidden = record.ns.draft // 2
        record.ns.decode -= hidden
        record.ns.total -= hidden
    (fall,) = waterfall.compute_losses(found)
    assert list(fall.remaining) == ["verify", "draft", "host", "overlap", "prefill"]
    assert fall.remaining["overlap"] > fall.remaining["host"]


def test_learning_is_the_last_stair(cells_of, synthetic):
    found = cells_of([synthetic.vanilla, synthetic.sps])
    (before,) = waterfall.compute_losses(found)
    for record in found.records["sps"]:
        record.ns.learn = record.ns.total
        record.ns.total += record.ns.learn
    (fall,) = waterfall.compute_losses(found)
    assert list(fall.remaining)[-1] == "learn"
    assert fall.remaining["prefill"] == pytest.approx(before.measured)
    assert fall.measured == pytest.approx(before.measured / 2)


def test_bars_of_the_waterfall_are_the_falls(cells):
    (axes,) = waterfall.draw(cells).axes
    expected = []
    for fall in waterfall.compute_losses(cells):
        before = fall.ideal
        for after in fall.remaining.values():
            expected.append((after, before - after))
            before = after
        expected.append((0, fall.measured))
    drawn = sorted((bar.get_x(), bar.get_width()) for bar in axes.patches)
    assert np.array(drawn) == pytest.approx(np.array(sorted(expected)))


def test_parts_of_the_waterfall_and_forwards_of_lanes_differ_in_grey(cells, check_grey):
    for draw in (waterfall.draw, lanes.draw):
        (legend,) = draw(cells).legends
        check_grey(
            [(patch.get_facecolor()[:3], patch.get_hatch()) for patch in legend.get_patches()]
        )


def test_points_along_lengths_are_speedups_at_the_mean_levels_drafted(cells):
    (axes,) = lengths.draw(cells).axes
    rows = sorted(
        (sum(counts) / len(counts), row.speedup)
        for row in cells.with_speedup
        if row.method == "sps"
        and (counts := [n for steps in cells.steps(row.label) for n in steps.levels])
    )
    (drawn,) = (each for each in axes.containers if each.get_label() == "sps")
    assert list(zip(*drawn.lines[0].get_data(), strict=True)) == rows


def test_lines_and_points_of_series_differ_in_grey_by_their_marks():
    assert len({style.series_look(place).marker for place in range(7)}) == 7


def test_groups_of_contexts_hold_every_output_once_and_their_ratio_of_sums(cells):
    groups = contexts.make_context_bins(cells)
    assert len(groups) == 4
    ordered = sorted(cells.prompt_tokens, key=cells.prompt_tokens.__getitem__)
    vanilla = {(r.prompt_id, r.turn): r for r in cells.baseline}
    own = {(r.prompt_id, r.turn): r for r in cells.records["pld"]}
    for place, group in enumerate(groups):
        part = ordered[6 * place : 6 * (place + 1)]
        ratio = sum(vanilla[at].ns.decode for at in part) / sum(own[at].ns.decode for at in part)
        assert group.speedups["pld"].ratio == pytest.approx(ratio)
        mean = sum(cells.prompt_tokens[at] + 64 / 2 for at in part) / 6
        assert group.context == pytest.approx(mean)


def test_panel_of_a_method_draws_its_groups(cells):
    groups = contexts.make_context_bins(cells)
    figure = contexts.draw(cells)
    axes = {each.get_title().replace("\n", " "): each for each in figure.axes}["pld"]
    drawn = axes.containers[-1]
    assert list(drawn.lines[0].get_xdata()) == [group.context for group in groups]
    assert list(drawn.lines[0].get_ydata()) == [group.speedups["pld"].ratio for group in groups]


def test_prompts_of_one_length_have_no_figure_of_contexts(cells):
    same = dict.fromkeys(cells.prompt_tokens, 100)
    assert contexts.draw(replace(cells, prompt_tokens=same)) is None
    assert contexts.draw(replace(cells, prompt_tokens={})) is None


def test_mat_along_a_pass_is_of_neighbouring_prompts_and_of_methods_that_learn(cells):
    own = (
        replace(r, state_scope="run" if r.label == "pld" else "prompt") for r in cells.summary.rows
    )
    summary = replace(cells.summary, lossless=tuple(own), lossy=())
    figure = prompts_seen.draw(replace(cells, summary=summary))
    assert [axes.get_title() for axes in figure.axes] == ["pld"]
    records = cells.records["pld"]
    due = []
    for first in range(24 - 6 + 1):
        steps = [record.steps for record in records[first : first + 6]]
        due.append(sum(sum(s.committed) for s in steps) / sum(len(s.committed) for s in steps))
    line = figure.axes[0].lines[-1]
    assert list(line.get_ydata()) == pytest.approx(due)
    assert list(line.get_xdata()) == [first + 3.5 for first in range(19)]
    (band,) = figure.axes[0].collections
    assert len(figure.axes[0].lines) == sum(r.acceptance_rate is not None for r in summary.rows)
    heights = {round(y, 9) for _, y in band.get_paths()[0].vertices}
    assert {round(p.high, 9) for p in prompts_seen.points(cells, "pld")} <= heights
    assert prompts_seen.draw(cells) is None, "a run that did not keep how long states live"


def test_the_interval_of_mat_along_a_pass_covers_it_as_often_as_it_says():
    drawn, due, covered = np.random.default_rng(3), 3.0, 0
    for _ in range(600):
        steps = drawn.integers(10, 30, size=8)
        prompts = [(at, int(drawn.poisson(due * n)), int(n)) for at, n in enumerate(steps)]
        point = prompts_seen._point(prompts)
        covered += point.low <= due <= point.high
    assert 0.92 <= covered / 600 <= 0.97


def test_passes_over_the_same_prompts_make_one_point_narrower_by_no_pass(cells):
    records = cells.records["pld"]
    twice = [*records, *(replace(record, pass_=1) for record in records)]
    both = replace(cells, records={**cells.records, "pld": twice})
    ends = [[p.low for p in prompts_seen.points(each, "pld")] for each in (both, cells)]
    assert ends[0] == pytest.approx(ends[1])
    few = replace(cells, records={**cells.records, "pld": records[:11]})
    assert prompts_seen.points(few, "pld") == []


def test_scatter_has_every_pair_of_outputs_but_void_ones(cells):
    cells.records["pld"][3].void = True
    figure = prompts.draw(cells)
    axes = {each.get_title().replace("\n", " "): each for each in figure.axes}["pld"]
    points = sorted(markers(axes))
    assert len(points) == 23
    vanilla = {r.prompt_id: r.ns.total for r in cells.baseline}
    own = [r for r in cells.records["pld"] if not r.void]
    expected = sorted((vanilla[r.prompt_id] / 1e9, r.ns.total / 1e9) for r in own)
    assert points == [pytest.approx(pair) for pair in expected]


def test_lanes_draw_every_forward_of_their_first_steps_in_its_place(cells):
    (axes,) = lanes.draw(cells).axes
    window = float(axes.get_xlim()[1])
    drawn = {
        (round(1e6 * bar.get_x()), round(1e6 * (bar.get_x() + bar.get_width())))
        for bar in axes.patches
    }
    for record in cells.traced:
        own = make_lanes(record)
        for span in own.decoding:
            start, end = span.start - own.prefill, span.end - own.prefill
            assert ((start, end) in drawn) is (start / 1e6 < window)


def test_messages_are_arrows_between_lanes_and_cancelled_forwards_are_empty(cells):
    (record,) = (r for r in cells.traced if r.label == "sps length=3")
    record.forwards.kinds[1] = replace(record.forwards.kinds[1], worker=1)
    record.forwards.unused = [0]
    t = record.ns.prefill
    record.forwards.messages = [[0, 1, t, t + 1000, 8], [1, 0, t + 5000, t + 9000, 8]]
    figure = lanes.draw(replace(cells, traced=[record]))
    (axes,) = figure.axes
    arrows = [note for note in axes.texts if getattr(note, "arrow_patch", None) is not None]
    assert [round(1e6 * note.xy[0]) for note in arrows] == [1000, 9000]
    assert [word.get_text() for word in axes.get_yticklabels()] == [
        "sps length=3: target",
        "sps length=3: draft",
    ]
    assert [word.get_text() for word in figure.legends[0].get_texts()] == [
        "draft",
        "verify",
        "unused",
    ]


def test_steps_end_with_a_mark_and_say_what_they_committed(cells):
    record = next(r for r in cells.traced if r.label == "sps length=8")
    figure = lanes.draw_lanes([make_lanes(record)], style.PAGE_IN, 6)
    (axes,) = figure.axes
    said = [word.get_text() for word in axes.texts]
    assert said == [str(n) for n in record.steps.committed[: len(said)]]
    assert len(said) >= 5


def test_learning_has_a_lane_that_says_how_long_it_took(cells):
    taught = next(record for record in cells.traced if record.label != "vanilla")
    taught.ns.learn = 7_500_000
    (axes,) = lanes.draw(cells).axes
    said = [word.get_text().strip() for word in axes.texts]
    assert said.count("7.5 ms, before prefill") == 1
    assert f"{taught.label}: learning" in [name.get_text() for name in axes.get_yticklabels()]
    begin = axes.get_xlim()[0]
    assert begin < 0 <= min(tick for tick in axes.get_xticks() if tick >= begin)
