"""`specbench train quality`: what the embedded models can do, measured by the harness itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specbench_cli import files, output
from specbench_cli.config import options

if TYPE_CHECKING:
    from specbench_cli.config.train import QualityOptions

TASK = "mini"
K = 5
MAX_NEW_TOKENS = 128
FILE = "quality.json"
BASELINE = "vanilla"


class Measurement(NamedTuple):
    """A run to make: its name in the file, the model that answers, and how; vanilla runs too."""

    name: str
    target: str
    method: str = BASELINE
    temperature: float = 0.0


MEASUREMENTS = (
    Measurement("embedded-7m", "embedded-7m", "sps"),
    Measurement("embedded-7m at temperature 1", "embedded-7m", temperature=1.0),
    Measurement("embedded-1m", "embedded-1m"),
    Measurement("embedded-exit", "embedded-exit"),
    Measurement("embedded-xv", "embedded-xv"),
)


@options.parsed_command("specbench_cli.config.train:QualityOptions")
def quality(asked: QualityOptions) -> None:
    """Measure the shipped models on the task mini: accuracy, MAT, endings, repetition.

    Every figure comes from records of ordinary runs, which are kept in OUT; times are not used,
    so a busy machine does no harm. A measurement whose run is complete is not repeated.
    """
    out, limit, seed = asked.out, asked.limit, asked.seed
    files.check_listed(out / FILE)
    facts: dict[str, Any] = {"task": TASK, "limit": limit, "seed": seed, "sps_length": K}
    facts["models"] = {
        measurement.name: _measured(measurement, out, limit, seed) for measurement in MEASUREMENTS
    }
    path = out / FILE
    files.write_listed(path, json.dumps(facts, indent=1) + "\n")
    output.rows(table(facts))
    output.data(str(path))


def table(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The file's figures, a row for each model and family."""
    return [
        {"model": model, "family": family, **figures}
        for model, families in facts["models"].items()
        for family, figures in families.items()
    ]


def _measured(
    measurement: Measurement, out: Path, limit: int | None, seed: int
) -> dict[str, dict[str, Any]]:
    """Figures of the method by family."""
    from specbench_cli.commands._progress import make_progress
    from specbench_cli.config.run import RunConfig
    from specbench_cli.measure import run as execute
    from specbench_cli.store.run_dir import RunDir
    from specbench_cli.summary.quality import quality as figures

    params: dict[str, dict[str, Any]] = {BASELINE: {}, measurement.method: {}}
    if measurement.method != BASELINE:
        params[measurement.method]["length"] = K
    config = RunConfig.model_validate(
        {
            "methods": [{"name": m, "label": m, "params": given} for m, given in params.items()],
            "tasks": [TASK],
            "target": measurement.target,
            "limit": limit,
            "seed": seed,
            "temperature": measurement.temperature,
            "max_new_tokens": MAX_NEW_TOKENS,
            "allow_noise": True,
        }
    )
    folder = out / measurement.name.replace(" ", "-")
    with make_progress(json=False, dry_run=False, part=False) as view:
        if (folder / "manifest.json").is_file():
            plan, run_dir = execute.reopen(folder, view)
        else:
            plan, run_dir = execute.start(config, {}, folder, view)
        execute.run(plan, run_dir, view)
    found = figures(RunDir.open(folder).records(), measurement.method)
    return {
        family: {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in asdict(each).items()
        }
        for family, each in found.items()
    }
