"""Builders of compared outputs and sides. They fill in every value that a test does not set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench_cli.comparison.compared_output import ComparedOutput, Counters, PairKey
from specbench_cli.comparison.side import RowFacts, Side


def make_output(key: PairKey, **changes: Any) -> ComparedOutput:
    """Return a greedy output of 17 tokens in 4 steps, without times, changed by `changes`."""
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


def make_side_of(outputs: Sequence[ComparedOutput], **changes: Any) -> Side:
    """Return a side with these outputs: one quiet process, methods without parameters."""
    labels = dict.fromkeys(output.key.label for output in outputs)
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
        "outputs": {output.key: output for output in outputs},
        "processes": (tuple(outputs),),
    }
    return Side(**(values | changes))
