"""Tiny models of the embedded family, never trained, with the family's tokenizer."""

from pathlib import Path

import pytest

from tests.tiny_family import export_models


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a target of four layers and a draft of one."""
    return export_models(tmp_path_factory, 4, 1)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """End answers after 8 tokens: untrained models never end one by themselves."""
    monkeypatch.setattr("specbench_cli.training.replies.MAX_ANSWER", 8)
