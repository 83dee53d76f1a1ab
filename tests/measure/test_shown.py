"""What of a setting is kept: names, never paths of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench_cli.measure.redaction import redact_paths, redact_setting


def test_a_folder_is_shown_by_its_name_however_deep_it_lies(tmp_path: Path) -> None:
    head = tmp_path / "my-head"
    head.mkdir()
    kept = redact_setting(
        {"eagle3": {"head": str(head), "nodes": 16}, "stages": ("ngram", str(head))}
    )
    assert kept == {"eagle3": {"head": "my-head", "nodes": 16}, "stages": ["ngram", "my-head"]}


def test_a_relative_path_to_a_folder_is_shown_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heads" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert redact_setting("heads/mine") == "mine"


@pytest.mark.parametrize("value", ["auto", "3,2,1", "org/name", "ngram", 0.5, None, True])
def test_what_is_no_path_stays_as_it_is(value: object) -> None:
    assert redact_setting(value) == value


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("no such head: /home/me/heads/mine", "no such head: mine"),
        ("(delete ~/heads/mine, or '/data/x.bin')", "(delete mine, or 'x.bin')"),
        ("org/name, or https://host/a/b: see docs/how-to/heads.md", None),
    ],
)
def test_a_sentence_keeps_the_last_name_of_a_path(said: str, kept: str | None) -> None:
    assert redact_paths(said) == (kept or said)
