"""Composition of a run's configuration: precedence, sources and errors."""

from pathlib import Path

import pytest

from specbench_cli.config import profile
from specbench_cli.config.load import DEFAULT_METHODS, load
from specbench_cli.config.sources import SettingsLayer, from_command_line
from specbench_cli.errors import UsageError

ALIASES = {"ar": "vanilla", "sd": "sps"}


class Registry:
    """Registry that resolves a few names without imports."""

    names = (*DEFAULT_METHODS, "echo")

    def resolve(self, name: str) -> str:
        name = ALIASES.get(name, name)
        if name not in self.names:
            raise UsageError(f"there is no method {name!r}")
        return name

    def load_plugin(self, path: str) -> list[str]:
        return ["echo"]

    def lossless_methods(self) -> list[str]:
        return ["vanilla", "sps", "pld"]


@pytest.fixture
def compose(tmp_path):
    def call(sets=(), file=None, env=None, own=None, **flags):
        if own is not None:
            (tmp_path / "specbench.yaml").write_text(own)
        if file is not None:
            (tmp_path / "other.yaml").write_text(file)
        return load(
            from_command_line(flags, sets),
            tmp_path / "other.yaml" if file is not None else None,
            methods=Registry(),
            env=env or {},
            folder=tmp_path,
        )

    return call


def names(config):
    return [choice.name for choice in config.methods]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (".nan", "must be a text, a finite number, true, false or null, got nan"),
        ("2001-01-01", "got datetime.date(2001, 1, 1)"),
        ("{1: 3}", "1 is not a name"),
    ],
)
def test_a_value_that_a_resumed_run_could_not_read_is_refused(compose, value, message):
    with pytest.raises(UsageError) as refused:
        compose(own=f"methods:\n- name: sps\n  params: {{length: {value}}}\n")
    assert message in refused.value.message


def test_a_lone_surrogate_is_refused_and_a_long_name_is_not_a_file(compose):
    with pytest.raises(UsageError, match="--target contains half a character"):
        compose(target="\udcff")
    assert compose(category="é" * 300)[0].category == ["é" * 300]


# Defaults of a run without options


def test_no_arguments_select_the_short_run(compose):
    config, sources = compose()
    assert (config.limit, config.max_new_tokens) == (12, 64)
    assert names(config) == list(DEFAULT_METHODS)
    assert (sources["limit"], sources["methods"]) == ("default run", "default")


@pytest.mark.parametrize(
    "flags", [{"seed": 3}, {"threads": 2}, {"allow_noise": True}, {"device": "cpu"}]
)
def test_options_of_the_environment_keep_the_run_short(compose, flags):
    assert compose(**flags)[0].limit == 12


@pytest.mark.parametrize(
    "flags", [{"methods": ["sps"]}, {"tasks": ["mini"]}, {"temperature": 0.8}, {"repeats": 2}]
)
def test_options_that_select_work_make_the_run_complete(compose, flags):
    config, _ = compose(**flags)
    assert (config.limit, config.max_new_tokens) == (None, None)


def test_a_method_parameter_makes_the_run_complete(compose):
    assert compose(sets=["sps.length=7"])[0].limit is None


# Methods


def test_vanilla_is_always_first(compose):
    assert names(compose(methods=["sps", "vanilla"])[0]) == ["vanilla", "sps"]


def test_methods_are_listed_with_commas_or_repeated_options_without_duplicates(compose):
    config, _ = compose(methods=["sps, pld", "sps", "sd", "ar"])
    assert names(config) == ["vanilla", "sps", "pld"]


def test_plug_in_methods_run_if_no_method_is_named(compose):
    assert names(compose(plugins=["mine.py"])[0]) == ["vanilla", "echo"]


def test_plugin_methods_are_not_added_to_those_named(compose):
    assert names(compose(plugins=["mine.py"], methods=["sps"])[0]) == ["vanilla", "sps"]


def test_two_entries_of_one_method_need_labels(compose):
    with pytest.raises(UsageError, match="two methods have the label 'sps'"):
        compose(own="methods: [sps, {name: sps, params: {length: 7}}]")


def test_a_labelled_second_entry_is_kept(compose):
    config, _ = compose(own="methods: [{name: ar, label: again}, {name: sd, label: s7}]")
    assert [row.label for row in config.methods] == ["vanilla", "again", "s7"]


@pytest.mark.parametrize(
    ("methods", "labels"),
    [
        ("[sps]", ["vanilla", "sps", "vanilla-2"]),
        ("[{name: vanilla, label: again}, sps]", ["vanilla", "again", "sps"]),
    ],
)
def test_a_cluster_run_always_has_an_aa_entry(compose, methods, labels):
    config, _ = compose(own=f"methods: {methods}\nexecutor: ray")
    assert [row.label for row in config.methods] == labels


