"""One look for all figures: sizes, fonts, colours, and what every figure does to its axes.

Legible in grey at 84 mm (a journal's column) and by colour-blind people: the colours are those of
Okabe & Ito ("Color Universal Design", 2008), and what they tell apart is told by shape or hatching
too. Text is at least 5 points.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli import output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_IN, PAGE_IN = 84 / 25.4, 174 / 25.4
"""Widths: one column, two."""
SMALL, TINY = 6.0, 5.5
"""Points; the text of axes is 7 and 6.5."""
INK, MUTED, FAINT, BAND = "#222222", "#666666", "#e4e4e4", "#c4c4c4"
OURS, PEER, REFERENCE = "#4a8fc2", "#cfd4d9", "#55595e"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX*<>"
PARTS = {
    "prefill": ("#dedede", None),
    "draft": ("#E69F00", "//////"),
    "verify": ("#56B4E9", None),
    "host": ("#CC79A7", "....."),
    "overlap": ("#009E73", "xxxxx"),
    "aux": ("#009E73", "....."),
    "learn": ("#0072B2", "\\\\\\\\\\\\"),
}
"""What time went to: colour and hatching, apart in grey too."""
_FIELDS = ("#f3f7fb", "#0b3c66")
_PAPER = 0.58
"""Of a heat map: the lightest and the darkest field, and from where on words are white."""

_FONT = "DejaVu Sans"
_STYLE: Any = {  # matplotlib types the keys as one literal of hundreds
    "font.family": _FONT,
    "font.size": 7,
    "axes.linewidth": 0.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "specbench",
    "text.parse_math": False,  # a label with two `$` must not be read as a formula
    "pdf.fonttype": 42,  # TrueType: publishers refuse the Type 3 fonts that are the default
}
_STAMPS = {
    "svg": ("Date", "Creator"),
    "png": ("Software",),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
"""Of a file: what would not be the same twice, or elsewhere."""
_REACH = 1.8
"""Of the largest speedup."""
_LETTERS = 24
"""That a line of a row's label has."""


def applied() -> AbstractContextManager[None]:
    """The style, while figures are drawn and written; the caller's own is back afterwards."""
    return defaults(_STYLE)


def defaults(changes: Any = None) -> AbstractContextManager[None]:
    """Return a context in which matplotlib has its own defaults, and the given changes to them.

    Matplotlib reads a file `matplotlibrc` in the working folder, which may be anybody's: by
    `text.usetex` it starts LaTeX.
    """
    import matplotlib as mpl

    # Figures have their own canvas: the backend is the caller's.
    own = {name: value for name, value in mpl.rcParamsDefault.items() if name != "backend"}
    return mpl.rc_context(own | (changes or {}))


def blank(width: float, height: float, **layout: Any) -> Figure:
    """An empty figure of so many inches, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **layout)
    FigureCanvasAgg(figure)
    return figure


def write(
    figure: Figure, folder: Path, name: str, *, paper: bool = False, heavy: int = 0
) -> list[Path]:
    """Write `name`.svg, `name`.png (300 dpi) and for a paper `name`.pdf to `folder`, which is made:
    the same bytes for the same figure.

    Args:
        heavy: bytes of an SVG beyond which it has a PNG beside it.
    """
    from matplotlib.text import Text

    for words in figure.findobj(Text):
        words.set_text(output.plain(words.get_text()))
    folder.mkdir(parents=True, exist_ok=True)
    files = list[Path]()
    for form in ("svg", "png", "pdf") if paper else ("svg", "png"):
        if form != "png" or files[0].stat().st_size > heavy:
            files.append(folder / f"{name}.{form}")
            figure.savefig(files[-1], dpi=300, metadata=dict.fromkeys(_STAMPS[form]))
            if form == "svg":  # SVG comments repeat every text
                drawn = files[-1].read_text(encoding="utf-8")
                files[-1].write_text(output.plain(drawn), encoding="utf-8")
    return files


def frame(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes with margins of so many inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )


def width_of(words: Iterable[str], points: float) -> float:
    """Inches that the widest of some words takes."""
    lines = (line for word in words for line in word.split("\n"))
    return points / 72 * max(map(_em, lines), default=0.0)


@cache
def _em(line: str) -> float:
    """Width of a line, in sizes of its letters."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), line, size=1, prop=FontProperties(family=_FONT))
    return float(path.vertices[:, 0].max(initial=0.0))


