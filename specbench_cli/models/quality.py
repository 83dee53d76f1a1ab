"""Measured quality of the shipped models. `python -m recipes.embedded quality` writes the file."""

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "embedded" / "quality.json"
FIGURES = ("outputs", "accuracy", "mat", "ended", "repetitive")


@cache
def load_quality() -> dict[str, Any]:
    """Return the content of the quality file, or an empty object if the file is not installed."""
    if not FILE.is_file():
        return {}
    facts: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return facts


def quality_tables(label: str) -> dict[str, list[dict[str, Any]]]:
    """Return the quality tables of a shipped model. The key is the title of a table.

    Each table has one row per task family. Other models have no tables.
    """
    models: dict[str, dict[str, dict[str, Any]]] = load_quality().get("models", {})
    return {
        f"{name} on {load_quality()['task']}": [
            {"family": family, **{key: figures[key] for key in FIGURES}}
            for family, figures in families.items()
        ]
        for name, families in models.items()
        if name.split(" ")[0] == label or (label == "embedded-7m" and name == "embedded-1m")
    }
