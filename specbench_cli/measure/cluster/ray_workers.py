"""Workers on a Ray cluster. Each device of the cluster runs one worker, which is a Ray actor.

The user creates the cluster with `ray start`. The module `scheduling` assigns questions to
workers.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from specbench_cli.errors import EnvironmentFault, UsageError, WorkerLost
from specbench_cli.measure.cluster.scheduling import Scheduler
from specbench_cli.measure.cluster.worker import ClusterWorker
from specbench_cli.measure.view import RunView
from specbench_cli.plan.plan import Plan
from specbench_cli.store.run_dir import RunDir

START_TIMEOUT_S = 300.0
"""Maximum time in seconds for the start of a worker. Ray waits while its device is in use."""

CONNECT_TIMEOUT_S = 5.0
"""Maximum time in seconds to connect to the head node of a cluster."""

_START_HINT = (
    "ray start --head (several machines, Slurm and Kubernetes: see docs/how-to/workers.md)"
)


@dataclass(frozen=True)
class WorkerDevice:
    """Device of a worker: a GPU, or all CPUs of a node.

    node, address: Ray's id of the node, and the node's IP address.
    cpus: CPUs that Ray reserves for the worker.
    gpus: 1 for a GPU, else 0.
    """

    node: str
    address: str
    cpus: float
    gpus: int

    def __str__(self) -> str:
        return f"{self.address}, {'a GPU' if self.gpus else 'its CPUs'}"


def list_devices(nodes: Sequence[Mapping[str, Any]], device: str) -> list[WorkerDevice]:
    """List the devices of a Ray cluster that can measure a run. Each device gets one worker.

    Each GPU is a device. If the run uses CPUs, all CPUs of a node together are one device.

    Args:
        nodes: Result of `ray.nodes()`.
        device: Device setting of the run: "auto", "cpu" or "cuda".

    Raises:
        EnvironmentFault: the cluster does not have the requested kind of device.
    """
    alive = [node for node in nodes if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    resources = [
        (node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), int(gpus))
        for node in alive
        for gpus in [node["Resources"].get("GPU", 0)]
    ]
    gpu_devices = [
        WorkerDevice(node, address, cpus // gpus, 1)
        for node, address, cpus, gpus in resources
        for _ in range(gpus)
    ]
    cpu_devices = [
        WorkerDevice(node, address, cpus, 0) for node, address, cpus, _ in resources if cpus
    ]
    found = (
        cpu_devices
        if device == "cpu"
        else gpu_devices
        if device == "cuda"
        else gpu_devices or cpu_devices
    )
    if not found:
        listed = "; ".join(f"{a}: {c:g} CPUs, {g} GPUs" for _, a, c, g in resources) or "no node"
        raise EnvironmentFault(
            f"--device {device}: the Ray cluster has no such device ({listed})",
            hint="choose --device auto, or add a node with a GPU: ray start --address HOST:PORT"
            " --num-gpus=1",
        )
    return found


class RayWorkers:
    """Implementation of the protocol `scheduling.Workers` with Ray actors. `connect` creates it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._actors: dict[str, Any] = {}
        self._pending: dict[Future[Any], str] = {}
        self._started: set[str] = set()

    def start(self, names: Iterable[str], plan: Plan, folder: Path) -> Mapping[str, str]:
        """Start one worker for each device of the cluster.

        Return a device description for each worker.
        """
        found = dict(zip(names, list_devices(self._ray.nodes(), plan.config.device), strict=False))
        pinned = importlib.import_module("ray.util.scheduling_strategies")
        actor = self._ray.remote(ClusterWorker)
        order = plan.config.model_dump_json()
        for name, place in found.items():
            self._actors[name] = actor.options(
                num_cpus=place.cpus,
                num_gpus=place.gpus,
                scheduling_strategy=pinned.NodeAffinitySchedulingStrategy(place.node, soft=False),
            ).remote(order, str(folder))
        return {name: str(place) for name, place in found.items()}

    def send(self, name: str, what: str, *args: Any) -> None:
        """Send an order to a worker.

        Args:
            name: Name of the worker.
            what: The order, which is the name of a method of `ClusterWorker`.
            args: Arguments of this method.
        """
        # Use a future instead of `ray.wait`, because `ray.wait` turns every signal into a
        # KeyboardInterrupt.
        self._pending[getattr(self._actors[name], what).remote(*args).future()] = name

    def receive(self) -> tuple[str, Any]:
        """Wait until any worker has executed its order.

        Return the worker's name, and its result or exception. If the first reply of a worker takes
        longer than `START_TIMEOUT_S`, the worker counts as lost.
        """
        new = not self._started.issuperset(self._pending.values())
        done, _ = wait(self._pending, START_TIMEOUT_S if new else None, FIRST_COMPLETED)
        if not done:
            late = next(own for own, name in self._pending.items() if name not in self._started)
            why = (
                f"no reply within {START_TIMEOUT_S:g} s: other jobs use its device, or Python does"
                " not start"
            )
            return self._pending.pop(late), WorkerLost(why, "ray status")
        finished = done.pop()
        name = self._pending.pop(finished)
        self._started.add(name)
        fault = finished.exception()
        if isinstance(fault, self._ray.exceptions.RayTaskError):
            return name, fault.cause
        if isinstance(fault, self._ray.exceptions.RayError):
            why = _missing_module(str(fault)) or f"its process ended ({type(fault).__name__})"
            return name, WorkerLost(why)
        return name, fault or finished.result()

    def end(self, name: str) -> None:
        """End a worker."""
        self._ray.kill(self._actors.pop(name))


