"""Tests of redaction: stored settings and messages contain names, but no local paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench_cli.measure.redaction import redact_paths, redact_setting


def test_a_nested_folder_is_replaced_by_its_name(tmp_path: Path) -> None:
    head = tmp_path / "my-head"
    head.mkdir()
    redacted = redact_setting(
        {"eagle3": {"head": str(head), "nodes": 16}, "stages": ("ngram", str(head))}
    )
    assert redacted == {"eagle3": {"head": "my-head", "nodes": 16}, "stages": ["ngram", "my-head"]}


def test_a_relative_path_is_replaced_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heads" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert redact_setting("heads/mine") == "mine"


@pytest.mark.parametrize("value", ["auto", "3,2,1", "org/name", "ngram", 0.5, None, True])
def test_values_that_are_no_paths_are_kept(value: object) -> None:
    assert redact_setting(value) == value


@pytest.mark.parametrize(
    ("message", "redacted"),
    [
        ("no such head: /home/me/heads/mine", "no such head: mine"),
        ("(delete ~/heads/mine, or '/data/x.bin')", "(delete mine, or 'x.bin')"),
        ("org/name, or https://host/a/b: see docs/how-to/heads.md", None),
    ],
)
def test_paths_in_a_sentence_are_replaced_by_their_names(
    message: str, redacted: str | None
) -> None:
    assert redact_paths(message) == (redacted or message)
