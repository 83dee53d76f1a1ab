"""Words beside points stay clear of the points and of each other."""

from __future__ import annotations

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specbench_cli.report.figures.labels import Word, write_beside


def test_words_at_near_points_do_not_overlap_and_stay_inside():
    figure = Figure(figsize=(3, 3))
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    words = [Word(f"word {n}", (0.5 + n / 100, 0.5), "black") for n in range(4)]
    words.append(Word("at the edge", (1, 0.9), "black"))
    write_beside(axes, words)
    renderer = canvas.get_renderer()
    boxes = [each.get_window_extent(renderer).shrunk(0.9, 0.7) for each in axes.texts]
    assert len(boxes) == len(words)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.x1 <= axes.bbox.x1 for box in boxes)
