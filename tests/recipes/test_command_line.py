"""Command lines of recipes: help, errors, files of the user, and moved commands."""

import shutil
from pathlib import Path

import pytest

from recipes.embedded import commands as embedded
from recipes.studies import commands as studies
from specbench_cli import app
from specbench_cli.errors import ExitCode

COMMANDS = {"embedded": embedded.app, "studies": studies.app}
MINE = "mine: half a year's work\n"


@pytest.fixture
def call(capsys):
    """Return a function that runs a recipe: exit code, stdout and stderr."""

    def run(recipe, *words):
        code = app._run([*map(str, words)], COMMANDS[recipe], f"python -m recipes.{recipe}")
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), " ".join(err.split())

    return run


@pytest.mark.parametrize(("words", "recipe"), app.MOVED_COMMANDS.items(), ids=str)
def test_a_moved_command_names_its_recipe(call, capsys, words, recipe):
    assert app._run([*words, "--out", "x"]) == ExitCode.USAGE
    err = " ".join(capsys.readouterr().err.split())
    assert f"`specbench {' '.join(words)}` is no longer part of the package" in err
    assert f"python -m recipes.{recipe} --help" in err
    package, command = recipe.split()
    code, out, _ = call(package, command, "--help")
    assert code == 0
    assert f"Usage: python -m recipes.{recipe} [OPTIONS]" in out
    assert f"python -m recipes.{recipe}" in out.split("Example")[1]


def test_a_moved_option_among_others_is_recognized(capsys):
    assert app._run(["report", "grid", "--at", "tokens=1M", "--scaling"]) == ExitCode.USAGE
    assert "recipes.studies scaling" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", COMMANDS)
def test_the_help_of_a_recipe_lists_its_commands(call, recipe):
    code, out, _ = call(recipe, "--help")
    assert code == 0
    assert all(each.name in out for each in COMMANDS[recipe].registered_commands)


def test_an_unknown_command_of_a_recipe_is_one_error(call):
    code, _, err = call("studies", "grids", "--out", "x")
    assert code == ExitCode.USAGE
    assert "grid" in err
    assert "python -m recipes.studies" in err


@pytest.mark.parametrize("scale", ["0", "-1", "nan"])
def test_a_scale_that_is_not_positive_is_a_usage_error(call, tmp_path, scale):
    code, _, err = call("embedded", "pair", "--out", tmp_path, f"--steps-scale={scale}")
    assert (code, "must be above 0" in err) == (ExitCode.USAGE, True)


def test_a_target_folder_without_a_model_is_a_usage_error(call, tmp_path):
    words = ("exit", "--smoke", "--out", tmp_path / "out", "--target", tmp_path)
    code, _, err = call("embedded", *words)
    assert (code, "contains no model" in err) == (ExitCode.USAGE, True)


@pytest.mark.parametrize("name", ["training/embedded-7m", "training/tokenizer"])
def test_training_writes_into_no_folder_that_is_a_link(call, tmp_path, name):
    path, user_file = tmp_path / "out" / name, tmp_path / "mine"
    path.parent.mkdir(parents=True)
    user_file.mkdir()
    path.symlink_to(user_file)
    code, _, err = call("embedded", "pair", "--smoke", "--out", tmp_path / "out")
    assert (code, "is a link" in err) == (ExitCode.USAGE, True)
    assert not list(user_file.iterdir())


@pytest.mark.parametrize(
    ("recipe", "words", "name"),
    [
        ("embedded", ("pair", "--smoke"), "training_curve.png"),
        ("embedded", ("quality",), "quality.json"),
        ("studies", ("compare", "medusa", "--smoke"), "comparison.json"),
    ],
)
@pytest.mark.parametrize("link", [False, True], ids=["file", "link"])
def test_a_user_s_file_is_not_replaced(call, tmp_path, recipe, words, name, link):
    user_file, path = tmp_path / "mine.txt", tmp_path / "out" / name
    user_file.write_text(MINE)
    path.parent.mkdir()
    path.symlink_to(user_file) if link else shutil.copy(user_file, path)
    code, _, err = call(recipe, *words, "--out", path.parent)
    assert (code, "specbench did not write this" in err) == (ExitCode.USAGE, True)
    assert (user_file.read_text(), path.read_text()) == (MINE, MINE)
    assert not list(Path(path.parent).rglob("*.safetensors"))