# Precedence and sources


def test_each_source_overrides_the_ones_below(compose):
    layers = {
        "own": "limit: 1\nseed: 1\ntop_k: 1\nrepeats: 1\ntarget: one\n",
        "file": "limit: 2\nseed: 2\ntop_k: 2\nrepeats: 2\n",
        "env": {"SPECBENCH_LIMIT": "3", "SPECBENCH_SEED": "3"},
    }
    config, sources = compose(limit=4, **layers)
    assert (config.limit, config.seed, config.top_k, config.target) == (4, 3, 2, "one")
    assert sources["limit"] == "--limit"
    assert sources["seed"] == "SPECBENCH_SEED"
    assert sources["top_k"] == "other.yaml:3"
    assert sources["target"] == "specbench.yaml:5"
    assert sources["top_p"] == "default"


def test_set_beats_the_file_and_names_both_sources(compose):
    config, sources = compose(
        sets=["sd.length=7"], own="set:\n  sps: {length: 3, other: 1}\nmethods: sps\n"
    )
    assert config.set == {"sps": {"length": 7, "other": 1}}
    assert config.methods[1].params == {"length": 7, "other": 1}
    assert sources["set.sps.length"] == "--set"
    assert sources["set.sps.other"] == "specbench.yaml:2"


def test_params_of_an_entry_override_the_set_block_but_not_the_flag(compose):
    own = "set: {sps: {length: 3, a: 3}}\nmethods: [{name: sps, params: {length: 4, a: 4}}]\n"
    config, _ = compose(sets=["sps.length=7"], own=own)
    assert config.methods[1].params == {"length": 7, "a": 4}


def test_lists_of_a_higher_source_replace_lower_ones(compose):
    config, _ = compose(own="methods: [pld]\n", methods=["sps"])
    assert names(config) == ["vanilla", "sps"]


def test_an_empty_environment_variable_is_ignored(compose):
    assert compose(env={"SPECBENCH_LIMIT": ""})[0].limit == 12


def test_environment_variables_of_other_programs_are_ignored(compose):
    compose(env={"SPECBENCH_DATA": "/data", "SPECBENCH_DEBUG": "1", "PATH": "/bin"})


def test_sources_contain_no_local_path(compose, tmp_path):
    _, sources = compose(own="limit: 1", file="seed: 1")
    assert not any(str(tmp_path) in source for source in sources.values())


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("0.5", 0.5), ("true", True), ("author", "author"), ("null", None), ("[1", "[1"),
     ("a: b", "a: b"), ("1=2", "1=2")],
)  # fmt: skip
def test_values_of_set_are_yaml_scalars(compose, text, value):
    assert compose(sets=[f"hf:assisted.x={text}"])[0].set == {"hf:assisted": {"x": value}}


def test_a_path_with_a_comma_is_one_task(compose, tmp_path):
    path = tmp_path / "a,b.jsonl"
    path.touch()
    assert compose(tasks=[str(path), "mini,gsm8k"])[0].tasks == [str(path), "mini", "gsm8k"]


# Profiles


def test_a_profile_overrides_only_the_defaults(compose):
    config, sources = compose(
        profile="ci", limit=1, own="max_new_tokens: 5\n", env={"SPECBENCH_THREADS": "2"}
    )
    assert (config.limit, config.max_new_tokens, config.threads) == (1, 5, 2)
    assert (sources["limit"], sources["profile"]) == ("--limit", "--profile")
    assert sources["max_new_tokens"] == "specbench.yaml:1"
    assert sources["threads"] == "SPECBENCH_THREADS"
    assert sources["methods"] == sources["tasks"] == "profile ci"
    assert config.profile == "ci"


def test_a_profile_can_come_from_any_source(compose):
    assert compose(own="profile: ci")[0].limit == compose(profile="ci")[0].limit
    assert compose(env={"SPECBENCH_PROFILE": "smoke"})[0].profile == "smoke"


def test_lossless_in_a_profile_means_the_registered_lossless_methods(compose):
    assert names(compose(profile="ci")[0]) == ["vanilla", "sps", "pld", "hf:vanilla"]


def test_methods_of_a_plug_in_are_added_to_those_of_the_profile(compose):
    assert "echo" in names(compose(profile="ci", plugins=["mine.py"])[0])
    assert names(compose(profile="ci", methods=["sps"])[0]) == ["vanilla", "sps"]


