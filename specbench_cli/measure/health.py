"""Checks of the installation, for `specbench doctor`.

Each check reports what is missing, what does not work without it, and how to fix it. Nothing is
downloaded, and no result contains a path, a host name or a user name.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from specbench_cli.engine.models.linear import find_numba_kernels, is_numba_missing
from specbench_cli.measure import environment, machine
from specbench_cli.measure.quiet import NOISE_LIMIT, NoiseMeter

DISTRIBUTION = "specbench-cli"
OLDEST_PYTHON = (3, 11)
COMPILERS = ("g++", "c++", "clang++")
NVIDIA = Path("/proc/driver/nvidia/version")
"""File of the NVIDIA driver. It reveals a GPU even if torch was built without CUDA."""
EXTRAS = {
    "test": "the tests, linters and type checks of this project",
    "docs": "the documentation website: mkdocs serve",
    "notebook": "running docs/tutorials/tour.ipynb without a browser",
    "grammar": "specbench run --grammar",
    "openvino": "the methods engine:openvino, which use OpenVINO GenAI",
    "llamacpp": "the methods engine:llama.cpp (compiling llama.cpp takes minutes)",
    "ray": "specbench run --executor ray",
    "wandb": "specbench export --wandb",
    "mlflow": "specbench export --mlflow",
    "mutation": "mutation tests: mutmut run",
}
"""Purpose of each optional dependency group ("extra") of the package."""

Status = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Result of one check.

    Attributes:
        name: Name of what was checked, such as a package.
        status: "ok", "limited" (runs work, with restrictions) or "missing".
        found: Result of the check, for the user.
        prevents: What does not work, if the status is not "ok".
        mend: How to fix the problem, as a command if possible.
        needed: True if the default run does not work without it.
    """

    name: str
    status: Status
    found: str
    prevents: str = ""
    mend: str = ""
    needed: bool = False

    @property
    def fatal(self) -> bool:
        """True if this problem prevents the default run from working."""
        return self.needed and self.status == "missing"


def check_software() -> Iterator[HealthCheck]:
    """Check Python, the required packages and the optional packages (extras)."""
    version = environment.versions()["python"] or ""
    yield HealthCheck(
        "python",
        "ok" if sys.version_info >= OLDEST_PYTHON else "missing",
        version,
        "everything",
        "install Python 3.11 or newer, and install specbench-cli in a new virtual environment",
        needed=True,
    )
    yield from _packages()


def _packages() -> Iterator[HealthCheck]:
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines = list(environment.PACKAGES)  # specbench runs from a checkout
    absent_extras: dict[str, list[str]] = {}
    for requirement in map(Requirement, lines):
        extra = _extra(requirement.marker)
        found = _version(requirement.name)
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        if extra:
            absent_extras.setdefault(extra, [])
            if not fits:
                absent_extras[extra].append(requirement.name)
        elif requirement.name != DISTRIBUTION:
            wanted = f"{requirement.name}{requirement.specifier}"
            yield HealthCheck(
                requirement.name,
                "ok" if fits else "missing",
                found or "not installed",
                f"everything: {wanted} is required",
                f"pip install '{wanted}'",
                needed=True,
            )
    for extra, absent in absent_extras.items():
        yield HealthCheck(
            f"extra {extra}",
            "limited" if absent else "ok",
            f"not installed: {', '.join(absent)}" if absent else "installed",
            EXTRAS.get(extra, f"features of the extra {extra}"),  # an older version is installed
            f"pip install '{DISTRIBUTION}[{extra}]'",
        )


def _extra(marker: object) -> str:
    """Return the extra in a requirement's marker, or "". For `extra == "test"`, return "test"."""
    name, _, value = str(marker or "").rpartition("extra == ")
    return value.strip("\"' ") if name or value != str(marker or "") else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_hardware() -> Iterator[HealthCheck]:
    """Check processor, memory, GPUs and threads."""
    parts = machine.hardware()
    usable = parts["usable"] or parts["threads"]
    yield HealthCheck("cpu", "ok", f"{parts['cpu']}, {usable} usable of {parts['threads']} threads")
    free = psutil.virtual_memory().available / 2**30
    yield HealthCheck("memory", "ok", f"{free:.1f} GiB free of {parts['memory_gib']}")
    cards = [f"{card['name']} {card['memory_gib']} GiB" for card in parts["accelerators"]]
    unused = not cards and NVIDIA.exists()
    yield HealthCheck(
        "gpu",
        "limited" if unused else "ok",
        ", ".join(cards) or ("torch cannot use the GPU" if unused else "none: the CPU is used"),
        "--device cuda: torch was built without CUDA, or for another driver version",
        "install torch with CUDA: https://pytorch.org/get-started/locally",
    )
    threads = torch.get_num_threads()
    yield HealthCheck(
        "threads",
        "ok" if threads <= usable else "limited",
        f"{threads} in torch",
        "stable times: there are more threads than CPUs, so threads wait for each other",
        f"specbench run --threads {usable}",
    )


def check_compiler() -> HealthCheck:
    """Check whether there is a C++ compiler, which torch.compile needs."""
    name = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    found = name if name and shutil.which(name) else None
    return HealthCheck(
        "C++ compiler",
        "ok" if found else "limited",
        Path(found).name if found else "none",
        "torch.compile: `specbench train` is slower; runs do not need it",
        "sudo apt install g++, or sudo dnf install gcc-c++, or xcode-select --install",
    )


def check_kernels() -> HealthCheck:
    """Check which matrix multiplication kernels this CPU uses.

    Explained in docs/explanations/kernels.md.
    """
    no_numba, own = is_numba_missing(), find_numba_kernels(torch.device("cpu"), torch.float32)
    return HealthCheck(
        "kernels",
        "limited" if no_numba else "ok",
        "torch's libraries" if own is None else "specbench's own, compiled by Numba",
        "full speed: forwards on this CPU take up to twice as long; outputs are correct",
        "sudo apt install libgomp1, or sudo dnf install libgomp (Numba needs it for threads)",
    )


def check_noise() -> HealthCheck:
    """Measure for one second whether other processes use the CPU.

    The status is never "missing", because a busy machine is not an error of the installation.
    """
    meter = NoiseMeter()
    meter.open()
    share = meter.close()
    if share is None:
        return HealthCheck(
            "quietness",
            "limited",
            "cannot be measured here",
            "detection of other programs that disturb the times",
            "not possible on this system: close other programs before a run",
        )
    return HealthCheck(
        "quietness",
        "ok" if share <= NOISE_LIMIT else "limited",
        f"other processes use {share:.1%} of the CPUs; the limit is {NOISE_LIMIT:.0%}",
        "speedups: a run would discard its times, and exit with code 3",
        "close other programs (top), or keep noisy times: specbench run --allow-noise",
    )


def check_writable(folder: Path) -> HealthCheck:
    """Check whether runs can be written to a folder. The folder may not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    can_write = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return HealthCheck(
        "results",
        "ok" if can_write else "missing",
        f"{folder} can be written" if can_write else f"{folder} cannot be written in this folder",
        "every run",
        "specbench run --out DIR, where DIR is a folder with write permission",
        needed=True,
    )
