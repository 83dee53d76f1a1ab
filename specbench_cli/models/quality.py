"""Measured quality of the shipped models; `python -m recipes.embedded quality` writes the file."""

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "embedded" / "quality.json"
FIGURES = ("outputs", "accuracy", "mat", "ended", "repetitive")


@cache
def measured() -> dict[str, Any]:
    """The whole file; empty where this installation has none."""
    if not FILE.is_file():
        return {}
    facts: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return facts


def quality_tables(label: str) -> dict[str, list[dict[str, Any]]]:
    """The tables about a shipped model, by title: a row a family. Empty for any other model."""
    models: dict[str, dict[str, dict[str, Any]]] = measured().get("models", {})
    return {
        f"{name} on {measured()['task']}": [
            {"family": family, **{key: figures[key] for key in FIGURES}}
            for family, figures in families.items()
        ]
        for name, families in models.items()
        if name.split(" ")[0] == label or (label == "embedded-7m" and name == "embedded-1m")
    }