def named(labels: Iterable[str]) -> dict[str, str]:
    """Labels as rows are named by them: long ones on two lines, what is longer still without its
    middle (rows of one method differ at the end)."""
    found = {}
    for label in labels:
        shown = output.plain(label)
        lines = textwrap.wrap(shown, _LETTERS, break_on_hyphens=False)
        if len(lines) > 2:
            lines = [shown[:_LETTERS], f"…{shown[1 - _LETTERS :]}"]
        found[label] = "\n".join(lines)
    return found


def short(label: str) -> str:
    """A label on one line; a long one without its middle."""
    half, label = _LETTERS // 2, output.plain(label)
    return label if len(label) <= _LETTERS else f"{label[:half]}…{label[1 - half :]}"


def name_rows(axes: Axes, labels: Sequence[str], places: Sequence[float]) -> None:
    """Write labels beside their rows."""
    words = [named(labels)[label] for label in labels]
    axes.set_yticks(places, words)
    for tick, word in zip(axes.get_yticklabels(), words, strict=True):
        tick.set(fontsize=_size(word), linespacing=0.95)
    axes.tick_params(axis="y", length=0, pad=3)


def name_x(axes: Axes, words: str) -> None:
    """Name the x axis; what is wider than the axes grows to the left, where labels leave room."""
    fits = width_of([words], 7) < axes.bbox.width / axes.figure.dpi
    axes.set_xlabel(words, labelpad=2, loc="center" if fits else "right")


def room_for(labels: Iterable[str]) -> float:
    """Inches that `name_rows` needs to the left of the axes."""
    words = named(labels).values()
    return 0.1 + 1.04 * max(width_of([word], _size(word)) for word in words)


def _size(word: str) -> float:
    return TINY if "\n" in word else 7


def strip(axes: Axes, *sides: str) -> None:
    """Thin ticks, and no frame but the named sides'."""
    axes.tick_params(length=2, width=0.6, pad=2, labelsize=6.5)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side in sides)


def grid(axes: Axes) -> None:
    """Faint lines behind the data."""
    axes.grid(color=FAINT, lw=0.4, zorder=0)
    axes.set_axisbelow(True)


def look(place: int) -> tuple[str, str]:
    """Colour and marker of a series."""
    return _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]


def field(
    axes: Axes, x: float, y: float, share: float | None, words: str, points: float = 6.5
) -> None:
    """A field of a heat map with words in it.

    Args:
        share: how dark it is, from 0 to 1; None: nothing is known, and it has no colour.
    """
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("fields", _FIELDS)
    dark = share is not None and share > _PAPER
    colour = "white" if share is None else shades(share)
    axes.barh(y, 0.96, 0.88, x - 0.48, color=colour)
    ink = "white" if dark else INK
    axes.text(x, y, words, ha="center", va="center_baseline", fontsize=points, color=ink)


def as_ratio(value: float, _: object = None) -> str:
    """A speedup on an axis."""
    return f"{value:g}x"


def reach(points: Iterable[float], ends: Iterable[float]) -> float:
    """How far an axis of speedups goes: to the ends of the intervals, but no farther than leaves
    room for the points; what few questions make of an interval may have no end."""
    farthest = max(points)
    return min(1.04 * max([farthest, *ends]), _REACH * farthest)


def mark_cut(
    axes: Axes, ends: Iterable[tuple[float, float]], colour: str = INK, *, along_x: bool = False
) -> None:
    """Arrowheads where intervals go on beyond the axes.

    Args:
        ends: of each interval, where it stands on the other axis, and its upper end.
    """
    edge = axes.get_xlim()[1] if along_x else axes.get_ylim()[1]
    places = [place for place, end in ends if end > edge]
    edges = [edge] * len(places)
    at = (edges, places) if along_x else (places, edges)
    axes.scatter(
        *at, s=8, marker=">" if along_x else "^", color=colour, lw=0, clip_on=False, zorder=6
    )


def legend_below(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int
) -> None:
    """A legend without a frame at the figure's lower end."""
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=columns,
        frameon=False,
        fontsize=6,
        handletextpad=0.3,
        handlelength=1.2,
        columnspacing=1.0,
        labelspacing=0.25,
        borderpad=0.1,
    )
