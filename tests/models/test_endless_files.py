"""Files of a foreign model folder that have no end are refused before they are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench_cli.engine.models.checkpoint import (
    Weights,
    open_weights,
    read_config,
    read_decoder_config,
    read_tokenizer,
)
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.files import check_model_folder
from specbench_cli.models import resolve
from specbench_cli.models.adapter import CONFIG, WEIGHTS
from specbench_cli.models.heads import check_head, resolve_head
from specbench_cli.training.convert import convert

SHIPPED = resolve("embedded-1m").path
NAMES = (
    *("tokenizer_config.json", "tokenizer.json", "generation_config.json", "added_tokens.json"),
    *("model.safetensors", "model-2.safetensors", "model.safetensors.index.json"),
    *("chat_template.jinja", "additional_chat_templates/a.jinja", "vocab.txt"),
)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


KINDS = (pipe, device)
READERS = (open_weights, Weights, read_config, read_decoder_config, read_tokenizer)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a copy of a shipped model."""
    shutil.copytree(SHIPPED, tmp_path / "model")
    (tmp_path / "model/additional_chat_templates").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_no_pipe_and_no_device_of_a_model_folder_is_read(
    model: Path, make: Callable[[Path], None], name: str
) -> None:
    make(model / name)
    with pytest.raises(UsageError, match="is not a regular file"):
        resolve(str(model))
    with pytest.raises(UsageError, match="is not a regular file"):
        resolve_head(str(model), "medusa", resolve("embedded"), in_target=False)
    with pytest.raises(UsageError, match="is not a regular file"):
        check_head(str(model), "medusa", resolve("embedded"), in_target=False)
    for read in READERS:
        with pytest.raises(UsageError, match="is not a regular file"):
            read(model)
    with pytest.raises(UsageError, match="is not a regular file"):
        convert(model, model / "out")


@pytest.mark.parametrize("make", KINDS)
def test_no_pipe_and_no_device_of_an_adapter_s_base_is_read(
    model: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(model / "notes")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"base_model_name_or_path": str(model)}))
    (folder / WEIGHTS).touch()
    with pytest.raises(UsageError, match="notes is not a regular file"):
        resolve(str(folder))
    make(folder / WEIGHTS)
    with pytest.raises(UsageError, match=f"{WEIGHTS} is not a regular file"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("config.json", 17_000_000),
        ("tokenizer_config.json", 17_000_000),
        ("tokenizer.json", 300_000_000),
        ("chat_template.jinja", 300_000_000),
    ],
)
def test_a_text_file_much_larger_than_its_format_needs_is_refused(
    model: Path, name: str, size: int
) -> None:
    with (model / name).open("ab") as file:
        file.truncate(size)
    with pytest.raises(UsageError, match=rf"{name} has {size // 1_000_000} MB; at most"):
        resolve(str(model))


def test_a_header_of_weights_larger_than_safetensors_allows_is_not_read(model: Path) -> None:
    with (model / "model.safetensors").open("wb") as file:
        file.write((1 << 36).to_bytes(8, "little"))
        file.truncate(1 << 37)
    with pytest.raises(EnvironmentFault, match="has no header of safetensors"):
        Weights(model)


def test_links_to_regular_files_are_read(model: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for file in model.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    check_model_folder(tmp_path / "snapshot")
    assert len(Weights(resolve(str(tmp_path / "snapshot")).path)) == len(Weights(SHIPPED))
