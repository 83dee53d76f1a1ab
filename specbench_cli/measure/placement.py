"""Where a run's target and the worker that drafts beside it compute, and what joins them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from specbench_cli.config.devices import ROLES, cores_of, listed, written
from specbench_cli.engine.workers.core_placement import CorePlacement, split_cores
from specbench_cli.engine.workers.process import ProcessTransport
from specbench_cli.engine.workers.thread import ThreadTransport
from specbench_cli.engine.workers.transport import Transport
from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.plan.plan import Plan

TIMEOUT_S = 30.0
TIMEOUT = "SPECBENCH_WORKER_TIMEOUT"
"""Seconds after which a worker that does not answer counts as lost, and the variable that says
otherwise."""


@dataclass(frozen=True)
class Placement:
    """A run's places.

    device: of the drafter. transport: what joins it to the target.
    words: both places by role, as --devices has them.
    apart: whether the drafter loads a draft of its own.
    """

    device: torch.device
    transport: Transport
    words: Mapping[str, str]
    apart: bool


def check_places(plan: Plan) -> None:
    """Raise EnvironmentFault if this machine has not what the configuration asks for."""
    home = choose_device(plan.config.home)
    check_threads(plan.config.threads)
    if plan.parallel:
        placement(plan, home)


def check_threads(asked: int | None) -> None:
    """Raise EnvironmentFault if more threads are asked for than this machine has processors: those
    wait for each other, and OpenMP ends the program where it cannot have them."""
    here = os.cpu_count() or 1
    if asked is not None and asked > here:
        raise EnvironmentFault(
            f"--threads {asked}: this machine's processors are {here}", hint=f"--threads {here}"
        )


def placement(plan: Plan, home: torch.device) -> Placement:
    """Where the workers of a run's methods compute, by the configuration or by default: on a CPU
    the cores in halves, on a GPU two streams.

    Raises:
        EnvironmentFault: cores or GPUs that are not here. UsageError: no timeout.
    """
    asked = plan.config.devices
    if home.type == "cpu":
        return _on_cores(asked)
    name = asked["draft"] if asked else str(home)
    device = choose_device(name)
    target, draft = (f"cuda:{each.index or 0}" for each in (home, device))
    words = {"target": target, "draft": draft}
    if target == draft:
        return Placement(device, ThreadTransport(timeout=_timeout()), words, apart=False)
    return Placement(device, ProcessTransport(timeout=_timeout()), words, apart=True)


def choose_device(name: str) -> torch.device:
    """The device asked for; "auto" is the first GPU, else the CPU. Raises EnvironmentFault."""
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


def _on_cores(asked: Mapping[str, str] | None) -> Placement:
    named = {role: cores_of(place) for role, place in (asked or {}).items()}
    places = {role: CorePlacement(cores) for role, cores in named.items()}
    default = dict(zip(ROLES, split_cores(), strict=True))
    allowed = {core for place in default.values() for core in place.cores}
    for role, place in places.items():
        if missing := sorted({*place.cores} - allowed):
            split = ",".join(f"{each}={written(own.cores)}" for each, own in default.items())
            raise EnvironmentFault(
                f"--devices {role}={written(place.cores)}: this process may not use"
                f" {listed(missing)}, only {listed(sorted(allowed))} of {os.cpu_count()}",
                hint=f"--devices {split}" if len(allowed) > 1 else "drop --devices",
            )
    if not any(place.cores for place in places.values()):
        places = default
    transport = ProcessTransport(places["target"], places["draft"], timeout=_timeout())
    words = {role: written(place.cores) if place.cores else "cpu" for role, place in places.items()}
    return Placement(torch.device("cpu"), transport, words, apart=True)


def _timeout() -> float:
    text = os.environ.get(TIMEOUT)
    if not text:
        return TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"the variable {TIMEOUT} must be a number of seconds, got {text!r}", f"unset {TIMEOUT}"
        )
    return seconds
