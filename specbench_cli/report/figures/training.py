"""Figures of `specbench train`: loss curves, calibration of acceptance heads, losses of drafts."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from specbench_cli import files
from specbench_cli.report.figures.drawing import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from specbench_cli.training.acceptance import Bin
    from specbench_cli.training.align import Said


def draw_curves(facts: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draw the loss curves of trainings, and the MAT of heads on held-out replies."""
    from matplotlib.figure import Figure

    with style.defaults():
        heads = {name: fact for name, fact in facts.items() if fact.get("mat")}
        figure = Figure(figsize=(10 if heads else 6, 3.2), layout="constrained")
        read = "tokens read (millions)"
        axes = figure.add_subplot(
            1,
            2 if heads else 1,
            1,
            xlabel=read,
            ylabel="training loss (nats a token)",
            yscale="log",
        )
        lines = {}
        for name, fact in facts.items():
            curve = fact["curve"]
            tokens = [point["tokens"] / 1e6 for point in curve]
            (lines[name],) = axes.plot(tokens, [point["loss"] for point in curve], label=name)
        axes.legend(fontsize="x-small")
        if heads:
            axes = figure.add_subplot(1, 2, 2, xlabel=read, ylabel="MAT, chains, held-out replies")
            for name, fact in heads.items():
                step = fact["tokens"] / fact["steps"] / 1e6
                colour, mat = lines[name].get_color(), fact["mat"]
                at = [point["step"] * step for point in mat]
                axes.plot(at, [point["mat"] for point in mat], marker=".", color=colour, label=name)
        _write(figure, path, dpi=100)


def draw_calibration(bins: Sequence[Bin], rejection_weight: float, path: Path) -> None:
    """Draw the labelled share of acceptance by the predicted one."""
    from matplotlib.figure import Figure

    with style.defaults():
        figure = Figure(figsize=(3.3, 3.2), layout="constrained")
        axes = figure.add_subplot(
            xlabel="predicted chance of acceptance",
            ylabel="labelled chance",
            xlim=(0, 1),
            ylim=(0, 1),
        )
        shares = [at / 100 for at in range(101)]
        axes.plot(shares, shares, color="#999999", linewidth=0.8, label="equal")
        weighted = [s / (s + rejection_weight * (1 - s)) for s in shares]
        axes.plot(
            weighted, shares, "--", color="#999999", linewidth=0.8, label="where the loss is least"
        )
        axes.plot([b.predicted for b in bins], [b.labelled for b in bins], "o-")
        axes.legend(frameon=False)
        _write(figure, path, dpi=100)


def draw_alignment(worth: Mapping[str, Said], path: Path) -> None:
    """Draw alpha and MAT by loss: each seed, the mean with its interval, and the value before."""
    from matplotlib.figure import Figure

    from specbench_cli.training.align import FIGURES, half_width

    with style.defaults():
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        for axes, what in zip(figure.subplots(1, 2), FIGURES, strict=False):
            for at, said in enumerate(worth.values()):
                after = [getattr(end, what) for _, end in said]
                axes.plot([at] * len(after), after, ".", color="0.6", zorder=1)
                axes.errorbar(
                    at + 0.2, mean(after), half_width(after), fmt="o", color="C0", capsize=3
                )
            begun = mean(getattr(begin, what) for said in worth.values() for begin, _ in said)
            axes.axhline(begun, color="0.4", lw=0.8, ls="--", label="before")
            axes.set_xticks(range(len(worth)), list(worth), rotation=30)
            axes.set_ylabel("MAT" if what == "mat" else what)
            axes.legend(fontsize="x-small")
        _write(figure, path)


def _write(figure: Figure, path: Path, **options: Any) -> None:
    """Draw a figure in the format of the path's suffix, and write it as `files.write_listed`."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.removeprefix("."), **options)
    files.write_listed(path, content.getvalue())
