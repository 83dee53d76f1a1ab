"""Records for tests, with default values for the fields that a test does not set."""

from __future__ import annotations

from typing import Any

from specbench_cli.store.schema import Ns, Params, Record, Verdict


def record_of(label: str, prompt_id: str, n: int = 10, /, **changes: Any) -> Record:
    """Return a record of a greedy first-turn output, without steps and forwards."""
    values = {
        "prompt_id": prompt_id,
        "cluster": prompt_id,
        "task": prompt_id.partition("/")[0],
        "family": "qa",
        "category": "qa",
        "turn": 1,
        "method": label.partition(" ")[0],
        "label": label,
        "peer": False,
        "params": Params(),
        "sampling": "greedy",
        "guarantee": "exact_tokens",
        "pass_": 1,
        "seed": 0,
        "output_ids": list(range(n)),
        "origin": None,
        "n_tokens": n,
        "finish": "length",
        "steps": None,
        "target_forwards": None,
        "draft_forwards": None,
        "forwards": None,
        "ns": Ns(total=100),
        "peak_bytes": None,
        "other_cpu": None,
        "verdict": Verdict("identical"),
        "score": None,
        "void": False,
        "error": None,
    }
    return Record(**(values | changes))
