"""Locations of trained modules for a target, such as heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specbench_cli.engine.models.checkpoint import Weights
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.models import hub, resolve
from specbench_cli.models.heads import resolve_head

SHIPPED = ("eagle", "eagle3", "mtp", "acceptance", "judge", "exits", "datastore")


@pytest.mark.parametrize("kind", SHIPPED)
def test_the_embedded_targets_heads_are_shipped_and_small(kind: str) -> None:
    found = resolve_head("auto", kind, resolve("embedded"), in_target=False)
    assert found.label == f"embedded-{kind}"
    assert all(file.stat().st_size < 2_000_000 for file in Weights(found.path).files)


def test_a_folder_is_used_unchanged_and_labelled_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    found = resolve_head(str(tmp_path / "mine"), "eagle", resolve("embedded"), in_target=False)
    assert (found.label, found.path) == ("mine", tmp_path / "mine")


def test_a_target_without_a_head_lists_the_heads_and_the_training_command() -> None:
    with pytest.raises(UsageError, match="no hass head is known for embedded-7m") as refused:
        resolve_head("auto", "hass", resolve("embedded"), in_target=False)
    assert "eagle3" in refused.value.message
    assert "specbench train --help" in str(refused.value.hint)


def test_layers_for_mtp_are_read_from_the_target() -> None:
    target = replace(resolve("embedded"), heads={})
    found = resolve_head("auto", "mtp", target, in_target=True)
    assert found.path == target.path


def test_a_head_name_that_is_neither_folder_nor_hub_id_is_refused() -> None:
    with pytest.raises(UsageError, match="no such eagle head: nowhere"):
        resolve_head("nowhere", "eagle", resolve("embedded"), in_target=False)


def test_a_missing_hub_head_names_its_download_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFault, match="some/head is not on this machine") as refused:
        resolve_head("some/head", "eagle", resolve("embedded"), in_target=False)
    assert hub.HubDownload("some/head").command in str(refused.value.hint)
