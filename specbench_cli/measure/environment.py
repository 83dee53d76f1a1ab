"""Software environment of a run, for its manifest: versions, commit, variables and threads.

The description contains no host name, user name or path. Importing this module does not import
torch, because `specbench --version` uses it.
"""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    *("specbench-cli", "torch", "transformers", "tokenizers", "safetensors", "numpy", "numba"),
)

VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "NUMBA_CPU_NAME",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "ATEN_CPU_CAPABILITY",
    "MALLOC_ARENA_MAX",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "PYTHONHASHSEED",
)
"""Environment variables that can change the speed or the outputs of a run."""


def versions() -> dict[str, str | None]:
    """Return the versions of Python, CUDA and the packages in `PACKAGES`.

    The version of a missing package is None.
    """
    import torch

    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git() -> dict[str, Any] | None:
    """Return the git commit of specbench, and whether there are uncommitted changes.

    Return None if specbench is installed as a package, or if git is missing.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain")
    if commit is None or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def variables() -> dict[str, str]:
    """Return the environment variables in `VARIABLES` that are set.

    If a value is a path, return only the last part of the path.
    """
    return {
        name: ":".join(part.rpartition("/")[2] for part in os.environ[name].split(":"))
        for name in VARIABLES
        if name in os.environ
    }


def threads() -> dict[str, int]:
    """Return the number of PyTorch threads inside one operation and between operations."""
    import torch

    return {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()}


def clock() -> dict[str, Any]:
    """Return facts about the clock that times outputs.

    `step_ns` is the smallest difference between two readings of the clock.
    """
    info = time.get_clock_info("perf_counter")
    readings = [time.perf_counter_ns() for _ in range(1000)]
    steps = [b - a for a, b in itertools.pairwise(readings) if b > a]
    return {
        "source": info.implementation,
        "resolution_ns": max(1, round(info.resolution * 1e9)),
        "step_ns": min(steps, default=None),
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