def test_a_parameter_of_a_profile_is_overridden_like_any_other(compose, monkeypatch, tmp_path):
    (tmp_path / "ci.yaml").write_text(
        "methods: [lossless]\nwithout: [pld]\nset: {sps: {length: 3, a: 1}}\n"
    )
    monkeypatch.setattr(profile, "FOLDER", tmp_path)
    config, sources = compose(profile="ci", sets=["sps.length=7"])
    assert names(config) == ["vanilla", "sps"]
    assert config.methods[1].params == {"length": 7, "a": 1}
    assert sources["set.sps.length"] == "--set"
    assert sources["set.sps.a"] == "profile ci"


# Errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"limit": -5}, "--limit must be at least 1, got -5"),
        ({"temperature": float("nan")}, "--temperature must be a finite number, got nan"),
        ({"temperature": -1.0}, "--temperature must be at least 0"),
        ({"temperature": 10**400}, "--temperature must be a"),
        ({"top_k": 2**63}, "--top-k must be below 9.22337e+18"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1, got 0"),
        ({"top_p": 2.0}, "--top-p must be at most 1, got 2.0"),
        (
            {"dtype": "int8"},
            "--dtype must be one of 'float32', 'bfloat16' or 'float16', got 'int8'",
        ),
        ({"device": "tpu"}, "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"verify": "coupled"}, "'coupled' needs a temperature above 0"),
        ({"profile": "cii"}, "unknown profile 'cii'; did you mean 'ci'?"),
        (
            {"profile": "nightly"},
            "unknown profile 'nightly'; choose from smoke, ci, laptop, paper",
        ),
        ({"profile": "ci", "limit": 0}, "--limit must be at least 1, got 0"),
        ({"methods": ["nope"]}, "there is no method 'nope'"),
        (
            {"env": {"SPECBENCH_LIMIT": "many"}},
            "SPECBENCH_LIMIT must be a whole number, got 'many'",
        ),
        ({"env": {"SPECBENCH_LIMTI": "3"}}, "SPECBENCH_LIMTI is not known; did you mean 'SPECB"),
        ({"own": "a: 1\nlimit: x\n"}, "specbench.yaml:2: limit must be a whole number, got 'x'"),
        ({"own": "temprature: 1\n"}, "yaml:1: temprature is not known; did you mean 'temperature'"),
        ({"own": "qqq: 1\n"}, "specbench.yaml:1: qqq is not known; known: methods, tasks"),
        ({"own": "limit: true\n"}, "specbench.yaml:1: limit must be a number, not yes or no"),
        ({"own": "tasks: 3\n"}, "specbench.yaml:1: tasks must be text, got 3"),
        ({"own": "raw: maybe\n"}, "specbench.yaml:1: raw must be true or false, got 'maybe'"),
        ({"own": "methods: [3]\n"}, "specbench.yaml:1: methods must contain names, or mappings"),
        ({"own": "methods: [{name: sps, lable: x}]\n"}, "methods.lable is not known; did you mean"),
        ({"own": "methods: [{label: x}]\n"}, "specbench.yaml:1: methods.name is missing"),
        ({"own": "methods: [{name: sps, params: 3}]\n"}, "methods.params must be a mapping"),
        ({"own": "set: {sps: 7}\n"}, "specbench.yaml:1: set must be a mapping from methods"),
        ({"own": "set: {nope: {a: 7}}\n"}, "there is no method 'nope'"),
        ({"sets": ["length=7"]}, "--set must be METHOD.PARAM=VALUE, got 'length=7'"),
        ({"sets": ["sps.length"]}, "--set must be METHOD.PARAM=VALUE"),
        ({"sets": ["sps.length="]}, "--set must be METHOD.PARAM=VALUE"),
        ({"sets": ["nope.length=7"]}, "there is no method 'nope'"),
        ({"sets": ["pld.length=7"], "methods": ["sps"]}, "pld.length names a method that is not"),
        (
            {"sets": ["pld.length=7"], "own": "methods: [{name: {x: 1}}]\n"},
            "not measured (vanilla, {'x': 1})",
        ),
    ],
)
def test_error_names_the_place_the_value_and_what_is_allowed(compose, flags, message):
    with pytest.raises(UsageError) as caught:
        compose(**flags)
    assert message in caught.value.message


def test_all_errors_are_reported_together(compose):
    with pytest.raises(UsageError) as caught:
        compose(limit=-1, own="seed: x\n")
    assert len(caught.value.message.splitlines()) == 2


def test_set_with_a_run_option_suggests_the_option(compose):
    with pytest.raises(UsageError) as caught:
        compose(sets=["max_new_tokens=3"])
    assert caught.value.hint == "--max-new-tokens VALUE"


def test_missing_config_file_is_named():
    with pytest.raises(UsageError, match=r"cannot read gone\.yaml: No such file"):
        load(
            SettingsLayer(),
            Path("gone.yaml"),
            methods=Registry(),
            env={},
            folder=Path("/nonexistent"),
        )
