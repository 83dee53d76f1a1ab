"""`specbench new-method` writes plug-ins that load, pass the audit, and hide nothing."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from specbench_cli import app, registry
from specbench_cli.config.commands import NewMethodOptions
from specbench_cli.testing import check

KINDS = get_args(NewMethodOptions.model_fields["kind"].annotation)


@pytest.fixture(autouse=True)
def _forget_plugins(monkeypatch):
    monkeypatch.setattr(registry, "_plugin_methods", {})


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Return a function that runs a command in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: (app._run(list(args)), *capsys.readouterr())


@pytest.mark.parametrize("kind", KINDS)
def test_skeleton_has_the_new_name_everywhere_and_prints_the_next_two_commands(kind, call):
    code, out, err = call("new-method", "my-idea", "--kind", kind)
    text = Path("my_idea.py").read_text(encoding="utf-8")
    assert code == 0
    assert "skeleton" not in text.lower()
    assert 'name = "my-idea"' in text
    assert "class MyIdea(" in text
    assert "my_idea.py" in Path("test_my_idea.py").read_text(encoding="utf-8")
    assert "wrote my_idea.py" in err
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["specbench", "audit"],
        ["specbench", "train" if kind == "head" else "run"],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_skeleton_keeps_the_distribution_of_the_target(kind, call):
    assert call("new-method", "my-idea", "--kind", kind)[0] == 0
    check("my_idea.py", "distribution")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sps", "there is a method sps already"),
        ("prompt-lookup", "there is a method prompt-lookup already"),
        ("torch", "would hide the Python package torch"),
        ("My Method", "cannot be the name of a new method"),
        ("a" * 41, "cannot be the name of a new method"),
        ("../up", "cannot be the name of a new method"),
    ],
)
def test_an_unusable_name_is_refused_with_a_suggestion(name, reason, call):
    code, _, err = call("new-method", name)
    assert code == 2
    assert reason in err
    assert "hint: specbench new-method" in err
    assert not list(Path().iterdir())


@pytest.mark.parametrize("file", ["my_idea.py", "test_my_idea.py"])
def test_existing_file_is_not_overwritten(file, call):
    Path(file).write_text("mine\n", encoding="utf-8")
    code, _, err = call("new-method", "my-idea")
    assert code == 2
    assert f"{file} exists already" in err
    assert [path.name for path in Path().iterdir()] == [file]
    assert Path(file).read_text(encoding="utf-8") == "mine\n"


def test_an_unwritable_folder_is_one_error_and_leaves_no_file(call):
    Path("file").write_text("", encoding="utf-8")
    code, _, err = call("new-method", "my-idea", "--out", "file/plugins")
    assert code == 2
    assert "cannot write to file/plugins/my_idea.py" in err
