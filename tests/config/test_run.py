"""RunConfig: allowed values, derived values and storage in the manifest."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specbench_cli.config.run import MAX_TEMPERATURE, MIN_TEMPERATURE, MIN_TOP_P, RunConfig
from specbench_cli.engine.verify.sampling import Sampling, warp


def config(**values):
    return RunConfig.model_validate({"methods": ["vanilla"], **values})


def test_defaults_are_the_documented_ones():
    run = config()
    assert (run.target, run.draft, run.tasks) == ("embedded", None, ["mini"])
    assert (run.seed, run.repeats, run.temperature, run.top_p, run.top_k) == (0, 1, 0.0, 1.0, 0)
    assert (run.limit, run.max_new_tokens, run.device, run.dtype) == (None, None, "auto", "float32")


@pytest.mark.parametrize(
    ("temperature", "verify", "derived"),
    [
        (0, None, "greedy"),
        ("0.00", None, "greedy"),
        (0.8, None, "rejection"),
        ("0.8", None, "rejection"),
        (0.8, "coupled", "coupled"),
        (1, "rejection", "rejection"),
        (0, "greedy", "greedy"),
    ],
)
def test_verification_follows_the_temperature(temperature, verify, derived):
    assert config(temperature=temperature, verify=verify).verify == derived


@pytest.mark.parametrize("verify", ["rejection", "block", "coupled"])
def test_sampling_rules_are_refused_at_temperature_0(verify):
    with pytest.raises(ValidationError, match="needs a temperature above 0"):
        config(verify=verify)


def test_greedy_is_refused_above_temperature_zero():
    with pytest.raises(ValidationError, match="choose rejection, block, coupled or replay"):
        config(temperature=1.0, verify="greedy")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -0.1},
        {"temperature": True},
        {"limit": 0},
        {"limit": -5},
        {"limit": 2.5},
        {"limit": True},
        {"max_new_tokens": 0},
        {"repeats": 0},
        {"threads": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"dtype": "int8"},
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"target": ""},
        {"tasks": []},
        {"methods": []},
        {"methods": [{"name": "sps", "label": ""}]},
        {"methods": [{"name": "sps", "lable": "x"}]},
        {"unknown": 1},
    ],
)
def test_impossible_value_is_refused(wrong):
    with pytest.raises(ValidationError):
        config(**wrong)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "greedy"), (0.8, "rejection")])
def test_replay_is_allowed_at_any_temperature(temperature, rule):
    found = config(temperature=temperature, verify="replay")
    assert (found.verify, found.rule) == ("replay", rule)


@pytest.mark.parametrize(("short", "full"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_short_dtype_names_are_accepted(short, full):
    assert config(dtype=short).dtype == full


def test_an_entry_is_named_by_its_method_unless_labelled():
    run = config(methods=["sps", {"name": "sps", "label": "sps-7", "params": {"length": 7}}])
    assert [row.label for row in run.methods] == ["sps", "sps-7"]


def test_two_entries_with_one_label_are_refused():
    with pytest.raises(ValidationError, match="two methods have the label 'sps'"):
        config(methods=["sps", {"name": "sps", "params": {"length": 7}}])


def test_a_config_is_immutable():
    with pytest.raises(ValidationError):
        config().limit = 3


@given(
    st.builds(
        dict,
        limit=st.none() | st.integers(1, 10_000),
        seed=st.integers(0, 2**63 - 1),
        temperature=st.just(0.0) | st.floats(0.001, 10),
        top_p=st.floats(MIN_TOP_P, 1),
        max_new_tokens=st.none() | st.integers(1, 4096),
        set=st.just({"sps": {"length": 7}}),
    )
)
def test_a_config_is_read_back_from_the_manifest(values):
    run = config(**values)
    stored = json.loads(json.dumps(run.model_dump(mode="json")))
    assert RunConfig.model_validate(stored) == run


def test_a_temperature_without_precision_in_float32_is_refused():
    with pytest.raises(ValidationError, match=r"must be 0 \(greedy\) or at least 0\.001"):
        config(temperature=1e-40, verify="coupled")


@pytest.mark.parametrize("value", [1e-40, "1e-40", 5e-324, 1e39, "1e300"])
def test_a_temperature_that_overflows_float32_is_refused(value):
    with pytest.raises(ValueError, match=r"must be (0 \(greedy\) or at least|at most) "):
        RunConfig(methods=["vanilla"], temperature=value)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1.0, MAX_TEMPERATURE])
@pytest.mark.parametrize("top_p", [MIN_TOP_P, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_temperature_that_is_allowed_gives_probabilities(temperature, top_p, dtype):
    rows = torch.tensor([[-1e4, 3.0, -torch.inf, 6e4], [0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    p = warp(rows, Sampling("rejection", temperature, top_p=top_p))
    assert torch.allclose(p.sum(-1), torch.ones(2)) and p[0, 2] == 0 and p[0].argmax() == 3


def test_a_top_p_that_is_0_in_float32_is_refused():
    with pytest.raises(ValueError, match=r"greater than or equal to 0\.000000001"):
        RunConfig(methods=["vanilla"], temperature=1, top_p=5e-324)
