"""Tests of comparing sampled outputs with vanilla's by likelihood per token and by length."""

import numpy as np
import pytest

from specbench_cli.summary import formats, metrics, text
from specbench_cli.summary.evidence import Evidence, compare_outputs
from specbench_cli.summary.summary import summarise


@pytest.fixture
def sampled(synthetic):
    """Return a function that makes sampled records of vanilla and sps on 40 prompts.

    The log-likelihood per token of sps is lower by `shift`, its outputs longer by `longer`.
    """

    def make(shift=0.0, longer=0):
        rng = np.random.default_rng(2)
        fakes = (
            synthetic.Fake("vanilla", verdict="reference"),
            synthetic.Fake("sps", guarantee="exact_law", verdict="unchecked", length=5, alpha=0.7),
        )
        records = synthetic.records(fakes, prompts=40, tokens=20)
        for record in records:
            record.sampling = "rejection"
            per_token = -1.5 + 0.1 * rng.normal()
            if record.label == "sps":
                per_token -= shift
                record.n_tokens += longer
            record.log_likelihood = per_token * record.n_tokens
        return records

    return make


def compare_sps(records):
    by_label = {label: [r for r in records if r.label == label] for label in ("vanilla", "sps")}
    return compare_outputs(by_label["vanilla"], by_label["sps"])


def test_equal_distributions_show_no_difference(sampled):
    found = compare_sps(sampled())
    assert abs(found.likelihood.difference) < 0.1
    assert found.likelihood.p > 0.05
    assert (found.length.difference, found.length.p) == (0.0, 1.0)


def test_less_likely_tokens_are_detected(sampled):
    found = compare_sps(sampled(shift=0.2))
    assert found.likelihood.difference == pytest.approx(-0.2, abs=0.05)
    assert found.likelihood.p < 1e-3


def test_longer_outputs_are_detected(sampled):
    found = compare_sps(sampled(longer=4))
    assert (found.length.difference, found.length.p) == (4.0, pytest.approx(1e-4))
    assert found.likelihood.p > 0.05


def test_outputs_without_a_likelihood_give_no_evidence(synthetic):
    records = synthetic.records((synthetic.vanilla, synthetic.sps), prompts=4, tokens=8)
    assert compare_sps(records) == Evidence(None, None)


def test_evidence_is_reported_but_breaks_no_method(sampled, manifest):
    summary = summarise(sampled(shift=0.2), manifest, resamples=49)
    (row,) = (row for row in summary.rows if row.label == "sps")
    assert row.log_likelihood_p < 1e-3
    assert not row.broken
    (line,) = text.evidence(summary)
    assert line.startswith("evidence, not proof: sps log-likelihood per token -0.2")
    assert "unchecked" in metrics.verdicts(row)
    assert "specbench audit" in text.proof(summary)


def test_replayed_outputs_are_marked_and_prove_nothing(sampled, manifest):
    records = sampled()
    for record in records:
        record.sampling, record.log_likelihood = "replay", None
    summary = summarise(records, manifest, resamples=49)
    (row,) = (row for row in summary.rows if row.label == "sps")
    assert metrics.verdicts(row) == "40 replayed"
    assert text.proof(summary).startswith("proof: none")
    assert text.evidence(summary) == []


def test_a_lossy_method_has_its_accuracy_loss(synthetic, manifest):
    rng = np.random.default_rng(3)
    fakes = (
        synthetic.Fake("vanilla", verdict="reference"),
        synthetic.Fake("loose", guarantee="quality_only", verdict="unchecked", length=5, alpha=0.9),
    )
    records = synthetic.records(fakes, prompts=60, tokens=20)
    for record in records:
        record.score = float(rng.random() < (0.9 if record.label == "vanilla" else 0.5))
    summary = summarise(records, manifest, resamples=200)
    (row,) = summary.lossy
    assert row.score_difference_low < row.score_difference < row.score_difference_high < 0
    ends = row.score_difference_low, row.score_difference_high
    interval = ", ".join(f"{100 * end:+.1f}" for end in ends)
    assert metrics.accuracy_loss(row) == f"{100 * row.score_difference:+.1f} [{interval}]"
    assert metrics.accuracy_note(row) == f"at {metrics.accuracy_loss(row)} points, n 60"


def test_without_scores_there_is_no_accuracy_loss(synthetic, manifest):
    summary = summarise(synthetic.records(prompts=4), manifest, resamples=50)
    assert {metrics.accuracy_loss(row) for row in summary.rows} == {formats.NONE}
    assert {metrics.accuracy_note(row) for row in summary.rows} == {""}
