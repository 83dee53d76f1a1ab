"""Tests of placing workers on cores and GPUs, and of placements that are rejected."""

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
    """Return a function that sets the cores that this process may use."""

    def allow(*allowed):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)

    allow(0, 1, 2, 3)
    return allow


def plan(*methods, **settings):
    rows = ["vanilla", *(methods or ["pearl"])]
    return make_plan(RunConfig.model_validate({"methods": rows, "limit": 1, **settings}))


def make_placement(home="cpu", **settings):
    return placement.make_placement(plan(**settings), torch.device(home))


def test_the_cores_are_split_in_halves_by_default(cores):
    found = make_placement()
    assert found.device_names == {"target": "cpu:0-1", "draft": "cpu:2-3"}
    assert isinstance(found.transport, ProcessTransport)
    assert found.separate_draft
    cores(5)
    assert make_placement().device_names == {"target": "cpu:5", "draft": "cpu:5"}


def test_devices_option_sets_the_cores(cores):
    devices = "target=cpu:0-2,draft=cpu:3"
    assert make_placement(devices=devices).device_names == {"target": "cpu:0-2", "draft": "cpu:3"}
    assert (
        make_placement(devices="target=cpu,draft=cpu").device_names == make_placement().device_names
    )


def test_a_core_that_may_not_be_used_is_rejected_with_the_usable_ones(cores):
    cores(0, 1)
    with pytest.raises(EnvironmentFault, match="may not use cores 4-5, only cores 0-1") as caught:
        make_placement(devices="target=cpu:0,draft=cpu:4-5")
    assert caught.value.hint == "--devices target=cpu:0,draft=cpu:1"


def test_one_gpu_uses_threads_and_two_gpus_use_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    one = make_placement("cuda")
    assert (one.device_names, one.separate_draft) == (
        {"target": "cuda:0", "draft": "cuda:0"},
        False,
    )
    assert isinstance(one.transport, ThreadTransport)
    two = make_placement("cuda:0", devices="target=cuda:0,draft=cuda:1")
    assert (two.device, two.separate_draft) == (torch.device("cuda:1"), True)
    assert isinstance(two.transport, ProcessTransport)
    with pytest.raises(EnvironmentFault, match="there is no device cuda:5"):
        make_placement("cuda:0", devices="target=cuda:0,draft=cuda:5")


def test_devices_option_needs_a_method_with_workers(cores):
    with pytest.raises(UsageError, match=r"the run has none \(vanilla, sps\)") as caught:
        plan("sps", devices="target=cpu:0,draft=cpu:1")
    assert "--device and --threads" in caught.value.hint


def test_a_missing_gpu_is_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EnvironmentFault, match="there is no device cuda:0"):
        check_placement(plan(devices="target=cuda:0,draft=cuda:1"))


def test_worker_timeout_is_read_from_the_environment(cores, monkeypatch):
    assert make_placement().transport._timeout == placement.TIMEOUT_S
    monkeypatch.setenv(placement.TIMEOUT_VARIABLE, "0.7")
    assert make_placement().transport._timeout == 0.7


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "inf", "nan"])
def test_an_invalid_timeout_is_rejected(monkeypatch, seconds):
    monkeypatch.setenv(placement.TIMEOUT_VARIABLE, seconds)
    with pytest.raises(UsageError, match=f"must be a positive number of seconds, got {seconds!r}"):
        make_placement()
