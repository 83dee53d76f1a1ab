"""Tiny untrained models of the embedded family, with its tokenizer."""

from pathlib import Path

import pytest

from tests.tiny_family import export_models


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a target with four layers and a draft with one."""
    return export_models(tmp_path_factory, 4, 1)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """End answers after 8 tokens, since untrained models never end one."""
    monkeypatch.setattr("specbench_cli.training.replies.MAX_ANSWER", 8)
