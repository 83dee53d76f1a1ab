"""Common style of all figures: sizes, fonts, colours and axes.

Figures must be readable at 84 mm (one column of a journal), in grey, and for colour-blind readers.
The colours are those of Okabe & Ito ("Color Universal Design", 2008). Things that differ in colour
also differ in shape or hatching. Text has at least 5 pt.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli import output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_IN, PAGE_IN = 84 / 25.4, 174 / 25.4
"""Widths of a figure over one and over two columns of a journal, in inches."""
SMALL, TINY = 6.0, 5.5
"""Font sizes in pt. Axes use 7 and 6.5."""
INK, MUTED, FAINT, BAND = "#222222", "#666666", "#e4e4e4", "#c4c4c4"
OURS, PEER, REFERENCE = "#4a8fc2", "#cfd4d9", "#55595e"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*<>"
_FAMILIES = "oDs^vP*X"
PARTS = {
    "prefill": ("#dedede", None),
    "draft": ("#E69F00", "//////"),
    "verify": ("#56B4E9", None),
    "host": ("#CC79A7", "....."),
    "overlap": ("#009E73", "xxxxx"),
    "aux": ("#009E73", "....."),
    "learn": ("#0072B2", "\\\\\\\\\\\\"),
}
"""Part of a step or of an output -> colour and hatching. They also differ in grey."""
_FONT = "DejaVu Sans"
_STYLE: Any = {  # `Any`: matplotlib types the keys as a literal of hundreds of names
    "font.family": _FONT,
    "font.size": 7,
    "axes.linewidth": 0.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 6,
    "legend.handletextpad": 0.3,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.0,
    "legend.labelspacing": 0.25,
    "legend.borderpad": 0.1,
    "svg.hashsalt": "specbench",
    "text.parse_math": False,  # a label with two `$` is not a formula
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3 fonts, which are the default
}
_STAMPS = {
    "svg": ("Date", "Creator"),
    "png": ("Software",),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
"""Format -> metadata that is dropped, so that the same figure gives the same file."""
_MAX_AXIS_RATIO = 1.8
"""Maximum of a speedup axis, relative to the largest speedup."""
_LINE_CHARS = 24
"""Maximum number of characters in a line of a method's label."""


def figure_style() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws and writes figures in specbench's style."""
    return matplotlib_defaults(_STYLE)


def matplotlib_defaults(changes: Any = None) -> AbstractContextManager[None]:
    """Return a context with matplotlib's default settings and some changes.

    Without this, a `matplotlibrc` file in the current folder would change the figures. It could
    even start LaTeX (`text.usetex`).
    """
    import matplotlib as mpl

    # Keep the caller's matplotlib backend. specbench's figures do not use it, because they have
    # their own canvas.
    own = {name: value for name, value in mpl.rcParamsDefault.items() if name != "backend"}
    return mpl.rc_context(own | (changes or {}))


def new_figure(width: float, height: float, **layout: Any) -> Figure:
    """Return an empty figure of a size in inches. It does not use pyplot, whose state is global."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **layout)
    FigureCanvasAgg(figure)
    return figure


def write(
    figure: Figure, folder: Path, name: str, *, paper: bool = False, max_svg_bytes: int = 0
) -> list[Path]:
    """Write a figure as SVG and as PNG (300 dpi). The same figure gives the same bytes.

    The folder is created if it does not exist.

    Args:
        paper: True to write a PDF, too.
        max_svg_bytes: The PNG is written only if the SVG has more bytes than this.
    """
    from matplotlib.text import Text

    for words in figure.findobj(Text):
        words.set_text(output.escape_hidden(words.get_text()))
    folder.mkdir(parents=True, exist_ok=True)
    files = list[Path]()
    for form in ("svg", "png", "pdf") if paper else ("svg", "png"):
        if form != "png" or files[0].stat().st_size > max_svg_bytes:
            files.append(folder / f"{name}.{form}")
            figure.savefig(files[-1], dpi=300, metadata=dict.fromkeys(_STAMPS[form]))
            if form == "svg":  # matplotlib repeats every text in an SVG comment
                markup = files[-1].read_text(encoding="utf-8")
                files[-1].write_text(output.escape_hidden(markup), encoding="utf-8")
    return files


def add_axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Add axes to a figure, with the given margins in inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )


def text_width(words: Iterable[str], points: float) -> float:
    """Return the width of the widest line of some texts in inches, at a font size in pt."""
    lines = (line for word in words for line in word.split("\n"))
    return points / 72 * max(map(_em, lines), default=0.0)


@cache
def _em(line: str) -> float:
    """Return the width of a line of text as a multiple of the font size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), line, size=1, prop=FontProperties(family=_FONT))
    return float(path.vertices[:, 0].max(initial=0.0))


