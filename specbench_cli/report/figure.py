"""The default figure: who is faster than vanilla, by how much, how sure, and on what.

One panel, 84 mm wide (a journal's column), legible in grey: bars are told apart by lightness,
families by the shape of their dots. The files are the same bytes for the same records.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli.report import text
from specbench_cli.report.row import Row
from specbench_cli.report.speedups import BASELINE
from specbench_cli.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN = 84 / 25.4
_ROW_IN, _BAR = 0.225, 0.7
_WHISKER, _DOT = -0.13, 0.17
"""Where in a bar the interval and the families' dots lie, from its middle downwards."""
INK, MUTED, _BAND = "#222222", "#666666", "#c4c4c4"
_OURS, _PEER, _REFERENCE = "#4a8fc2", "#cfd4d9", "#8a8f94"
_DOTS = "oDs^vP*X"
STYLE: Any = {  # matplotlib types the keys as one literal of hundreds
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.linewidth": 0.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "specbench",
}


def write_figure(summary: Summary, folder: Path) -> list[Path]:
    """Write `speedup.svg` and `speedup.png` (300 dpi) to `folder`, which is made.

    Returns:
        The files; none where no row has a speedup.
    """
    if not any(row.speedup is not None for row in summary.rows):
        return []
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "speedup.svg", folder / "speedup.png"]
    with mpl.rc_context(STYLE):
        figure = _draw(summary)
        figure.savefig(files[0], metadata={"Date": None, "Creator": None})
        figure.savefig(files[1], dpi=300, metadata={"Software": None})
    return files


def _draw(summary: Summary) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gap = 0.7 if summary.lossy else 0.0
    places = {
        row.label: place + (0.0 if row.lossless else gap) for place, row in enumerate(summary.rows)
    }
    families = list(summary.families) if len(summary.families) > 1 else []
    legend_rows = -(-len(families) // 3)
    height = _ROW_IN * (len(places) + gap) + 0.49 + 0.13 * legend_rows
    figure = Figure(figsize=(_WIDTH_IN, height))
    FigureCanvasAgg(figure)
    bottom = 0.33 + 0.13 * legend_rows + 0.03 * bool(legend_rows)
    left = 0.12 + 0.052 * max(len(label) for label in places)
    axes = figure.add_axes(
        (
            left / _WIDTH_IN,
            bottom / height,
            1 - (left + 0.36) / _WIDTH_IN,
            1 - (bottom + 0.16) / height,
        )
    )
    if summary.noise_floor is not None:
        floor = summary.noise_floor
        axes.axvspan(1 - floor, 1 + floor, color=_BAND, linewidth=0, zorder=0)
    axes.axvline(1, color=INK, linewidth=0.5, zorder=1)
    for row in summary.rows:
        _bar(axes, row, places[row.label])
    for family, marker in zip(families, _DOTS, strict=False):
        _dots(axes, summary.families[family], places, family, marker)
    if summary.lossy:
        border = len(summary.lossless) - 0.5 + gap / 2
        axes.axhline(border, color=MUTED, linewidth=0.5, dashes=(2, 2))
        axes.annotate(
            "lossy",
            (1, border),
            xycoords=("axes fraction", "data"),
            xytext=(24, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=6.5,
            color=MUTED,
        )
    _dress(axes, summary, places)
    if families:
        figure.legend(
            loc="lower center",
            ncols=3,
            frameon=False,
            fontsize=6,
            handletextpad=0.2,
            columnspacing=1.2,
            labelspacing=0.25,
            borderpad=0.1,
        )
    return figure


def _bar(axes: Axes, row: Row, place: float) -> None:
    if row.speedup is None:
        words = "BROKEN" if row.broken else "no speedup"
        axes.text(0.03, place, words, va="center", fontsize=6, color=MUTED, style="italic")
    else:
        unranked = row.peer or row.upper_bound
        colour = _REFERENCE if row.label == BASELINE else _PEER if unranked else _OURS
        hatch = None if row.lossless else "//////"
        axes.barh(
            place, row.speedup, _BAR, color=colour, hatch=hatch, edgecolor="white", lw=0, zorder=2
        )
    if row.speedup is not None and row.speedup_low is not None and row.speedup_high is not None:
        whiskers = [[row.speedup - row.speedup_low], [row.speedup_high - row.speedup]]
        axes.errorbar(
            row.speedup,
            place + _WHISKER,
            xerr=whiskers,
            fmt="none",
            ecolor=INK,
            elinewidth=0.9,
            capsize=1.8,
            capthick=0.9,
            zorder=5,
        )
    axes.annotate(
        text.number(row.mat),
        (1, place),
        xycoords=("axes fraction", "data"),
        xytext=(24, 0),
        textcoords="offset points",
        ha="right",
        va="center_baseline",
    )


def _dots(
    axes: Axes, rows: tuple[Row, ...], places: dict[str, float], family: str, marker: str
) -> None:
    shown = [row for row in rows if row.speedup is not None and row.label != BASELINE]
    axes.scatter(
        [row.speedup for row in shown if row.speedup is not None],
        [places[row.label] + _DOT for row in shown],
        s=8,
        marker=marker,
        facecolor="white",
        edgecolor=INK,
        linewidth=0.45,
        zorder=4,
        label=family.replace("_", " "),
    )


def _dress(axes: Axes, summary: Summary, places: dict[str, float]) -> None:
    axes.set_ylim(max(places.values()) + 0.6, -0.6)
    axes.set_xlim(left=0)
    axes.set_yticks(list(places.values()), list(places))
    axes.tick_params(axis="y", length=0, pad=3)
    axes.tick_params(axis="x", length=2, width=0.6, pad=2, labelsize=6.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_xlabel("speedup over vanilla, 95% interval", labelpad=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.annotate(
        "MAT",
        (1, 1),
        xycoords="axes fraction",
        xytext=(24, 0),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=6.5,
        color=MUTED,
    )
