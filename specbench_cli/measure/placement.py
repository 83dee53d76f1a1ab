"""Placement of the target and a parallel drafter on devices or CPU cores.

Parallel methods run the draft model in a worker, the drafter, while the target verifies. A
transport connects target and drafter. On one GPU, they are two threads. Otherwise they are two
processes.
"""

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
"""Default time in seconds after which a worker that does not answer counts as lost."""
TIMEOUT_VARIABLE = "SPECBENCH_WORKER_TIMEOUT"
"""Environment variable that overrides `TIMEOUT_S`."""


@dataclass(frozen=True)
class Placement:
    """Devices of target and drafter in a run with parallel methods.

    device: Device of the drafter.
    transport: Connection between target and drafter.
    device_names: Devices of "target" and "draft", as text for the option --devices.
    separate_draft: True if the drafter loads a second copy of the draft model.
    """

    device: torch.device
    transport: Transport
    device_names: Mapping[str, str]
    separate_draft: bool


def check_placement(plan: Plan) -> None:
    """Raise EnvironmentFault if this machine lacks devices or CPUs that the run needs."""
    home = choose_device(plan.config.main_device)
    check_threads(plan.config.threads)
    if plan.parallel:
        make_placement(plan, home)


def check_threads(threads: int | None) -> None:
    """Raise EnvironmentFault if the number of threads is larger than the number of CPUs.

    Too many threads would wait for each other. OpenMP even ends the program if it cannot start
    them.

    Args:
        threads: Number of torch threads. None uses the default of torch.
    """
    n_cpus = os.cpu_count() or 1
    if threads is not None and threads > n_cpus:
        raise EnvironmentFault(
            f"--threads {threads}: this machine has {n_cpus} CPUs",
            hint=f"--threads {n_cpus}",
        )


def make_placement(plan: Plan, home: torch.device) -> Placement:
    """Return the placement of target and drafter.

    The option --devices determines the placement. By default, target and drafter each get half of
    the CPU cores. If the target is on a GPU, they share this GPU with two CUDA streams.

    Args:
        plan: Plan of the run.
        home: Device of the target.

    Raises:
        EnvironmentFault: a CPU core or GPU does not exist.
        UsageError: the environment variable that sets the timeout of workers is not a positive
            number.
    """
    devices = plan.config.devices
    if home.type == "cpu":
        return _place_on_cores(devices)
    name = devices["draft"] if devices else str(home)
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
    """Return the torch device with a name. The name "auto" means the first GPU, or else the CPU.

    Raises:
        EnvironmentFault: this machine does not have the named GPU.
    """
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
                hint=f"--devices {split}" if len(allowed) > 1 else "leave out --devices",
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
            f"the environment variable {TIMEOUT_VARIABLE} must be a positive number of seconds,"
            f" got {text!r}",
            f"unset {TIMEOUT_VARIABLE}",
        )
    return seconds
