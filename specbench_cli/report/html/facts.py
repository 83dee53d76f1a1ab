"""Facts from a run's manifest for the HTML page: settings, models, machine and versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from specbench_cli.store.manifest import truncate_texts
from specbench_cli.summary import formats

_PATH = re.compile(r"(?<![\w:/.])(?:[A-Za-z]:\\|/|~/)[^\s,;:'\"\])]*[/\\]([^\s,;'\"\])/\\]+)")
"""An absolute path. The group is its last part."""
_SECTIONS = ("models", "heads", "machine", "versions", "git", "environment", "tolerance")

FactLine = tuple[str, str, str]
"""A fact: name, value, and the source of the value, such as "default" or a file. May be ""."""


def manifest_sections(manifest: Mapping[str, Any]) -> list[tuple[str, list[FactLine]]]:
    """Return (heading, facts) of each section. Absolute paths are cut to their last part, to hide
    user names.
    """
    manifest = truncate_texts(dict(manifest))
    run = [(key, manifest.get(key)) for key in ("created_utc", "finished_utc", "status", "noisy")]
    sources = manifest.get("config_sources", {})
    settings = dict(manifest.get("config", {}).get("effective", {}))
    settings["methods"] = [choice.get("label") for choice in settings.get("methods", [])]
    found = {
        "run": [(key, _format_value(value), "") for key, value in run],
        "settings": [
            (key, _format_value(value), str(sources.get(key, "default")))
            for key, value in settings.items()
        ],
    }
    for section in _SECTIONS:
        found[section] = [(name, text, "") for name, text in _flatten(manifest.get(section) or {})]
    found["tasks"] = [
        (task["name"], _format_value({k: v for k, v in task.items() if k != "name"}), "")
        for task in manifest.get("tasks", [])
    ]
    return [(heading, lines) for heading, lines in found.items() if lines]


def hide_paths(text: str) -> str:
    """Return a text with absolute paths cut to their last part."""
    return _PATH.sub(r"\1", text)


def _flatten(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the (name, value) of nested facts. A name is a path with dots, such as "cpu.cores"."""
    for key, inner in value.items():
        name = f"{before}{key}"
        if isinstance(inner, Mapping) and inner:
            yield from _flatten(inner, f"{name}.")
        else:
            yield name, _format_value(inner)


def _format_value(value: object) -> str:
    if value is None or value == "" or value in ([], {}):
        return formats.NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {_format_value(inner)}" for key, inner in value.items())
    elif isinstance(value, list | tuple):
        value = ", ".join(map(_format_value, value))
    return hide_paths(str(value))
