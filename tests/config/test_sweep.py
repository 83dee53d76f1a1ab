"""Sweeps: accepted ranges and lists, and the methods that a run then has."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench_cli.config.load import load
from specbench_cli.config.sources import from_command_line
from specbench_cli.config.sweep import MAX_ROWS, expand_method, parse_values
from specbench_cli.errors import UsageError


class Registry:
    """Registry that resolves a few names without imports."""

    def resolve(self, name):
        return {"sd": "sps"}.get(name, name)

    def load_plugin(self, path):
        return []


@pytest.fixture
def compose(tmp_path):
    def call(*sweeps, own=None, sets=(), **flags):
        if own is not None:
            (tmp_path / "specbench.yaml").write_text(own)
        command_line = from_command_line(flags, sets, sweeps)
        return load(command_line, None, methods=Registry(), env={}, folder=tmp_path)

    return call


def labels(config):
    return [row.label for row in config.methods]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1:6:1", [1, 2, 3, 4, 5, 6]),
        ("6:1:-2", [6, 4, 2]),
        ("1:6:2", [1, 3, 5]),
        ("3:3:1", [3]),
        ("0.1:0.9:0.2", [0.1, 0.3, 0.5, 0.7, 0.9]),
        ("1:2:0.5", [1.0, 1.5, 2.0]),
        ("1e-3:3e-3:1e-3", [0.001, 0.002, 0.003]),
        ("3,5,heuristic", [3, 5, "heuristic"]),
        ("1:3:1, 8", [1, 2, 3, 8]),
        ("true,false", [True, False]),
        ("0.5", [0.5]),
        ("null,0.3", [None, 0.3]),
        ("3,2,1;4,2", ["3,2,1", "4,2"]),
        ("a:b", ["a:b"]),
    ],
)
def test_ranges_and_lists_include_both_ends_and_all_types(text, found):
    assert parse_values(text) == found
    assert [type(value) for value in parse_values(text)] == [type(value) for value in found]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1:6:0", "has step 0 in 1:6:0"),
        ("6:1:1", "has a step in the wrong direction; use 1:6:1 or 6:1:-1"),
        ("1:6:-1", "has a step in the wrong direction; use 6:1:-1 or 1:6:1"),
        ("1:6", "must be a range a:b:step with both ends included, or values separated"),
        ("1::2", "must be a range a:b:step"),
        ("1:2:3:4", "must be a range a:b:step"),
        ("3,,5", "must be a range a:b:step"),
        (",", "must be a range a:b:step"),
        ("3,5,3", "has 3 twice"),
        ("1:3:1,2", "has 2 twice"),
        ("1:900:1", "has 900 values in 1:900:1, at most 64 are allowed"),
        ("1:9e99:1e-99", "must be a range a:b:step"),
        ("1e400:1e400:1", "of numbers below 1e+15"),
        ("0:1e999999999:1", "must be a range a:b:step"),
    ],
)
def test_an_invalid_sweep_names_the_allowed_forms(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_values(text)


@given(st.integers(-50, 50), st.integers(0, MAX_ROWS - 1), st.integers(1, 9))
def test_a_range_has_every_step_including_both_ends(first, steps, step):
    last = first + steps * step
    assert parse_values(f"{first}:{last}:{step}") == list(range(first, last + 1, step))
    assert parse_values(f"{last}:{first}:{-step}") == list(range(last, first - 1, -step))


def test_swept_entries_are_a_product_with_labels():
    found = expand_method(
        {"name": "pld", "params": {"rule": "author"}}, {"ngram": [1, 2], "length": [5]}
    )
    assert [row["label"] for row in found] == ["pld ngram=1 length=5", "pld ngram=2 length=5"]
    assert found[1]["params"] == {"rule": "author", "ngram": 2, "length": 5}


def test_a_swept_method_has_one_entry_per_value(compose):
    config, sources = compose("sd.length=3,5,heuristic", methods=["sps", "pld"])
    assert labels(config) == [
        "vanilla", "sps length=3", "sps length=5", "sps length=heuristic", "pld"
    ]  # fmt: skip
    assert config.sweep == {"sps": {"length": [3, 5, "heuristic"]}}
    assert sources["sweep.sps.length"] == "--sweep"


def test_swept_methods_run_if_no_method_is_named(compose):
    assert labels(compose("pld.ngram=1,2")[0]) == ["vanilla", "pld ngram=1", "pld ngram=2"]


def test_a_sweep_makes_the_run_complete(compose):
    assert compose("pld.ngram=1,2")[0].limit is None


def test_every_labelled_entry_of_a_method_is_swept(compose):
    own = (
        "methods: [sps, {name: sps, label: wide, params: {max: 9}}]\nsweep: {sps: {length: 2:4:2}}"
    )
    assert labels(compose(own=own)[0])[1:] == [
        "sps length=2", "sps length=4", "wide length=2", "wide length=4"
    ]  # fmt: skip


@pytest.mark.parametrize("written", ["1:3:1", "'1:3:1'", "[1, 2, 3]", '"1,2,3"'])
def test_a_config_file_can_sweep_although_yaml_reads_a_range_as_a_number(compose, written):
    config, sources = compose(own=f"seed: 3\nsweep:\n  sps: {{length: {written}}}\n")
    assert labels(config)[1:] == ["sps length=1", "sps length=2", "sps length=3"]
    assert sources["sweep.sps.length"] == "specbench.yaml:3"


def test_a_sweep_on_the_command_line_overrides_the_file(compose):
    config, _ = compose("sps.length=7,8", own="sweep: {sps: {length: 1:3:1, max: [9]}}")
    assert labels(config)[1:] == ["sps length=7 max=9", "sps length=8 max=9"]


def test_a_sweep_overrides_the_parameters_of_a_file(compose):
    config, _ = compose("sps.length=7", own="set: {sps: {length: 3, max: 4}}")
    assert config.methods[1].params == {"length": 7, "max": 4}


def test_a_tuned_run_uses_the_sweep_as_candidates(compose):
    config, _ = compose("sps.length=1:3:1", tune="4")
    assert labels(config) == ["vanilla", "sps"]
    assert config.sweep == {"sps": {"length": [1, 2, 3]}}
    assert (config.tune, config.tune_by) == (4, "time")


@pytest.mark.parametrize(
    ("sweeps", "flags", "message"),
    [
        (["length=3"], {}, "--sweep must be METHOD.PARAM=VALUES, got 'length=3'"),
        (["sps.length="], {}, "--sweep must be METHOD.PARAM=VALUES"),
        (
            ["sps.length=3:1:1"],
            {},
            "--sweep sps.length has no values: 3:1:1 has a step in the wrong direction",
        ),
        (["sps.length=3", "sps.length=4"], {}, "--sweep sps.length is given twice"),
        (["sps.length=3"], {"methods": ["pld"]}, "--sweep sps.length names a method that is not"),
        (
            ["sps.length=3"],
            {"sets": ["sps.length=4"]},
            "sps.length is both set (--set) and swept (--sweep)",
        ),
        (
            ["sps.length=1:9:1", "sps.max=1:9:1"],
            {},
            "the sweep has 82 combinations (sps 81), at most 64 are allowed",
        ),
        (
            [],
            {"own": "a: 1\nsweep: {sps: 7}"},
            "specbench.yaml:2: sweep must be a mapping from methods",
        ),
        (
            [],
            {"own": "sweep:\n  sps:\n    length: 3:1:1"},
            "specbench.yaml:3: sweep.sps.length has no values",
        ),
        (
            [],
            {"own": "sweep: {sps: {length: {a: 1}}}"},
            "specbench.yaml:1: sweep.sps.length must be a range a:b:step",
        ),
        ([], {"own": "sweep: {sps: {length: []}}"}, "sweep.sps.length must be a range"),
        ([], {"tune": "1"}, "--tune must be at least 2, got '1'"),
        ([], {"tune": "many"}, "--tune must be a whole number, got 'many'"),
        ([], {"tune_by": "forwards"}, "tune_by 'forwards' needs --tune"),
    ],
)
def test_error_names_the_place_the_value_and_what_is_allowed(compose, sweeps, flags, message):
    with pytest.raises(UsageError) as caught:
        compose(*sweeps, **flags)
    assert message in caught.value.message
