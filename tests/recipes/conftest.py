"""Tiny models of the embedded family, never trained, with the family's tokenizer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from recipes.embedded import family
from specbench_cli.models import resolve


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a target of four layers and a draft of one."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("embedded").path)
    folders = []
    for name, layers in (("target", 4), ("draft", 1)):
        folder = tmp_path_factory.mktemp("models") / name
        recipe = replace(family.TARGET, hidden=16, layers=layers, heads=2, mlp=24)
        family.export(family.build(recipe, layers, torch.device("cpu")), tokenizer, folder)
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """End answers after 8 tokens: untrained models never end one by themselves."""
    monkeypatch.setattr("specbench_cli.training.replies.MAX_ANSWER", 8)
