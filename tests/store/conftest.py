"""A fixture that makes a valid record, which tests can change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specbench_cli.store.schema import ForwardKind, Ns, Params, Record, Steps, Trace, Verdict
from tests.records import record_of


def _record(**changes: Any) -> Record:
    verify = ForwardKind("target", "verify", 0, 1, (0, 8))
    draft = ForwardKind("draft", "draft", 0, 1, (0, 2))
    values: dict[str, Any] = {
        "category": "lexicon",
        "params": Params({"length": 2}, {"length": 2}),
        "output_ids": [5, 6, 7, 8, 2],
        "origin": ["prefill", "accepted", "accepted", "bonus", "recovered"],
        "finish": "eos",
        "steps": Steps([2, 2], [2, 2], [2, 1], [2, 0], [3, 1]),
        "target_forwards": 3,
        "draft_forwards": 1,
        "forwards": Trace(
            [verify, draft], [0, 1, 0, 0], [3, 1, 3, 3], [0, 40, 60, 80], [30, 50, 80, 95], [2]
        ),
        "ns": Ns(total=100, prefill=20, decode=80, draft=10, verify=65, host=5),
        "peak_bytes": 1000,
        "other_cpu": 0.01,
        "verdict": Verdict("near-tie", 3, 1e-5, 9),
    }
    return record_of("sps", "mini/3", 5, **(values | changes))


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Record]:
    """Return a function that makes a valid record with these changes."""
    return _record
