"""LoRA adapters: merged completely, or refused with a reason."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specbench_cli.errors import SpecbenchError, UsageError
from specbench_cli.models import resolve
from specbench_cli.models.adapter import CONFIG, RECORD, WEIGHTS, A, B
from specbench_cli.models.resolve import Checkpoint

PLACE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def write_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes an adapter of the shipped draft model.

    Its arguments replace tensors and settings.
    """
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    width = json.loads((resolve("embedded-1m").path / "config.json").read_text())["hidden_size"]

    def make(tensors: dict[str, Any] | None = None, **settings: Any) -> Path:
        folder = tmp_path / "tuned"
        folder.mkdir()
        facts = {"base_model_name_or_path": "embedded-1m", "r": 2, "lora_alpha": 4}
        (folder / CONFIG).write_text(json.dumps({**facts, "peft_type": "LORA", **settings}))
        parts = {PLACE + A: np.ones((2, width)), PLACE + B: np.ones((width, 2))}
        parts |= tensors or {}
        stored = {name: part.astype("f4") for name, part in parts.items() if part is not None}
        save_file(stored, folder / WEIGHTS)
        return folder

    return make


def test_a_complete_adapter_is_accepted(write_adapter: Callable[..., Path]) -> None:
    assert isinstance(resolve(str(write_adapter())), Checkpoint)


def test_only_regular_files_of_the_base_model_are_copied(
    write_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(resolve("embedded-1m").path, base)
    (base / "more").mkdir()
    (base / "more/zero").symlink_to("/dev/zero")
    os.mkfifo(base / "more/pipe")
    (base / "loop").symlink_to(tmp_path)
    copied = resolve(str(write_adapter(base_model_name_or_path=str(base)))).path
    assert (copied / "tokenizer.json").is_file()
    assert not {each.name for each in copied.rglob("*")} & {"zero", "pipe", "loop"}


@pytest.mark.parametrize("base", ["nobody/model-that-is-not-here", "./no-such-folder", "llama-9"])
def test_the_error_for_a_missing_base_names_the_adapter(
    write_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_adapter(base_model_name_or_path=base)
    with pytest.raises(SpecbenchError) as fault:
        resolve(str(folder))
    assert fault.value.message.startswith(f"tuned/{CONFIG} names {base} as its model: ")


def test_the_error_for_a_missing_target_names_the_draft_record(tmp_path: Path) -> None:
    (tmp_path / "layers.safetensors").touch()
    (tmp_path / RECORD).write_text(json.dumps({"target": "./gone"}))
    with pytest.raises(UsageError, match=rf"{RECORD} names \./gone as its model: no such folder"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"base_model.model.lm_head.weight": np.ones((4, 4))}, "lm_head.weight, which is not"),
        (
            {f"{PLACE}.lora_magnitude_vector": np.ones(4)},
            "magnitude_vector, which is not a LoRA matrix",
        ),
        ({f"{PLACE}.lora_B.bias": np.ones(4)}, "lora_B.bias, which is not a LoRA matrix"),
        ({PLACE + B: None}, "lacks .*q_proj.lora_B.weight"),
        ({PLACE + A: np.ones((3, 128)), PLACE + B: np.ones((128, 3))}, "of rank 3, .* says 2"),
    ],
)
def test_unused_adapter_tensors_are_named(
    write_adapter: Callable[..., Path], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(str(write_adapter(tensors)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"base_model_name_or_path": None}, "names no model"),
        ({"r": 0}, "has r 0; it must be a number from 1"),
        ({"lora_alpha": "x"}, "has lora_alpha 'x'; it must be a number"),
    ],
)
def test_unsupported_adapter_settings_are_named(
    write_adapter: Callable[..., Path], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(str(write_adapter(**settings)))


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_an_adapter_without_its_files_is_refused(
    write_adapter: Callable[..., Path], text: str
) -> None:
    folder = write_adapter()
    if text is None:
        (folder / WEIGHTS).unlink()
    else:
        (folder / CONFIG).write_text(text)
    with pytest.raises(UsageError, match=r"tuned"):
        resolve(str(folder))
