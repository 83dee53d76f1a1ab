"""Quality of the embedded models, measured by ordinary runs of specbench.

A high acceptance does not prove that a target and its draft are good, because a bad target is
easier to predict. So the target must solve its tasks, and its draft must be less accurate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from specbench_cli import files, output
from specbench_cli.config import options
from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import MEASURING, OUTPUT, Option

if TYPE_CHECKING:
    from specbench_cli.store.schema import Record

TASK = "mini"
K = 5
MAX_NEW_TOKENS = 128
FILE = "quality.json"
BASELINE = "vanilla"
REPETITIVE = 0.5
"""An output is repetitive if its share of distinct 4-grams is smaller than this."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a method's outputs.

    Attributes:
        outputs: number of outputs.
        accuracy: mean score; None if the task has no scorer.
        ended: share of outputs that end with the EOS token, before the token limit.
        repetitive: share of repetitive outputs (see `REPETITIVE`).
        mat: mean accepted tokens: all tokens / all steps. None if the method has no steps.
    """

    outputs: int
    accuracy: float | None
    ended: float
    repetitive: float
    mat: float | None


class QualityRun(NamedTuple):
    """A run to measure: its name in quality.json, the target, the method and the temperature.

    Every run also measures vanilla.
    """

    name: str
    target: str
    method: str = BASELINE
    temperature: float = 0.0


QUALITY_RUNS = (
    QualityRun("embedded-7m", "embedded-7m", "sps"),
    QualityRun("embedded-7m at temperature 1", "embedded-7m", temperature=1.0),
    QualityRun("embedded-1m", "embedded-1m"),
    QualityRun("embedded-exit", "embedded-exit"),
    QualityRun("embedded-xv", "embedded-xv"),
)


class QualityOptions(CommandOptions):
    """Options of `quality`."""

    out: Annotated[Path, Option(OUTPUT, "DIR", "Folder for quality.json and the runs behind it.")]
    limit: Annotated[
        int | None,
        Option(MEASURING, "N", "Questions, spread over the families.", default="all"),
    ] = None
    seed: Annotated[
        int, Option(MEASURING, "N", "Seed of sampling and of the choice of questions.")
    ] = 0


@options.parsed_command("recipes.embedded.quality:QualityOptions")
def measure_quality(options: QualityOptions) -> None:
    """Measure the shipped models on the task mini: accuracy, MAT, endings, repetition.

    The values come from records of ordinary runs, which are stored in OUT. They do not include
    times, so the machine need not be quiet. A finished run is not repeated.
    """
    out, limit, seed = options.out, options.limit, options.seed
    files.check_listed(out / FILE)
    facts: dict[str, Any] = {"task": TASK, "limit": limit, "seed": seed, "sps_length": K}
    facts["models"] = {
        measurement.name: _measure(measurement, out, limit, seed) for measurement in QUALITY_RUNS
    }
    path = out / FILE
    files.write_listed(path, json.dumps(facts, indent=1) + "\n")
    output.rows(figures_table(facts))
    output.data(str(path))


def figures_table(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the values of quality.json as table rows, one per model and task family."""
    return [
        {"model": model, "family": family, **figures}
        for model, families in facts["models"].items()
        for family, figures in families.items()
    ]


def _measure(
    measurement: QualityRun, out: Path, limit: int | None, seed: int
) -> dict[str, dict[str, Any]]:
    """Do a run, or resume it. Return the quality of the method's outputs by task family."""
    from specbench_cli.commands._progress import make_progress
    from specbench_cli.config.run import RunConfig
    from specbench_cli.measure.run import measure_run, resume_run, start_run
    from specbench_cli.store.run_dir import RunDir

    params: dict[str, dict[str, Any]] = {BASELINE: {}, measurement.method: {}}
    if measurement.method != BASELINE:
        params[measurement.method]["length"] = K
    config = RunConfig.model_validate(
        {
            "methods": [{"name": m, "label": m, "params": values} for m, values in params.items()],
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
            plan, run_dir = resume_run(folder, view)
        else:
            plan, run_dir = start_run(config, {}, folder, view)
        measure_run(plan, run_dir, view)
    found = summarise_by_family(RunDir.open(folder).records(), measurement.method)
    return {
        family: {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in asdict(each).items()
        }
        for family, each in found.items()
    }


def summarise_by_family(records: Iterable[Record], label: str) -> dict[str, Quality]:
    """Return the quality of a method by task family. The last entry, "all", is over all families.

    Failed outputs are left out.
    """
    families: dict[str, list[Record]] = {}
    for record in records:
        if record.label == label and record.error is None:
            families.setdefault(record.family, []).append(record)
    every = [record for own in families.values() for record in own]
    return {
        family: _figures(own) for family, own in [*sorted(families.items()), ("all", every)] if own
    }


def distinct_4_grams(ids: Sequence[int]) -> float:
    """Return the share of distinct 4-grams in an output; 1 if it has fewer than four tokens."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _figures(records: Sequence[Record]) -> Quality:
    scores = [record.score for record in records if record.score is not None]
    outputs = [record.output_ids or [] for record in records]
    steps = sum(len(record.steps.committed) for record in records if record.steps is not None)
    tokens = sum(len(ids) - 1 for ids in outputs)
    return Quality(
        outputs=len(records),
        accuracy=sum(scores) / len(scores) if scores else None,
        ended=sum(record.finish == "eos" for record in records) / len(records),
        repetitive=sum(distinct_4_grams(ids) < REPETITIVE for ids in outputs) / len(records),
        mat=tokens / steps if steps else None,
    )
