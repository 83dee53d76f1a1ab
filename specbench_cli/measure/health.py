"""Checks of the installation: what is missing, what does not work without it, and how to fix it.

Nothing is downloaded, and no value contains a path, a host or a user.
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
"""File that exists if the system has an NVIDIA driver, even if torch was built without CUDA."""
EXTRAS = {
    "test": "the tests, linters and types of this project",
    "docs": "the docs as a site: mkdocs serve",
    "notebook": "running docs/tutorials/tour.ipynb without a browser",
    "grammar": "specbench run --grammar",
    "openvino": "the methods engine:openvino, OpenVINO GenAI beside ours",
    "llamacpp": "the methods engine:llama.cpp, which it compiles for minutes",
    "ray": "specbench run --executor ray",
    "wandb": "specbench export --wandb",
    "mlflow": "specbench export --mlflow",
    "mutation": "mutmut run: are the tests any good",
}
"""Purpose of each extra of the package."""

Status = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Result of one check.

    Attributes:
        status: "limited" if a run can work without it.
        needed: True if the default run needs it.
        prevents, mend: If the status is not "ok": what does not work, and the command that fixes
            it.
    """

    name: str
    status: Status
    found: str
    prevents: str = ""
    mend: str = ""
    needed: bool = False

    @property
    def fatal(self) -> bool:
        """Return True if the default run cannot work."""
        return self.needed and self.status == "missing"


def check_software() -> Iterator[HealthCheck]:
    """Check Python and all packages that this installation requires."""
    version = environment.versions()["python"] or ""
    yield HealthCheck(
        "python",
        "ok" if sys.version_info >= OLDEST_PYTHON else "missing",
        version,
        "everything",
        "install Python 3.11 or newer, and specbench-cli in a venv of it",
        needed=True,
    )
    yield from _packages()


def _packages() -> Iterator[HealthCheck]:
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines = list(environment.PACKAGES)  # a checkout that is not installed
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
            EXTRAS.get(extra, f"what the extra {extra} was for"),  # an extra of an older version
            f"pip install '{DISTRIBUTION}[{extra}]'",
        )


def _extra(marker: object) -> str:
    """Return the extra that a requirement belongs to: `extra == "test"`."""
    name, _, value = str(marker or "").rpartition("extra == ")
    return value.strip("\"' ") if name or value != str(marker or "") else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_hardware() -> Iterator[HealthCheck]:
    """Check processor, memory, accelerators and threads."""
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
        ", ".join(cards) or ("a card that torch cannot use" if unused else "none: the CPU is used"),
        "--device cuda: this torch was built without CUDA, or does not fit the driver",
        "install a torch with CUDA: https://pytorch.org/get-started/locally",
    )
    threads = torch.get_num_threads()
    yield HealthCheck(
        "threads",
        "ok" if threads <= usable else "limited",
        f"{threads} in torch",
        "steady times: more threads than CPUs that this process may use wait for each other",
        f"specbench run --threads {usable}",
    )


def check_compiler() -> HealthCheck:
    """Check for a C++ compiler, which torch.compile needs."""
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
    """Check the matrix kernels on this CPU: docs/explanations/kernels.md."""
    lacking, own = is_numba_missing(), find_numba_kernels(torch.device("cpu"), torch.float32)
    return HealthCheck(
        "kernels",
        "limited" if lacking else "ok",
        "torch's libraries" if own is None else "specbench's own, compiled by Numba",
        "speed: forwards on this processor take up to twice as long; outputs are as right",
        "sudo apt install libgomp1, or sudo dnf install libgomp: Numba's threads need it",
    )


def check_noise() -> HealthCheck:
    """Measure the CPU share of other processes during one second.

    The check never fails: a noisy machine does not make the installation wrong.
    """
    meter = NoiseMeter()
    meter.open()
    share = meter.close()
    if share is None:
        return HealthCheck(
            "quietness",
            "limited",
            "cannot be measured here",
            "noticing that other programs disturb the times",
            "none on this system: close other programs before a run",
        )
    return HealthCheck(
        "quietness",
        "ok" if share <= NOISE_LIMIT else "limited",
        f"other processes use {share:.1%} of the machine; at most {NOISE_LIMIT:.0%} is quiet",
        "speedups: a run voids the times it takes now, and exits with 3",
        "close other programs (top), or keep such times, labelled: specbench run --allow-noise",
    )


def check_writable(folder: Path) -> HealthCheck:
    """Check that runs can be written to a folder, which need not exist yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    fits = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return HealthCheck(
        "results",
        "ok" if fits else "missing",
        f"{folder} can be written" if fits else f"{folder} cannot be written from this folder",
        "every run",
        "specbench run --out DIR, with a folder that you may write to",
        needed=True,
    )
