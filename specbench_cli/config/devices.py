"""Devices of the two workers of methods that draft in parallel with the target: `--devices`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_cli.config.problems import shown

ROLES = ("target", "draft")
FORM = "target=cpu:0-3,draft=cpu:4-7, or target=cuda:0,draft=cuda:1"

_PLACE = re.compile(r"cuda(:\d{1,4})?|cpu(:\d+(-\d+)?(,\d+(-\d+)?)*)?")
_MAX_CORE = 4096  # higher numbers are typing errors


def places(value: Any) -> Any:
    """Return the device of each role: "cpu", "cpu:0-3,6" (cores) or "cuda:1".

    Args:
        value: `target=PLACE,draft=PLACE` as text, the same as a mapping, or None.

    Raises:
        ValueError: The value has another type, or its places are invalid or cannot be combined. The
            message names the valid forms.
    """
    if value is None:
        return None
    pairs = _pairs(value) if isinstance(value, str) else value
    if not isinstance(pairs, Mapping):
        raise ValueError(f"must be {FORM}, got {shown(repr(value))}")
    for role in pairs:
        if role not in ROLES:
            raise ValueError(f"names {str(role)!r}; the roles are {' and '.join(ROLES)}: {FORM}")
    for role in ROLES:
        if role not in pairs:
            raise ValueError(f"does not say where the {role} is; must be {FORM}")
    found = {role: str(pairs[role]).replace(" ", "") for role in ROLES}
    for role, place in found.items():
        if not _PLACE.fullmatch(place):
            raise ValueError(
                f"has {shown(repr(place))} for the {role}; must be cpu, cpu:CORES or cuda:N"
            )
    _fit(*found.values())
    return {role: "cuda:0" if place == "cuda" else place for role, place in found.items()}


def cores_of(place: str) -> tuple[int, ...]:
    """Return the sorted cores of `cpu:0-3,6`, or () if the place names none.

    Raises:
        ValueError: A range of cores is invalid.
    """
    named: set[int] = set()
    for part in place.partition(":")[2].split(",") if place.startswith("cpu:") else ():
        first, _, last = part.partition("-")
        short = max(len(first), len(last)) <= len(str(_MAX_CORE))
        low, high = (int(first), int(last or first)) if short else (0, -1)
        if high < low or high > _MAX_CORE:
            raise ValueError(f"has no such range of cores: {shown(part)}")
        named.update(range(low, high + 1))
    return tuple(sorted(named))


def written(cores: Sequence[int]) -> str:
    """Return cores as on the command line: `cpu:0-3,6`."""
    return f"cpu:{_runs(cores)}"


def listed(cores: Sequence[int]) -> str:
    """Return cores as text: `cores 0-3,6`."""
    return f"{'core' if len(cores) == 1 else 'cores'} {_runs(cores)}"


def _runs(cores: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _pairs(text: str) -> dict[str, str]:
    """Return role and place of `ROLE=PLACE,ROLE=PLACE`. Places may contain commas."""
    found: dict[str, str] = {}
    for part in re.split(r",(?=[^,=]*=)", text):
        role, equals, place = part.partition("=")
        if not equals:
            raise ValueError(f"must be {FORM}, got {text!r}")
        if role.strip() in found:
            raise ValueError(f"names {role.strip()} twice; must be {FORM}")
        found[role.strip()] = place
    return found


def _fit(target: str, draft: str) -> None:
    """Raise ValueError unless both workers can compute at the same time on these places."""
    if target[:3] != draft[:3]:
        raise ValueError(f"has {target} and {draft}: both must be CPU cores, or both GPUs")
    cores, others = cores_of(target), cores_of(draft)
    if target.startswith("cpu") and bool(cores) != bool(others):
        raise ValueError(f"has {target} and {draft}: name the cores of both, or of neither")
    if both := sorted({*cores} & {*others}):
        raise ValueError(
            f"gives {listed(both)} to both target and draft: they compute at the same time, so each"
            " needs its own"
        )
