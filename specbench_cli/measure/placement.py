"""Placement of the target and its parallel drafter on devices, and the transport between them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specbench_cli.config.devices import ROLES, describe_cores, format_cores, parse_cores
from specbench_cli.engine.workers.core_placement import CorePlacement, split_cores
from specbench_cli.engine.workers.process import ProcessTransport
from specbench_cli.engine.workers.thread import ThreadTransport
from specbench_cli.engine.workers.transport import Transport
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.plan.plan import Plan

TIMEOUT_S = 30.0
"""Default time in seconds after which a silent worker counts as lost."""
TIMEOUT_VARIABLE = "SPECBENCH_WORKER_TIMEOUT"
"""Environment variable that replaces `TIMEOUT_S`."""


@dataclass(frozen=True)
class Placement:
    """Placement of a run.

    device: Device of the drafter.
    transport: Connection of drafter and target.
    device_names: Both devices by role, as --devices writes them.
    separate_draft: True if the drafter loads its own copy of the draft model.
    """

    device: torch.device
    transport: Transport
    device_names: Mapping[str, str]
    separate_draft: bool


def check_placement(plan: Plan) -> None:
    """Raise EnvironmentFault if this machine lacks devices that the configuration requires."""
    home = choose_device(plan.config.main_device)
    check_threads(plan.config.threads)
    if plan.parallel:
        make_placement(plan, home)


def check_threads(threads: int | None) -> None:
    """Raise EnvironmentFault if the run uses more threads than this machine has processors.

    Such threads wait for each other, and OpenMP ends the program if it cannot start them.
    """
    n_cpus = os.cpu_count() or 1
    if threads is not None and threads > n_cpus:
        raise EnvironmentFault(
            f"--threads {threads}: this machine's processors are {n_cpus}",
            hint=f"--threads {n_cpus}",
        )


def make_placement(plan: Plan, home: torch.device) -> Placement:
    """Return the placement of a run: as configured, or by default two halves of the cores, or two
    streams of a GPU.

    Raises:
        EnvironmentFault: cores or GPUs do not exist. UsageError: the timeout is invalid.
    """
    asked = plan.config.devices
    if home.type == "cpu":
        return _place_on_cores(asked)
    name = asked["draft"] if asked else str(home)
    device = choose_device(name)
    target, draft = (f"cuda:{each.index or 0}" for each in (home, device))
    device_names = {"target": target, "draft": draft}
    if target == draft:
        return Placement(
            device, ThreadTransport(timeout=_timeout()), device_names, separate_draft=False
        )
    return Placement(
        device, ProcessTransport(timeout=_timeout()), device_names, separate_draft=True
    )


def choose_device(name: str) -> torch.device:
    """Return a device by name. "auto" is the first GPU, else the CPU. Raises EnvironmentFault."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"there is no device {name}: torch {torch.__version__} sees"
            f" {torch.cuda.device_count()} CUDA devices",
            hint="--device cpu",
        )
    return device


def _place_on_cores(devices: Mapping[str, str] | None) -> Placement:
    cores_by_role = {role: parse_cores(place) for role, place in (devices or {}).items()}
    places = {role: CorePlacement(cores) for role, cores in cores_by_role.items()}
    default = dict(zip(ROLES, split_cores(), strict=True))
    allowed = {core for place in default.values() for core in place.cores}
    for role, place in places.items():
        if missing := sorted({*place.cores} - allowed):
            split = ",".join(f"{each}={format_cores(own.cores)}" for each, own in default.items())
            raise EnvironmentFault(
                f"--devices {role}={format_cores(place.cores)}: this process may not use"
                f" {describe_cores(missing)}, only {describe_cores(sorted(allowed))} of"
                f" {os.cpu_count()}",
                hint=f"--devices {split}" if len(allowed) > 1 else "drop --devices",
            )
    if not any(place.cores for place in places.values()):
        places = default
    transport = ProcessTransport(places["target"], places["draft"], timeout=_timeout())
    device_names = {
        role: format_cores(place.cores) if place.cores else "cpu" for role, place in places.items()
    }
    return Placement(torch.device("cpu"), transport, device_names, separate_draft=True)


def _timeout() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"the variable {TIMEOUT_VARIABLE} must be a number of seconds, got {text!r}",
            f"unset {TIMEOUT_VARIABLE}",
        )
    return seconds
