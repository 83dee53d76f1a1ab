"""`python -m recipes.studies grid`: drafts of several sizes, each trained once."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipes.studies import commands
from specbench_cli.app import with_all_options
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.errors import UsageError

app = with_all_options(commands.app)
pytestmark = pytest.mark.usefixtures("short_answers")


def test_a_grid_trains_a_draft_of_each_size_once(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = map(str, pair)
    words = ["grid", "--target", target, "--draft", draft, "--smoke", "--out", str(tmp_path)]
    words += ["--layers", "2,1", "--tokens", "0.3M,100k", "--seeds", "1"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    names = [f"{layers}-layers-{size}-seed-0" for size in ("100k", "300k") for layers in (1, 2)]
    records = [json.loads((tmp_path / name / "alignment.json").read_text()) for name in names]
    assert [(each["layers"], each["tokens"]) for each in records] == [
        *((1, 2048), (2, 2048), (1, 4096), (2, 4096))
    ]
    assert all(0 < each["alpha"] < 1 <= each["mat"] <= 6 for each in records)
    assert records[0]["parameters"] < records[1]["parameters"]
    load_decoder(tmp_path / names[1], name="draft")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("specbench_cli.training.loop.train", never)
    again = CliRunner().invoke(app, words, catch_exceptions=False)
    assert again.exit_code == 0 and "layers" in again.stdout


@pytest.mark.parametrize("wrong", [("--tokens", "1M,lots"), ("--layers", "0,1"), ("--tokens", "")])
def test_an_invalid_grid_is_refused(wrong: tuple[str, str], tmp_path: Path) -> None:
    called = CliRunner().invoke(app, ["grid", "--smoke", "--out", str(tmp_path), *wrong])
    assert isinstance(called.exception, UsageError)
    assert "must be numbers above 0" in called.exception.message
