"""Figure data of simulated runs, and checks of legible text and of colours in grey."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from specbench_cli.report.figures.drawing import style
from specbench_cli.report.figures.figure_data import FigureData
from specbench_cli.store.schema import ForwardKind, Trace
from specbench_cli.summary.summary import summarise


@pytest.fixture(autouse=True)
def _styled():
    with style.figure_style():
        yield


@pytest.fixture(scope="session")
def computed(synthetic) -> Callable:
    """Return a cached function that makes records of simulated methods and their summary."""

    @functools.cache
    def make(fakes, prompts, aa_noise):
        records = synthetic.records(fakes, prompts=prompts)
        return records, summarise(records, {"aa_noise": aa_noise}, resamples=199)

    return make


@pytest.fixture
def make_figure_data(computed, manifest) -> Callable[..., FigureData]:
    """Return a function that makes figure data of simulated methods. A test may change it."""

    def make(fakes, prompts=24, aa_noise=None):
        records, summary = computed(tuple(fakes), prompts, aa_noise)
        own = {row.label: [r for r in records if r.label == row.label] for row in summary.rows}
        first = [_traced(r) for r in records if r.prompt_id == records[0].prompt_id]
        summary_records = {
            label: [
                replace(r, forwards=None, output_ids=None, origin=None, ns=replace(r.ns))
                for r in some
            ]
            for label, some in own.items()
        }
        lengths = {(r.prompt_id, r.turn): 40 + 20 * i for i, r in enumerate(own["vanilla"])}
        return FigureData(summary, manifest, summary_records, lengths, first)

    return make


def _traced(record):
    """Return the record with a trace: the draft forwards and the verification of each step."""
    kinds = [
        ForwardKind("target", "verify", 0, 1, (0, 8)),
        ForwardKind("draft", "draft", 0, 1, (0, 2)),
    ]
    trace, at, levels = Trace(kinds), record.ns.prefill, record.steps.levels
    draft = record.ns.draft // max(1, sum(levels))
    verify = record.ns.verify // len(levels)
    for drafted in levels:
        for kind, length in [(1, draft)] * drafted + [(0, verify)]:
            trace.kind.append(kind)
            trace.n_tokens.append(1 if kind else 1 + drafted)
            trace.t0_ns.append(at)
            trace.t1_ns.append(at + length)
            at += length
    return replace(record, forwards=trace, ns=replace(record.ns))


@pytest.fixture
def many(synthetic) -> list:
    """Vanilla and thirteen methods: some with long labels, one lossy, one of another engine."""
    sweeps = [
        synthetic.Fake(f"sps length={k}", "sps", k, 0.7, 1 + 0.04 * k, 0.12) for k in range(1, 9)
    ]
    return [
        synthetic.vanilla,
        *sweeps,
        synthetic.Fake("sps-tree branching=4 depth=6 threshold=0.25", "sps-tree", 6, 0.8, 1.5),
        synthetic.Fake("a-method-with-one-long-name-without-any-break", None, 12, 0.9, 1.6, 0.01),
        synthetic.Fake("relaxed", None, 5, 0.95, 1.2, 0.1, guarantee="quality_only"),
        synthetic.pld,
        synthetic.hf_assisted,
    ]


def visible_texts(figure: Figure) -> list[Text]:
    """Return the visible text of a figure, without tick labels outside the limits of an axis."""
    figure.draw_without_rendering()
    axes = [(each.xaxis, each.yaxis) for each in figure.axes]
    ticks = {tick for pair in axes for axis in pair for tick in axis.get_major_ticks()}
    drawn = {tick for pair in axes for axis in pair for tick in axis._update_ticks()}
    ticks |= {tick for pair in axes for axis in pair for tick in axis.majorTicks + axis.minorTicks}
    hidden = {text for tick in ticks - drawn for text in (tick.label1, tick.label2)}
    found = set(figure.findobj(Text)) - hidden
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.fixture
def check_legible() -> Callable[[Figure], None]:
    """Return a check that fails if text is outside the figure, overlaps, or is too small."""

    def check(figure: Figure) -> None:
        renderer = figure.canvas.get_renderer()
        boxes = [(text, Text.get_window_extent(text, renderer)) for text in visible_texts(figure)]
        assert boxes
        for text, box in boxes:
            assert text.get_fontsize() >= 5, text.get_text()
            inside = box.x0 >= 0 and box.y0 >= 0
            assert inside and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text.get_text()
        for (text_a, a), (other_colour, b) in itertools.combinations(boxes, 2):
            overlap = a.shrunk(0.96, 0.7).overlaps(b.shrunk(0.96, 0.7))
            assert not overlap, (text_a.get_text(), other_colour.get_text())

    return check


@pytest.fixture
def luminance() -> Callable[[object], float]:
    """Return a function from a colour to its luminance, 0 to 1 (Rec. 709)."""

    def measure(colour) -> float:
        r, g, b = to_rgb(colour)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    return measure


@pytest.fixture
def check_grey(luminance) -> Callable[[Sequence[tuple[object, object]]], None]:
    """Return a check that fails if two styles look the same in grey.

    A style is a colour and a mark, e.g. a marker or a hatch.
    """

    def check(styles) -> None:
        for (colour, mark), (other_colour, other_mark) in itertools.combinations(styles, 2):
            colours_differ = abs(luminance(colour) - luminance(other_colour)) >= 0.15
            assert colours_differ or mark != other_mark, (colour, other_colour, mark)

    return check
