"""Modelled speedups of a confirmed method at other batch sizes and on other machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specbench_cli.config.arrivals import Arrivals
from specbench_cli.errors import SpecbenchError
from specbench_cli.measure.costs import Costs
from specbench_cli.predict.costs import BatchCosts
from specbench_cli.predict.load import simulate_load
from specbench_cli.predict.prediction import ALL, predict
from specbench_cli.predict.run_costs import check_models, load_costs
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import BASELINE
from specbench_cli.summary.load import LoadRow

SIMULATED = 24
"""Number of prompts in a simulation of batches. They fill the largest batch a few times."""


@dataclass(frozen=True)
class ModelledSpeedups:
    """Modelled speedups of methods over vanilla.

    batches: {batch, label, speedup} for each batch size. All requests arrive at once, and the
        speedup is a ratio of tokens per second.
    elsewhere: {machine, probed_utc, label, speedup} for each other machine. The speedup is a ratio
        of replayed decode times.
    missing: result that could not be modelled -> reason.
    """

    batches: list[dict[str, Any]]
    elsewhere: list[dict[str, Any]]
    missing: dict[str, str]


def model_speedups(
    run: RunDir,
    labels: Sequence[str],
    sizes: Sequence[int],
    costs: Path | None,
    others: Sequence[Path],
) -> ModelledSpeedups:
    """Model the speedups of some methods of a run.

    Args:
        sizes: batch sizes.
        costs: file with this machine's costs; None takes the stored ones.
        others: files with the costs of other machines.
    Raises:
        UsageError: a file does not contain costs, or its costs are of other models.
    """
    found = ModelledSpeedups([], [], {})
    own_costs = check_models(Costs.load(costs), run) if costs else None
    for file in others:
        _model_other_machine(run, labels, check_models(Costs.load(file), run), found)
    if not sizes:
        return found
    try:
        here = own_costs or load_costs(run)[0]
        _batches(run, labels, sizes, here, found)
    except SpecbenchError as fault:
        if own_costs is not None:
            raise
        words = f"{fault.message}; {fault.hint}" if fault.hint else fault.message
        found.missing["other batch sizes"] = words
    return found


def _model_other_machine(
    run: RunDir, labels: Sequence[str], costs: Costs, found: ModelledSpeedups
) -> None:
    prediction = predict(run.records(), run.manifest, costs, None)
    times: dict[str, float] = {}
    for row in prediction.rows:
        if row.label != ALL and (row.task == ALL or row.label not in times):
            times[row.label] = (row.predicted or 0.0) + (row.predicted_void or 0.0)
    for label in labels:
        if times.get(label) and times.get(BASELINE):
            found.elsewhere.append(
                {
                    "machine": costs.label,
                    "probed_utc": costs.created_utc,
                    "label": label,
                    "speedup": times[BASELINE] / times[label],
                }
            )
        else:
            why = (
                prediction.missing.get(label)
                or prediction.missing.get(BASELINE)
                or "it was not replayed"
            )
            found.missing[f"{label} on {costs.label}"] = why


def _batches(
    run: RunDir, labels: Sequence[str], sizes: Sequence[int], costs: Costs, found: ModelledSpeedups
) -> None:
    first = dict.fromkeys(prompt.prompt_id for prompt in run.prompts())
    prompt_ids = dict.fromkeys(islice(first, SIMULATED))
    prompts = [prompt for prompt in run.prompts() if prompt.prompt_id in prompt_ids]
    records = [each for each in run.records(prompt_ids) if each.label in (BASELINE, *labels)]
    burst = [Arrivals.parse(f"burst:{len(prompt_ids)}:1")]
    table = BatchCosts(costs)
    for size in sizes:
        simulated, missing = simulate_load(
            *(records, prompts, run.manifest, [table], burst), size=size, chunk=None
        )
        rows = [LoadRow.from_requests(each.label, each.load, each.passes) for each in simulated]
        rates = {row.label: row.goodput for row in rows}
        for label in labels:
            if label in rates and BASELINE in rates:
                ratio = rates[label] / rates[BASELINE]
                found.batches.append({"batch": size, "label": label, "speedup": ratio})
            elif label in missing or BASELINE in missing:
                found.missing[f"{label} in batches"] = missing.get(label) or missing[BASELINE]
    if found.batches and not table.batches_probed:
        found.missing["what sequences add"] = (
            "batches were not probed, so a forward over several sequences is assumed to cost as"
            f" much as one over equally many rows; specbench predict --probe --batch {max(sizes)}"
        )
