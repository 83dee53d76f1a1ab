"""Launch commands for other engines: each parses as its engine reads it."""

import ast
import json
import shlex

import pytest
import yaml

from specbench_cli import registry
from specbench_cli.predict.recommend.engines import ServedModels, launch_commands, load_engines

NAMES = ServedModels("org/big", "org/small", "org/head")
ALL_COMMANDS = [
    (engine.name, engine.form, method, form)
    for engine in load_engines()
    for method, forms in engine.methods.items()
    for form in forms
]
IDS = [f"{engine}-{method}-{at}" for at, (engine, _, method, _) in enumerate(ALL_COMMANDS)]
OPTIONS = {
    "SGLang": {
        "--model",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
        "--speculative-ngram-max-match-window-size",
        "--speculative-ngram-max-bfs-breadth",
    },
    "llama.cpp": {
        "--model",
        "--model-draft",
        "--draft-max",
        "--draft-min",
        "--spec-type",
        "--spec-ngram-size-n",
        "--spec-ngram-size-m",
    },
    "vLLM": {"--speculative-config"},
}
"""Options in the documentation of each engine when the command lines were checked."""


def fill_command(engine, method, form):
    params = registry.declare(method, {**_number_defaults(method), **form.when}).params.model_dump()
    return next(each for each in launch_commands(method, params, NAMES) if each.engine == engine)


def _number_defaults(method):
    """Return numbers for parameters whose default an engine cannot use."""
    return {"exit": 2} if method == "layerskip" else {}


@pytest.mark.parametrize(("engine", "kind", "method", "form"), ALL_COMMANDS, ids=IDS)
def test_every_launch_command_parses_as_its_engine_reads_it(engine, kind, method, form):
    line = fill_command(engine, method, form)
    assert line.lacks == "" and "$" not in line.text
    if kind == "shell":
        words = shlex.split(line.text)
        options = {word for word in words if word.startswith("--")}
        assert options and options <= OPTIONS[engine]
        if engine == "vLLM":
            settings = json.loads(words[words.index("--speculative-config") + 1])
            assert settings["num_speculative_tokens"] >= 1 and settings["method"]
    elif kind == "yaml":
        settings = yaml.safe_load(line.text)["speculative_config"]
        assert settings["decoding_type"] in {
            "DraftTarget", "NGram", "Eagle3", "MTP", "PARD", "DFlash", "SA"
        }  # fmt: skip
        assert settings["max_draft_len"] >= 1
    else:
        ast.parse(line.text)


def test_every_method_is_registered_and_every_engine_has_a_version():
    assert {method for _, _, method, _ in ALL_COMMANDS} <= registry.built_in_methods().keys()
    assert [engine.name for engine in load_engines()] == [
        "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "OpenVINO GenAI", "transformers"
    ]  # fmt: skip
    assert all(engine.version and engine.checked for engine in load_engines())


def test_transformers_accepts_the_settings_of_its_commands():
    import transformers

    supported = transformers.GenerationConfig().to_dict().keys() | {
        "assistant_model", "tokenizer", "assistant_tokenizer"
    }  # fmt: skip
    for engine, _, method, form in ALL_COMMANDS:
        if engine == "transformers":
            tree = ast.parse(fill_command(engine, method, form).text)
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            named = {word.arg for call in calls for word in call.keywords} - {None}
            assert named and named <= supported


def test_an_unsupported_stopping_rule_is_named_in_place_of_a_command():
    params = registry.declare("sps", {"length": "heuristic"}).params.model_dump()
    settings = {line.engine: line for line in launch_commands("sps", params, NAMES)}
    assert settings["vLLM"].text == "" and "length=heuristic" in settings["vLLM"].lacks


def test_settings_select_the_form_of_a_command():
    def lookup(rule):
        params = registry.declare("pld", {"rule": rule, "ngram": 4}).params.model_dump()
        return next(
            line.text for line in launch_commands("pld", params, NAMES) if line.engine == "vLLM"
        )

    assert '"prompt_lookup_min": 4' in lookup("author")
    assert '"prompt_lookup_min": 1' in lookup("transformers")


def test_a_method_that_no_engine_supports_has_no_command():
    params = registry.declare("staged", {}).params.model_dump()
    assert {line.lacks for line in launch_commands("staged", params, NAMES)} == {
        "does not support staged"
    }


@pytest.mark.openvino
def test_openvino_has_the_api_that_its_commands_use():
    genai = pytest.importorskip("openvino_genai")
    config = genai.GenerationConfig()
    for engine, _, method, form in ALL_COMMANDS:
        if engine == "OpenVINO GenAI":
            tree = ast.parse(fill_command(engine, method, form).text)
            attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            of = {
                node.attr: node.value.id for node in attributes if isinstance(node.value, ast.Name)
            }
            assert all(hasattr(genai, name) for name, owner in of.items() if owner == "ov")
            assert all(hasattr(config, name) for name, owner in of.items() if owner == "config")