@contextmanager
def connect() -> Iterator[RayWorkers]:
    """Connect to a Ray cluster and yield its workers. End the workers after the `with` block.

    The environment variable RAY_ADDRESS names the cluster. If it is not set, the cluster of this
    machine is used.

    Raises:
        EnvironmentFault: Ray is not installed, or the cluster cannot be reached.
    """
    ray = _import_ray()
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    with redirect_stdout(cast("TextIO", _FilteredStdout(sys.stdout))):
        starts_ray = not ray.is_initialized()  # False if the user's Python program started Ray
        try:
            if starts_ray:
                _check_reachable(os.environ.get("RAY_ADDRESS", ""))
                ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as fault:
            where = os.environ.get("RAY_ADDRESS", "this machine")
            why = str(fault).partition("\n")[0].partition(". ")[0]
            raise EnvironmentFault(
                f"no Ray cluster can be reached at {where}: {why}", hint=_START_HINT
            ) from fault
        finally:
            if in_main_thread:
                signal.signal(signal.SIGTERM, before)
        workers = RayWorkers(ray)
        try:
            yield workers
        finally:
            for name in [*workers._actors]:
                workers.end(name)
            if starts_ray:
                with redirect_stdout(io.StringIO()):  # drop messages that Ray prints at the end
                    ray.shutdown()


def measure_on_cluster(
    plan: Plan,
    run_dir: RunDir,
    view: RunView,
    in_turn: Path | None,
    check: Callable[[Mapping[str, Mapping[str, Any]]], object],
    *,
    force: bool,
) -> None:
    """Measure all repeats of a run on a Ray cluster. Each repeat starts new workers.

    Args:
        plan, run_dir, view, check, force: See `Scheduler`.
        in_turn: Value of the option --in-turn, which clusters do not support. It must be None.

    Raises:
        UsageError: `in_turn` is not None.
    """
    if in_turn is not None:
        raise UsageError(
            f"--in-turn {in_turn}: only runs on this machine can take turns, and --executor"
            f" {plan.config.executor} measures on other machines",
            hint="leave out one of the two options",
        )
    for number in range(1, plan.config.repeats + 1):
        with connect() as workers:
            scheduler = Scheduler(plan, run_dir, view, workers, number, check=check, force=force)
            scheduler.run()
        if scheduler.is_over:
            break


def _check_reachable(address: str) -> None:
    """Raise OSError if no server listens at HOST:PORT.

    Without this check, Ray would try to connect for minutes.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()


class _FilteredStdout:
    """Standard output without the messages that Ray prints, so that it contains only results."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        """Write a text to standard output. A text that a thread of Ray writes is discarded."""
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._out.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def _import_ray() -> Any:
    """Import and return the package `ray`. Raise EnvironmentFault if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as fault:
        raise EnvironmentFault(
            "--executor ray: the Python package 'ray' is not installed",
            hint="pip install 'specbench-cli[ray]'",
        ) from fault


def _missing_module(text: str) -> str | None:
    """Return the line of Ray's error message that names a missing Python module.

    None if there is none.
    """
    lines = map(str.strip, text.splitlines())
    return next((x for x in lines if x.startswith(("ModuleNotFoundError", "ImportError"))), None)