def wrap_labels(labels: Iterable[str]) -> dict[str, str]:
    """Return label -> text of the label in a figure.

    A long label gets two lines. If it is still too long, its middle is cut out. The end is kept,
    because the labels of a method's variants differ there.
    """
    found = {}
    for label in labels:
        plain = output.escape_hidden(label)
        lines = textwrap.wrap(plain, _LINE_CHARS, break_on_hyphens=False)
        if len(lines) > 2:
            lines = [plain[:_LINE_CHARS], f"…{plain[1 - _LINE_CHARS :]}"]
        found[label] = "\n".join(lines)
    return found


def shorten(label: str) -> str:
    """Shorten a label to one line. A long label loses its middle."""
    half, label = _LINE_CHARS // 2, output.escape_hidden(label)
    return label if len(label) <= _LINE_CHARS else f"{label[:half]}…{label[1 - half :]}"


def label_rows(axes: Axes, labels: Sequence[str], places: Sequence[float]) -> None:
    """Write the labels of rows to the left of the axes."""
    words = [wrap_labels(labels)[label] for label in labels]
    axes.set_yticks(places, words)
    for tick, word in zip(axes.get_yticklabels(), words, strict=True):
        tick.set(fontsize=_size(word), linespacing=0.95)
    axes.tick_params(axis="y", length=0, pad=3)


def label_x_axis(axes: Axes, words: str) -> None:
    """Write the name of the x axis. A long name extends to the left, below the row labels."""
    fits = text_width([words], 7) < axes.bbox.width / axes.figure.dpi
    axes.set_xlabel(words, labelpad=2, loc="center" if fits else "right")


def label_width(labels: Iterable[str]) -> float:
    """Return the width in inches that `label_rows` needs to the left of the axes."""
    words = wrap_labels(labels).values()
    return 0.1 + 1.04 * max(text_width([word], _size(word)) for word in words)


def _size(word: str) -> float:
    return TINY if "\n" in word else 7


def show_sides(axes: Axes, *sides: str) -> None:
    """Draw only the given sides of the frame, with thin ticks."""
    axes.tick_params(width=0.6, pad=2, labelsize=6.5)
    axes.tick_params(axis="x", length=2 * ("bottom" in sides))
    axes.tick_params(axis="y", length=2 * ("left" in sides))
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side in sides)


def grid(axes: Axes) -> None:
    """Draw faint grid lines behind the data."""
    axes.grid(color=FAINT, lw=0.4, zorder=0)
    axes.set_axisbelow(True)


@dataclass(frozen=True, slots=True)
class Look:
    """Appearance of points and of the line through them.

    Attributes:
        marker: Marker of matplotlib. "" for none.
        face: Colour inside the markers. "" uses `colour`.
        line: Line style of matplotlib. "" for none.
        edge: Width of the markers' borders. None uses the default.
        whisker: Width of the lines of intervals. 0 draws no intervals.
        zorder: Drawing order. Higher is in front.
    """

    colour: str = INK
    marker: str = "o"
    face: str = ""
    line: str = "-"
    size: float = 3.6
    edge: float | None = None
    width: float = 0.9
    whisker: float = 0.7
    zorder: float = 3.0

    @property
    def options(self) -> dict[str, Any]:
        """Options for `Axes.errorbar`."""
        marker = {"marker": self.marker, "mfc": self.face or self.colour, "mew": self.edge}
        line = {"color": self.colour, "linestyle": self.line, "lw": self.width}
        whiskers = {"elinewidth": self.whisker, "capsize": 1.5}
        return marker | line | whiskers | {"ms": self.size, "zorder": self.zorder}


def series_look(place: int, *, hollow: bool = False, **changes: Any) -> Look:
    """Return the appearance of the nth series. The first 70 series all differ."""
    colour, marker = _COLOURS[place % len(_COLOURS)], MARKERS[place % len(MARKERS)]
    return replace(Look(colour, marker, "white" if hollow else ""), **changes)


def family_look(place: int) -> Look:
    """Return the appearance of the marks of the nth task family."""
    return Look(INK, _FAMILIES[place % len(_FAMILIES)], "white", "", 2.4, 0.45)


def guide_look(colour: str = BAND, line: str = "-", width: float = 0.5) -> Look:
    """Return the appearance of a reference line behind the points."""
    return Look(colour, "", "", line, width=width, whisker=0, zorder=1)


def format_ratio(value: float, _: object = None) -> str:
    """Format a speedup for an axis."""
    return f"{value:g}x"


def speedup_axis_end(points: Iterable[float], ends: Iterable[float]) -> float:
    """Return the upper end of a speedup axis.

    The axis includes the intervals, up to `_MAX_AXIS_RATIO` times the largest point. With few
    questions, an interval can be very wide.
    """
    farthest = max(points)
    return min(1.04 * max([farthest, *ends]), _MAX_AXIS_RATIO * farthest)
