"""Outputs and sides of comparisons with everything that a test does not name filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench_cli.comparison.compared_output import ComparedOutput, Counters, PairKey
from specbench_cli.comparison.side import RowFacts, Side


def cell_of(key: PairKey, **changes: Any) -> ComparedOutput:
    """Return the greedy output of 17 tokens in 4 steps, without times."""
    values = {
        "task": key.prompt_id.partition("/")[0],
        "family": "qa",
        "cluster": key.prompt_id,
        "method": key.label,
        "sampling": "greedy",
        "guarantee": "exact_tokens",
        "peer": False,
        "ids": "0123456789abcdef",
        "counters": Counters(17, 16, 4, 16, 16, 15, 12, 5, 17),
        "finish": "length",
        "verdict": "identical",
        "error": None,
        "times": None,
    }
    return ComparedOutput(key=key, **(values | changes))


def side_of(cells: Sequence[ComparedOutput], **changes: Any) -> Side:
    """Return the side of a quiet run of one process whose methods have no parameters."""
    labels = dict.fromkeys(cell.key.label for cell in cells)
    values = {
        "name": "run",
        "created_utc": "",
        "facts": {},
        "machine": "m",
        "noisy": False,
        "rows": {
            label: RowFacts(label=label, method=label, params={}, timing_free=True)
            for label in labels
        },
        "outputs": {cell.key: cell for cell in cells},
        "processes": (tuple(cells),),
    }
    return Side(**(values | changes))
