"""`--devices`: accepted forms and errors."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specbench_cli.config.devices import format_cores, parse_cores, parse_devices
from specbench_cli.config.run import RunConfig


@pytest.mark.parametrize(
    ("value", "target", "draft"),
    [
        ("target=cpu:0,draft=cpu:1", "cpu:0", "cpu:1"),
        ("draft=cpu:4-7, target=cpu:0-3", "cpu:0-3", "cpu:4-7"),
        ("target=cpu:0,2,draft=cpu:1,3-4", "cpu:0,2", "cpu:1,3-4"),
        ("target=cpu,draft=cpu", "cpu", "cpu"),
        ("target=cuda,draft=cuda:1", "cuda:0", "cuda:1"),
        ("target=cuda:0,draft=cuda:0", "cuda:0", "cuda:0"),
        ({"target": "cpu:0", "draft": "cpu:1"}, "cpu:0", "cpu:1"),
    ],
)
def test_devices_are_read_from_text_and_mappings(value, target, draft):
    assert parse_devices(value) == {"target": target, "draft": draft}
    assert parse_devices(parse_devices(value)) == parse_devices(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cpu:0", "must be target=cpu:0-3"),
        (3, "must be target=cpu:0-3"),
        ("target=cpu:0", "has no device for the draft"),
        ("target=cpu:0,draft=cpu:1,head=cpu:2", "has unknown role 'head'"),
        ("target=cpu:0,target=cpu:1", "has target twice"),
        ("target=cpu:0,draft=tpu", "has 'tpu' for the draft"),
        ("target=cpu:0,draft=cpu:", "has 'cpu:' for the draft"),
        ("target=cpu:0,draft=cpu:3-1", "has an invalid range of cores: 3-1"),
        ("target=cpu:0,draft=cpu:1-99999", "has an invalid range of cores"),
        ("target=cuda:0,draft=cpu:0", "both must be CPU cores, or both GPUs"),
        ("target=cpu:0,draft=cpu", "name the cores of both, or of neither"),
        ("target=cpu:0-3,draft=cpu:3-5", "gives core 3 to both target and draft"),
    ],
)
def test_invalid_devices_are_refused_with_a_reason(value, message):
    with pytest.raises(ValueError, match=message):
        parse_devices(value)


def test_cores_are_written_as_typed():
    assert parse_cores("cpu:0-3,6,5") == (0, 1, 2, 3, 5, 6)
    assert format_cores((0, 1, 2, 3, 5, 6, 9)) == "cpu:0-3,5-6,9"
    assert parse_cores("cpu") == parse_cores("cuda:1") == ()


def config(**given):
    return RunConfig.model_validate({"methods": ["vanilla"], **given})


def test_the_main_device_is_the_target_s_and_must_match_the_option_device():
    assert config().main_device == "auto"
    assert config(devices="target=cuda:1,draft=cuda:0").main_device == "cuda:1"
    assert config(devices="target=cpu:0,draft=cpu:1", device="cpu").main_device == "cpu"
    assert config(devices="target=cuda:0,draft=cuda:1", device="cuda").main_device == "cuda:0"
    with pytest.raises(ValidationError, match="the target is loaded only once"):
        config(devices="target=cuda:1,draft=cuda:0", device="cuda")


def test_devices_are_read_back_from_the_config_of_a_run():
    settings = config(devices="target=cpu:0,2,draft=cpu:1,3")
    assert RunConfig.model_validate_json(settings.model_dump_json()) == settings
