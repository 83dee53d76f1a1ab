"""`specbench init`, the schema of config files, and shell completion."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from specbench_cli import app, registry
from specbench_cli.config.load import load
from specbench_cli.config.profile import FOLDER
from specbench_cli.config.run import RunConfig
from specbench_cli.config.sources import SettingsLayer


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Return a function that runs a command in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: (app._run(list(args)), *capsys.readouterr())


@pytest.fixture
def check(call):
    """Return a function that validates the values of a file against the schema."""
    schema = json.loads(call("init", "--schema")[1])
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema).validate


def test_the_config_file_is_valid_and_names_every_setting(call, check):
    assert call("init")[0] == 0
    text = Path("specbench.yaml").read_text(encoding="utf-8")
    check(yaml.safe_load(text))
    config, sources = load(SettingsLayer(), None, methods=registry, env={}, folder=Path())
    assert [choice.name for choice in config.methods] == ["vanilla", "sps", "pld"]
    assert sources["limit"] == "specbench.yaml:5"
    named = {line.removeprefix("# ").partition(":")[0] for line in text.splitlines()}
    assert named >= RunConfig.model_fields.keys()
    assert max(map(len, text.splitlines())) <= 100


def test_an_existing_file_is_not_changed(call):
    Path("specbench.yaml").write_text("limit: 3\n")
    code, _, err = call("init")
    assert code == 2 and "specbench.yaml exists already" in err
    assert Path("specbench.yaml").read_text() == "limit: 3\n"


def test_the_schema_has_and_describes_every_config_key(check):
    keys = check.__self__.schema["properties"]
    assert keys.keys() == RunConfig.model_fields.keys()
    assert all(key["description"] for key in keys.values())


def test_the_schema_accepts_what_a_run_accepts(check):
    for profile in FOLDER.glob("*.yaml"):
        settings = yaml.safe_load(profile.read_text(encoding="utf-8"))
        settings.pop("without", None)  # a key that only profiles have
        check(settings)
    check({"methods": ["sps", {"name": "sps", "label": "s7", "params": {"length": 7}}]})
    check({"sweep": {"sps": {"length": "1:6:1"}}, "devices": {"target": "cpu:0"}, "limit": None})


@pytest.mark.parametrize(
    "wrong",
    [{"limt": 3}, {"limit": 0}, {"repeats": "many"}, {"verify": "maybe"}, {"methods": [{}]}],
)
def test_the_schema_refuses_what_a_run_refuses(check, wrong):
    with pytest.raises(ValidationError):
        check(wrong)


def test_a_shell_completes_methods_after_a_comma_and_commands(call, capsys, monkeypatch):
    def complete(words):
        monkeypatch.setenv("_SPECBENCH_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            app._run([])
        return capsys.readouterr().out.split()

    assert "sps,pld" in complete("specbench run -m sps,pl")
    assert complete("specbench ini") == ["init"]
    assert "mini" in complete("specbench run -t mi")
