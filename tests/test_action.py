"""Tests of the GitHub action's steps and of the commands in docs/how-to/ci.md."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from specbench_cli.app import with_all_options
from specbench_cli.commands.compare import FILES
from specbench_cli.config.profile import PROFILES

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
DOCS = (ROOT / "docs/how-to/ci.md").read_text(encoding="utf-8")
STEPS = ACTION["runs"]["steps"]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", DOCS, re.M | re.S)
ACTION_SCRIPTS = [step["run"] for step in STEPS if "run" in step]
SCRIPTS = ACTION_SCRIPTS + [text for language, text in BLOCKS if language == "bash"]


def example_scripts() -> list[str]:
    """Return the scripts of the YAML examples."""
    found = []
    for language, text in BLOCKS:
        if language == "yaml":
            for job in _mappings(yaml.safe_load(text)):
                script = job.get("script", job.get("run", []))
                found += [script] if isinstance(script, str) else script
    return found


def _mappings(value):
    if isinstance(value, dict):
        yield value
    members = value.values() if isinstance(value, dict) else value
    for member in members if isinstance(members, list) or isinstance(value, dict) else ():
        yield from _mappings(member)


def find_commands(script: str) -> list[list[str]]:
    """Return each specbench command of a script as a list of words."""
    joined = script.replace("\\\n", " ")
    found = re.findall(r"(?:^|[;&|]\s*|`)(specbench [^|;&`\n]*)", joined, re.M)
    return [shlex.split(each, comments=True) for each in found]


def find_options() -> set[tuple[str, str]]:
    """Return the (command, option) pairs of all scripts and examples."""
    inline = re.findall(r"`(specbench [^`\n]+)`", DOCS)
    return {
        (words[1], word.partition("=")[0])
        for script in [*SCRIPTS, *example_scripts(), *inline]
        for words in find_commands(script)
        for word in words[2:]
        if word.startswith("-")
    }


@pytest.mark.parametrize("script", [*SCRIPTS, *example_scripts()])
def test_scripts_are_valid(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_all_options_in_scripts_exist():
    options_by_command = {
        name: {text for param in command.params for text in param.opts}
        for name, command in get_command(with_all_options()).commands.items()
    }
    assert {command for command, _ in find_options()} == {"run", "compare"}
    assert [pair for pair in find_options() if pair[1] not in options_by_command[pair[0]]] == []


def test_steps_read_inputs_from_variables_and_use_every_input():
    assert not [step for step in STEPS if "${{" in step.get("run", "")]
    steps_text = yaml.safe_dump(STEPS)
    assert set(re.findall(r"inputs\.([\w-]+)", steps_text)) == ACTION["inputs"].keys()
    for step in STEPS:
        assert set(re.findall(r"\$\{?([A-Z]\w+)", step.get("run", ""))) <= step.get(
            "env", {}
        ).keys() | {"PWD", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ACTION_PATH"}


def test_steps_name_their_shell_and_actions_are_pinned():
    assert all(step["shell"] == "bash" for step in STEPS if "run" in step)
    assert all(re.search(r"@v\d+$", step["uses"]) for step in STEPS if "uses" in step)


def test_outputs_are_set_by_the_steps_that_they_name():
    scripts = {step["id"]: step["run"] for step in STEPS if "id" in step}
    for output in ACTION["outputs"].values():
        step, name = re.search(r"steps\.(\w+)\.outputs\.([\w-]+)", output["value"]).groups()
        assert f"{name}=" in scripts[step]
    assert all(f".{file.partition('.')[2]}" in scripts["compare"] for file in FILES.values())


def test_default_inputs_are_valid_option_values():
    defaults = {name: action_input["default"] for name, action_input in ACTION["inputs"].items()}
    assert defaults["profile"] in PROFILES
    options = {
        param.name: param.default
        for param in get_command(with_all_options()).commands["compare"].params
    }
    assert (defaults["fail-on"], defaults["tolerance"]) == (
        options["fail_on"],
        options["tolerance"],
    )


def test_all_inputs_and_profiles_are_documented():
    (inputs,) = re.findall(r"Inputs: (.*?)\. Outputs: (.*?)\.\n", DOCS)
    assert set(re.findall(r"`([\w-]+)`", inputs[0])) == ACTION["inputs"].keys()
    assert set(re.findall(r"`([\w-]+)`", inputs[1])) == ACTION["outputs"].keys()
    assert re.findall(r"^\| `(\w+)` \|", DOCS, re.M) == list(PROFILES)
