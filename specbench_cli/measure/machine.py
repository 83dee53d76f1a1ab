"""Hardware and operating system of this machine, for manifests and cost files.

The values contain no host name, user name or path.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from specbench_cli.measure import environment

CPUINFO = Path("/proc/cpuinfo")
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def fingerprint() -> dict[str, Any]:
    """Return all facts about this machine and installation that may affect results.

    Returns:
        A dictionary. Its key `id` has 12 hexadecimal digits that depend on the hardware only. The
        other keys are `hardware`, `system`, `versions`, `git`, `variables`, `threads` and
        `clock`.
    """
    parts = hardware()
    return {
        "id": _id(parts),
        "hardware": parts,
        "system": system(),
        "versions": environment.versions(),
        "git": environment.git(),
        "variables": environment.variables(),
        "threads": environment.threads(),
        "clock": environment.clock(),
    }


def machine_id() -> str:
    """Return an id of 12 hexadecimal digits that depends on the hardware only."""
    return _id(hardware())


def _id(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def hardware() -> dict[str, Any]:
    """Return the processors, memory and GPUs that this process may use.

    Memory is rounded to GiB, because its exact size changes each time the machine starts. `quota`
    is the CPU limit of a container, as the Linux kernel reports it (cgroup `cpu.max`).
    """
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable": _usable_cpus(),
        "quota": _read(CGROUP_CPU),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "accelerators": _accelerators(),
    }


def system() -> dict[str, Any]:
    """Return the operating system and its CPU frequency governor."""
    return {
        "os": platform.system(),
        "release": platform.release(),
        "governor": _read(GOVERNOR),
    }


def _usable_cpus() -> int | None:
    """Return the number of CPUs that this process may run on. Return None if it is unknown."""
    affinity = getattr(psutil.Process(), "cpu_affinity", None)
    return len(affinity()) if affinity else None


def _cpu_model() -> str:
    if CPUINFO.exists():
        for line in CPUINFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or "unknown"


def _accelerators() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {
            "name": card.name,
            "memory_gib": round(card.total_memory / 2**30),
            "capability": f"{card.major}.{card.minor}",
            "processors": card.multi_processor_count,
        }
        for card in cards
    ]


def _read(path: Path) -> str | None:
    """Return the text of a kernel file.

    Return None if the file does not exist or cannot be read.
    """
    try:
        return path.read_text().strip()
    except OSError:
        return None
