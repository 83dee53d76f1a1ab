"""Where workers compute, and what is refused before anything runs."""

from __future__ import annotations

import os

import pytest
import torch

from specbench_cli.config.run import RunConfig
from specbench_cli.engine.workers.process import ProcessTransport
from specbench_cli.engine.workers.thread import ThreadTransport
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.measure import placement
from specbench_cli.measure.placement import check_placement
from specbench_cli.plan.plan import make_plan


@pytest.fixture
def cores(monkeypatch):
    """Says which cores this process may use."""

    def allow(*allowed):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)

    allow(0, 1, 2, 3)
    return allow


def plan(*methods, **given):
    rows = ["vanilla", *(methods or ["pearl"])]
    return make_plan(RunConfig.model_validate({"methods": rows, "limit": 1, **given}))


def placed(home="cpu", **given):
    return placement.make_placement(plan(**given), torch.device(home))


def test_the_cores_are_split_in_halves_by_default(cores):
    found = placed()
    assert found.device_names == {"target": "cpu:0-1", "draft": "cpu:2-3"}
    assert isinstance(found.transport, ProcessTransport)
    assert found.separate_draft
    cores(5)
    assert placed().device_names == {"target": "cpu:5", "draft": "cpu:5"}


def test_cores_are_those_asked_for(cores):
    asked = "target=cpu:0-2,draft=cpu:3"
    assert placed(devices=asked).device_names == {"target": "cpu:0-2", "draft": "cpu:3"}
    assert placed(devices="target=cpu,draft=cpu").device_names == placed().device_names


def test_a_core_that_may_not_be_used_is_refused_with_what_may(cores):
    cores(0, 1)
    with pytest.raises(EnvironmentFault, match="may not use cores 4-5, only cores 0-1") as caught:
        placed(devices="target=cpu:0,draft=cpu:4-5")
    assert caught.value.hint == "--devices target=cpu:0,draft=cpu:1"


def test_one_gpu_has_two_streams_and_two_have_a_process_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    one = placed("cuda")
    assert (one.device_names, one.separate_draft) == (
        {"target": "cuda:0", "draft": "cuda:0"},
        False,
    )
    assert isinstance(one.transport, ThreadTransport)
    two = placed("cuda:0", devices="target=cuda:0,draft=cuda:1")
    assert (two.device, two.separate_draft) == (torch.device("cuda:1"), True)
    assert isinstance(two.transport, ProcessTransport)
    with pytest.raises(EnvironmentFault, match="there is no device cuda:5"):
        placed("cuda:0", devices="target=cuda:0,draft=cuda:5")


def test_devices_need_a_method_that_has_workers(cores):
    with pytest.raises(UsageError, match=r"the run has none \(vanilla, sps\)") as caught:
        plan("sps", devices="target=cpu:0,draft=cpu:1")
    assert "--device and --threads" in caught.value.hint


def test_a_gpu_that_is_not_there_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EnvironmentFault, match="there is no device cuda:0"):
        check_placement(plan(devices="target=cuda:0,draft=cuda:1"))


def test_a_worker_has_as_long_to_answer_as_the_environment_says(cores, monkeypatch):
    assert placed().transport._timeout == placement.TIMEOUT_S
    monkeypatch.setenv(placement.TIMEOUT_VARIABLE, "0.7")
    assert placed().transport._timeout == 0.7


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "inf", "nan"])
def test_a_timeout_is_a_number_of_seconds(monkeypatch, seconds):
    monkeypatch.setenv(placement.TIMEOUT_VARIABLE, seconds)
    with pytest.raises(UsageError, match=f"must be a positive number of seconds, got {seconds!r}"):
        placed()
