"""Devices of methods that draft in parallel with the target, for the option `--devices`.

Such a method has two workers, one for the target and one for the draft. In this module, a place is
a device with optional CPU cores, e.g. "cpu", "cpu:0-3,6" or "cuda:1".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_cli.config.problems import shorten

ROLES = ("target", "draft")
SYNTAX = "target=cpu:0-3,draft=cpu:4-7, or target=cuda:0,draft=cuda:1"

_PLACE = re.compile(r"cuda(:\d{1,4})?|cpu(:\d+(-\d+)?(,\d+(-\d+)?)*)?")
_MAX_CORE = 4096  # larger numbers are assumed to be typing errors


def parse_devices(value: Any) -> Any:
    """Return a mapping with the device of the target and the device of the draft.

    Args:
        value: a text `target=PLACE,draft=PLACE`, a mapping with these two keys, or None. A place is
            a device with optional CPU cores, e.g. `cpu:0-3`.

    Raises:
        ValueError: The type is wrong, or the places are invalid or cannot be combined. The message
            describes the syntax.
    """
    if value is None:
        return None
    pairs = _split_pairs(value) if isinstance(value, str) else value
    if not isinstance(pairs, Mapping):
        raise ValueError(f"must be {SYNTAX}, got {shorten(repr(value))}")
    for role in pairs:
        if role not in ROLES:
            raise ValueError(f"has unknown role {str(role)!r}; must be {SYNTAX}")
    for role in ROLES:
        if role not in pairs:
            raise ValueError(f"has no device for the {role}; must be {SYNTAX}")
    found = {role: str(pairs[role]).replace(" ", "") for role in ROLES}
    for role, place in found.items():
        if not _PLACE.fullmatch(place):
            raise ValueError(
                f"has {shorten(repr(place))} for the {role}; must be cpu, cpu:CORES or cuda:N"
            )
    _check_pair(*found.values())
    return {role: "cuda:0" if place == "cuda" else place for role, place in found.items()}


def parse_cores(place: str) -> tuple[int, ...]:
    """Return the sorted CPU core numbers in a device like `cpu:0-3,6`. Empty if it has none.

    Raises:
        ValueError: A range of cores is invalid.
    """
    named: set[int] = set()
    for part in place.partition(":")[2].split(",") if place.startswith("cpu:") else ():
        first, _, last = part.partition("-")
        short = max(len(first), len(last)) <= len(str(_MAX_CORE))
        low, high = (int(first), int(last or first)) if short else (0, -1)
        if high < low or high > _MAX_CORE:
            raise ValueError(f"has an invalid range of cores: {shorten(part)}")
        named.update(range(low, high + 1))
    return tuple(sorted(named))


def format_cores(cores: Sequence[int]) -> str:
    """Return CPU cores in the syntax of the option `--devices`, e.g. `cpu:0-3,6`."""
    return f"cpu:{_format_ranges(cores)}"


def describe_cores(cores: Sequence[int]) -> str:
    """Return CPU cores as text for messages, e.g. `cores 0-3,6`."""
    return f"{'core' if len(cores) == 1 else 'cores'} {_format_ranges(cores)}"


def _format_ranges(cores: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _split_pairs(text: str) -> dict[str, str]:
    """Parse a text like `target=cpu:0-3,6,draft=cuda:1` into a mapping from role to device.

    The commas inside a list of CPU cores are kept.
    """
    found: dict[str, str] = {}
    for part in re.split(r",(?=[^,=]*=)", text):
        role, equals, place = part.partition("=")
        if not equals:
            raise ValueError(f"must be {SYNTAX}, got {text!r}")
        if role.strip() in found:
            raise ValueError(f"has {role.strip()} twice; must be {SYNTAX}")
        found[role.strip()] = place
    return found


def _check_pair(target: str, draft: str) -> None:
    """Raise ValueError if target and draft cannot compute at the same time on these two devices."""
    if target[:3] != draft[:3]:
        raise ValueError(f"has {target} and {draft}: both must be CPU cores, or both GPUs")
    cores, others = parse_cores(target), parse_cores(draft)
    if target.startswith("cpu") and bool(cores) != bool(others):
        raise ValueError(f"has {target} and {draft}: name the cores of both, or of neither")
    if both := sorted({*cores} & {*others}):
        raise ValueError(
            f"gives {describe_cores(both)} to both target and draft: they compute at the same time,"
            " so each needs its own"
        )
