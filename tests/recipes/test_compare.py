"""`python -m recipes.studies compare`: heads trained with an equal budget."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipes.studies import commands
from specbench_cli import registry
from specbench_cli.app import with_all_options
from specbench_cli.engine.models.load import load_decoder

app = with_all_options(commands.app)
pytestmark = pytest.mark.usefixtures("short_answers")
FILE = Path(__file__).parents[1] / "capabilities" / "plugins" / "stateless_head.py"


def test_heads_are_compared_at_an_equal_budget(
    tmp_path: Path, pair: tuple[Path, Path], curves: Callable[[], AbstractContextManager[object]]
) -> None:
    options = ("--out", str(tmp_path), "--target", str(pair[0]), "--smoke", "--device", "cpu")
    names = ("medusa", "linear", "hydra")
    with curves():
        result = CliRunner().invoke(
            app, ["compare", *names, "--plugin", str(FILE), *options], catch_exceptions=False
        )
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["head"] for row in rows] == ["embedded-medusa", "embedded-linear", "embedded-hydra"]
    assert len({row["tokens"] for row in rows}) == 1
    assert all(row["MAT"] >= 1 and row["parameters"] > 0 for row in rows)
    assert (tmp_path / "training_curve.png").stat().st_size > 0
    for row, name in zip(rows, names, strict=True):
        (artifact,) = registry.build(name, {}).artifacts()
        artifact.kind.load(tmp_path / row["head"], {"target": load_decoder(pair[0], name="target")})
