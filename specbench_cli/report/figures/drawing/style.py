"""Common style of all figures: sizes, fonts, colours and axes.

Figures are legible in grey at 84 mm (a journal's column) and for colour-blind readers. The colours
are those of Okabe & Ito ("Color Universal Design", 2008), and shapes or hatching repeat their
distinctions. Text has at least 5 pt.
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
"""Widths of one column and of two columns."""
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
"""Colour and hatching by use of time. They also differ in grey."""
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
    "legend.frameon": False,
    "legend.fontsize": 6,
    "legend.handletextpad": 0.3,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.0,
    "legend.labelspacing": 0.25,
    "legend.borderpad": 0.1,
    "svg.hashsalt": "specbench",
    "text.parse_math": False,  # a label with two `$` must not be read as a formula
    "pdf.fonttype": 42,  # TrueType: publishers refuse the Type 3 fonts that are the default
}
_STAMPS = {
    "svg": ("Date", "Creator"),
    "png": ("Software",),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
"""Metadata that would differ between two writes of the same figure, by format."""
_MAX_AXIS_RATIO = 1.8
"""Maximum of an axis, relative to the largest speedup."""
_LINE_CHARS = 24
"""Maximum number of characters in a line of a method's label."""


def figure_style() -> AbstractContextManager[None]:
    """Return a context with specbench's style for drawing and writing figures."""
    return matplotlib_defaults(_STYLE)


def matplotlib_defaults(changes: Any = None) -> AbstractContextManager[None]:
    """Return a context with matplotlib's own defaults and the given changes to them.

    Matplotlib reads `matplotlibrc` in the working folder, which may be another person's:
    `text.usetex` starts LaTeX.
    """
    import matplotlib as mpl

    # Figures have their own canvas, so the caller's backend can stay.
    own = {name: value for name, value in mpl.rcParamsDefault.items() if name != "backend"}
    return mpl.rc_context(own | (changes or {}))


def new_figure(width: float, height: float, **layout: Any) -> Figure:
    """Return an empty figure of a size in inches, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **layout)
    FigureCanvasAgg(figure)
    return figure


def write(
    figure: Figure, folder: Path, name: str, *, paper: bool = False, max_svg_bytes: int = 0
) -> list[Path]:
    """Write `name`.svg, `name`.png (300 dpi), and `name`.pdf if `paper`. The folder is created.

    The same figure gives the same bytes.

    Args:
        max_svg_bytes: Size in bytes above which an SVG also gets a PNG.
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
            if form == "svg":  # SVG comments repeat every text
                markup = files[-1].read_text(encoding="utf-8")
                files[-1].write_text(output.escape_hidden(markup), encoding="utf-8")
    return files


def add_axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Return axes with margins in inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )


def text_width(words: Iterable[str], points: float) -> float:
    """Return the width of the widest word in inches."""
    lines = (line for word in words for line in word.split("\n"))
    return points / 72 * max(map(_em, lines), default=0.0)


@cache
def _em(line: str) -> float:
    """Return the width of a line as a multiple of the font size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), line, size=1, prop=FontProperties(family=_FONT))
    return float(path.vertices[:, 0].max(initial=0.0))


def wrap_labels(labels: Iterable[str]) -> dict[str, str]:
    """Return labels as the figures show them: long ones on two lines, longer ones without the
    middle.

    Variants of a method differ at the end of their labels, so the end is kept.
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
    """Return a label on one line. A long one loses its middle."""
    half, label = _LINE_CHARS // 2, output.escape_hidden(label)
    return label if len(label) <= _LINE_CHARS else f"{label[:half]}…{label[1 - half :]}"


def label_rows(axes: Axes, labels: Sequence[str], places: Sequence[float]) -> None:
    """Write labels next to their rows."""
    words = [wrap_labels(labels)[label] for label in labels]
    axes.set_yticks(places, words)
    for tick, word in zip(axes.get_yticklabels(), words, strict=True):
        tick.set(fontsize=_size(word), linespacing=0.95)
    axes.tick_params(axis="y", length=0, pad=3)


def label_x_axis(axes: Axes, words: str) -> None:
    """Name the x axis. A name wider than the axes extends to the left, below the labels."""
    fits = text_width([words], 7) < axes.bbox.width / axes.figure.dpi
    axes.set_xlabel(words, labelpad=2, loc="center" if fits else "right")


def label_width(labels: Iterable[str]) -> float:
    """Return the space in inches that `name_rows` needs to the left of the axes."""
    words = wrap_labels(labels).values()
    return 0.1 + 1.04 * max(text_width([word], _size(word)) for word in words)


def _size(word: str) -> float:
    return TINY if "\n" in word else 7


def show_sides(axes: Axes, *sides: str) -> None:
    """Draw the named sides of the frame, with thin ticks, and no others."""
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
        marker: "" for none.
        face: colour inside the markers; "" for `colour`.
        line: line style; "" for none.
        edge: width of the markers' edges; None for the default.
        whisker: width of the lines of intervals; 0 for points without them.
        zorder: higher is in front.
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
        """Return it as options of `Axes.errorbar`."""
        marker = {"marker": self.marker, "mfc": self.face or self.colour, "mew": self.edge}
        line = {"color": self.colour, "linestyle": self.line, "lw": self.width}
        whiskers = {"elinewidth": self.whisker, "capsize": 1.5}
        return marker | line | whiskers | {"ms": self.size, "zorder": self.zorder}


def series_look(place: int, *, hollow: bool = False, **changes: Any) -> Look:
    """Return the look of a series. The first 70 places have different looks."""
    colour, marker = _COLOURS[place % len(_COLOURS)], MARKERS[place % len(MARKERS)]
    return replace(Look(colour, marker, "white" if hollow else ""), **changes)


def family_look(place: int) -> Look:
    """Return the look of a family's points."""
    return Look(INK, _FAMILIES[place % len(_FAMILIES)], "white", "", 2.4, 0.45)


def guide_look(colour: str = BAND, line: str = "-", width: float = 0.5) -> Look:
    """Return the look of a line behind the points."""
    return Look(colour, "", "", line, width=width, whisker=0, zorder=1)


def format_ratio(value: float, _: object = None) -> str:
    """Format a speedup for an axis."""
    return f"{value:g}x"


def speedup_axis_end(points: Iterable[float], ends: Iterable[float]) -> float:
    """Return the upper end of a speedup axis.

    It includes the intervals, but at most `_REACH` times the largest point. With few questions, an
    interval may be very wide.
    """
    farthest = max(points)
    return min(1.04 * max([farthest, *ends]), _MAX_AXIS_RATIO * farthest)
