"""Tests of the oracle draft length, which uses vanilla's output and gives an upper bound."""

import pytest

from specbench_cli.errors import ExitCode, UsageError
from specbench_cli.summary import metrics
from specbench_cli.summary.summary import summarise

pytestmark = pytest.mark.usefixtures("small_pair")

ORACLE = {"name": "sps", "label": "oracle", "params": {"length": "oracle"}}


@pytest.mark.parametrize("rule", [{}, {"temperature": 0.8, "verify": "coupled"}], ids=str)
def test_the_oracle_has_at_most_one_rejection_per_step(specbench, rule):
    outcome = specbench(ORACLE, "sps", limit=2, max_new_tokens=24, **rule)
    assert outcome.exit_code == ExitCode.OK
    forwards = {}
    for label in ("oracle", "sps"):
        own = outcome.by_label(label)
        assert {r.verdict.kind for r in own} <= {"identical", "near-tie"}
        forwards[label] = sum(r.target_forwards for r in own)
    for record in outcome.by_label("oracle"):
        steps = record.steps
        assert all(n - k <= 1 for n, k in zip(steps.nodes, steps.accepted, strict=True))
    assert forwards["oracle"] <= forwards["sps"]


def test_an_upper_bound_is_labelled_and_not_ranked(specbench):
    outcome = specbench(ORACLE, "sps", limit=2, max_new_tokens=24)
    assert outcome.manifest["upper_bounds"] == ["oracle"]
    summary = summarise(outcome.records, outcome.manifest, resamples=20)
    *ranked, last = summary.lossless
    assert (last.label, last.upper_bound, last.letters) == ("oracle", True, "")
    assert all(row.letters for row in ranked)
    assert metrics.verdicts(last).startswith("upper bound, ")


def test_the_oracle_is_rejected_for_sampled_outputs(specbench):
    with pytest.raises(UsageError, match="oracle drafts vanilla's output"):
        specbench(ORACLE, temperature=0.8)
