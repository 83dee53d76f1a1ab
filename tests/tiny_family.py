"""Tiny untrained models of the embedded family, with its tokenizer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from recipes.embedded import family
from specbench_cli.models import resolve


def export_models(
    tmp_path_factory: pytest.TempPathFactory, target: int, draft: int
) -> tuple[Path, Path]:
    """Write a target and a draft model with `target` and `draft` layers; return their folders."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve("embedded").path)
    folders = []
    for name, layers in (("target", target), ("draft", draft)):
        folder = tmp_path_factory.mktemp("models") / name
        recipe = replace(family.TARGET, hidden=16, layers=layers, heads=2, mlp=24)
        family.export(family.build(recipe, layers, torch.device("cpu")), tokenizer, folder)
        folders.append(folder)
    return folders[0], folders[1]
