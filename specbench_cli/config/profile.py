"""Profiles: named sets of run settings, one YAML file each.

A profile has the keys of a config file. In its list of methods, the word `lossless` stands for all
lossless methods except those listed under the key `without`. Settings from all other sources
override the settings of a profile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbench_cli.config.problems import did_you_mean, join_names, shorten
from specbench_cli.config.sources import SettingsLayer, SourcedValue, from_file
from specbench_cli.errors import UsageError

FOLDER = Path(__file__).parent / "profiles"

PROFILES = {
    "smoke": "seconds. One short output per task family with vanilla, sps, pld and hf:vanilla",
    "ci": "a minute on two cores. One short output per task family with every lossless method",
    "laptop": "under 20 minutes on two cores. 48 questions of spec_bench on smollm2-135m with"
    " methods that draft from earlier text, and eagle3",
    "paper": "hours. spec_bench with every lossless method, parameters of the papers, 3 repeats",
}
"""Description of each profile, in the order of running time."""


def profiles() -> list[str]:
    """Return the names of all profiles."""
    return [*PROFILES]


LOSSLESS = "lossless"
"""Word in a profile's methods that is replaced by all lossless methods."""


def from_profile(name: str, lossless: list[str]) -> SettingsLayer:
    """Return the settings of a profile.

    Args:
        lossless: Methods that replace the word `lossless` in the profile's list of methods.

    Raises:
        UsageError: The profile does not exist.
    """
    if name not in PROFILES:
        guess = did_you_mean(name, PROFILES) or f"; choose from {join_names(PROFILES)}"
        raise UsageError(
            f"unknown profile {shorten(repr(name))}{guess}",
            "specbench run --help",
        )
    layer, source = from_file(FOLDER / f"{name}.yaml"), f"profile {name}"
    own = {key: value for key, (value, _) in layer.fields.items()}
    without = own.pop("without", [])
    own["methods"] = _expand_lossless(own["methods"], [m for m in lossless if m not in without])
    return SettingsLayer(
        {key: SourcedValue(value, source) for key, value in own.items()},
        {at: SourcedValue(value, source) for at, (value, _) in layer.params.items()},
    )


def _expand_lossless(methods: list[Any], lossless: list[str]) -> list[Any]:
    return [each for entry in methods for each in (lossless if entry == LOSSLESS else [entry])]
