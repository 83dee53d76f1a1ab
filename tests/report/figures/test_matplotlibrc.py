"""Tests that figures do not depend on a `matplotlibrc` in the working folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import pytest

from specbench_cli.report.figures import training
from specbench_cli.report.figures.drawing import style


def _styled(path: Path) -> None:
    with style.figure_style():
        figure = style.new_figure(2, 2)
        style.add_axes(figure, 0.2, 0.2, 0.2, 0.2).set_title("a title")
        style.write(figure, path.parent, path.stem, paper=True)


def _curves(path: Path) -> None:
    curve = [{"tokens": n, "loss": 1.0 / n} for n in (1, 2)]
    mat = [{"step": 1, "mat": 1.5}]
    training.draw_curves({"head": {"curve": curve, "mat": mat, "tokens": 2, "steps": 2}}, path)


def _calibration(path: Path) -> None:
    training.draw_calibration([SimpleNamespace(predicted=0.5, labelled=0.4)], 6.0, path)


def _alignment(path: Path) -> None:
    ends = [(SimpleNamespace(alpha=n, mat=n, mbsu=n),) * 2 for n in (1.0, 2.0)]
    training.draw_alignment({"kl": ends, "tv": ends}, path)


DRAWINGS = [_styled, _curves, _calibration, _alignment]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_matplotlibrc_does_not_affect_figures(tmp_path, monkeypatch, draw):
    calls = tmp_path / "RAN"
    fake = tmp_path / "bin/latex"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\necho x >> {calls}\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    usual, other = tmp_path / "usual/a.png", tmp_path / "other/a.png"
    for path in (usual, other):
        path.parent.mkdir()
    with mpl.rc_context(mpl.rcParamsDefault):
        draw(usual)
    hostile = tmp_path / "matplotlibrc"
    hostile.write_text(
        "text.usetex: True\ntext.latex.preamble: \\input{secret}\nsvg.image_inline: False\n"
        "font.size: 30\nlines.linewidth: 9\n"
    )
    with mpl.rc_context(fname=str(hostile)):
        draw(other)
        assert mpl.rcParams["text.usetex"]  # the caller's setting is restored
    assert not calls.exists()
    assert other.read_bytes() == usual.read_bytes()
