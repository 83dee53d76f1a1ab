"""Simulation of a run's methods under load: requests that arrive over time.

The engine decodes the first turn of each question again, with the run's methods. It does not run
the models. Their outputs come from the record (`scripts`), and the time of each forward from a cost
table (`costs.BatchCosts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_cli.config.arrivals import Arrivals
from specbench_cli.errors import SpecbenchError, UsageError
from specbench_cli.predict.costs import BatchCosts
from specbench_cli.predict.scripts import (
    check_costs,
    load_policy_costs,
    make_scripts,
    method_from_records,
    prompt_ids,
    replay_scripts,
)
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import Record

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Simulated requests of a method under one load.

    label: label of the method.
    load: option `--load` (arrival times), as typed.
    passes: one simulation per cost table. It has the times of each request's arrival, first token
        and last token, in seconds, and the request's number of tokens.
    """

    label: str
    load: str
    passes: list[tuple[Floats, Floats, Floats, Floats]]


def simulate_load(
    records: Iterable[Record],
    prompts: Iterable[Prompt],
    manifest: Mapping[str, Any],
    costs: Sequence[BatchCosts],
    loads: Sequence[Arrivals],
    size: int,
    chunk: int | None,
) -> tuple[list[SimulatedLoad], dict[str, str]]:
    """Simulate the methods of a run under several loads.

    Args:
        records, prompts, manifest: data of the recorded run.
        costs: cost tables from several probes of one machine. Each table gives one repeat. Methods
            that choose draft lengths by costs use the first table.
        loads: arrivals to simulate.
        size: maximum number of sequences in a step.
        chunk: maximum number of prompt tokens in a step.

    Returns:
        The simulated loads, and label -> reason for methods that cannot be simulated.

    Raises:
        UsageError: a trace lists fewer arrivals than the run has prompts.
    """
    ids, policy = prompt_ids(prompts), load_policy_costs(manifest, costs[0].costs)
    config = manifest.get("config", {}).get("effective", {})
    found: list[SimulatedLoad] = []
    missing: dict[str, str] = {}
    for label, own in _first_turns(records).items():
        try:
            method = method_from_records(own)
            for each in costs:
                check_costs(method, each.costs, manifest)
            scripts = make_scripts(own, ids, config)
            for load in loads:
                arrivals = _times(load, len(own), config.get("seed") or 0)
                passes = []
                for each in costs:
                    requests = replay_scripts(
                        *(method, scripts, each),
                        policy=policy,
                        size=size,
                        chunk=chunk,
                        arrivals=arrivals,
                    )
                    first, last = (
                        np.array([getattr(request, at) for request in requests]) / 1e9
                        for at in ("first", "last")
                    )
                    tokens = np.array([float(request.tokens) for request in requests])
                    passes.append((np.array(arrivals), first, last, tokens))
                found.append(SimulatedLoad(label, load.text, passes))
        except UsageError:
            raise
        except (SpecbenchError, ValueError) as fault:
            missing[label] = getattr(fault, "message", str(fault))
    return found, missing


def _first_turns(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of first turns by label, each prompt once."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.turn == 1 and not record.has_prompt_error:
            found.setdefault(record.label, {}).setdefault(record.prompt_id, record)
    return {label: list(own.values()) for label, own in found.items()}


def _times(load: Arrivals, n: int, seed: int) -> list[float]:
    try:
        return load.times(n, seed)
    except ValueError as error:
        raise UsageError(f"--load: {error}", "specbench predict --help") from error
