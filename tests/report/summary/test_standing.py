"""Tests of what breaks a method: wrong outputs, too many near-ties, or a failed audit."""

import json
import math
import os

import pytest

from specbench_cli.judge.broken import (
    compute_likelihood_deviation,
    count_near_ties,
    find_broken_methods,
    find_failed_audit,
)
from specbench_cli.stats.martingale import TILTS
from specbench_cli.store.schema import Likelihood, Verdict
from specbench_cli.summary import text
from specbench_cli.summary.summary import summarise


@pytest.fixture
def make_records(synthetic):
    """Return a function that makes records of vanilla and sps on 12 prompts.

    The first `ties` outputs of sps are near-ties. Batch width explains the first `explained`.
    """

    def make(ties=0, explained=0, passes=1, **fake):
        fakes = (synthetic.vanilla, synthetic.Fake("sps", length=5, alpha=0.7, **fake))
        records = synthetic.records(fakes, prompts=12, passes=passes, tokens=16)
        for record in records:
            place = int(record.prompt_id.split("/")[1])
            if record.label == "sps" and place < ties:
                record.verdict = Verdict("near-tie", 3, 1e-5, 7, rounding=place < explained)
        return records

    return make


def near_tie_manifest(chance, n=12):
    """Return a manifest with `n` outputs, each with this probability of a near-tie."""
    rows = [[f"mini/{i}", 1, chance] for i in range(n)]
    return {"near_ties": {"outputs": 12, "expected": chance * n, "chances": rows}}


def sps(records):
    return [record for record in records if record.label == "sps"]


def test_near_ties_are_counted_by_output_and_compared_with_the_expected_number(make_records):
    found = count_near_ties(sps(make_records(ties=3, explained=2)), near_tie_manifest(0.25))
    assert (found.found, found.explained, found.expected) == (3, 2, pytest.approx(3.0))
    assert found.p == pytest.approx(0.6093, abs=1e-4)
    assert not found.excess_message


def test_a_near_tie_in_two_passes_counts_once(make_records):
    found = count_near_ties(sps(make_records(ties=3, passes=2)), near_tie_manifest(0.25))
    assert (found.found, found.expected) == (3, pytest.approx(12 * (1 - 0.75**2)))


def test_no_number_is_expected_if_near_ties_were_not_measured(make_records):
    found = count_near_ties(sps(make_records(ties=3)), {})
    assert (found.found, found.expected, found.p) == (3, None, None)
    assert not found.excess_message


def test_too_many_near_ties_break_a_method(make_records):
    records = make_records(ties=12, explained=12)
    assert find_broken_methods(records, near_tie_manifest(0.6)) == {}
    reasons = find_broken_methods(records, near_tie_manifest(0.3))
    assert list(reasons) == ["sps"]
    assert reasons["sps"].startswith("12 near-ties, where rounding explains at most 3.6 (p 5e-07)")


def test_half_as_many_near_ties_without_explanation_are_allowed(make_records):
    assert find_broken_methods(make_records(ties=12, explained=6), near_tie_manifest(0.6)) == {}
    reasons = find_broken_methods(make_records(ties=12), near_tie_manifest(0.6))
    assert reasons["sps"] == (
        "12 near-ties that the width of verification does not explain, where rounding explains at"
        " most 3.6 (p 5e-07)"
    )


def coin_likelihood(excess, n=12):
    """Return the likelihood statistics of `n` fair coin flips with this excess."""
    steps = (-0.5, 0.5)
    moments = [n * math.log(sum(math.exp(t * step) for step in steps) / 2) for t in TILTS]
    return Likelihood(excess, n * 0.25, moments)


def test_too_likely_or_unlikely_samples_break_a_method(make_records):
    for excess, bad in ((6.0, True), (-6.0, True), (2.5, False)):
        records = make_records(guarantee="exact_law", verdict="unchecked")
        for record in sps(records):
            record.likelihood = coin_likelihood(excess)
        deviations, p = compute_likelihood_deviation(sps(records))
        assert deviations == pytest.approx(12 * excess / 6)
        # The exact probability of 144 equal coin flips is 2e-43. The p-value is a bound above it.
        assert (p < 1e-10) is bad
        assert ("sps" in find_broken_methods(records, {})) is bad


def test_likelihood_does_not_break_a_lossy_method(make_records):
    records = make_records(guarantee="quality_only", verdict="unchecked")
    for record in sps(records):
        record.likelihood = coin_likelihood(6.0)
    assert find_broken_methods(records, {}) == {}


def test_counters_that_depend_on_earlier_prompts_break_a_method(make_records):
    reasons = find_broken_methods(make_records(), {"leaks": {"sps": "mini/0"}})
    assert reasons == {
        "sps": "it keeps state from other prompts: mini/0, decoded again at the end of the run,"
        " gave a different result"
    }


def test_a_lossless_method_without_checked_outputs_is_not_ranked(make_records, manifest):
    summary = summarise(make_records(verdict="unchecked"), manifest, resamples=49)
    (row,) = (row for row in summary.rows if row.label == "sps")
    assert (row.speedup, row.letters) == (None, "")
    assert row.speedup_note == "12 outputs were compared with nothing"


def test_vanilla_that_differs_from_transformers_is_broken(make_records, manifest):
    records = make_records()
    vanilla = next(record for record in records if record.label == "vanilla")
    vanilla.verdict = Verdict("mismatch", 3, 0.4, 7)
    reasons = find_broken_methods(records, {})
    assert reasons == {
        "vanilla": "1 output is not what the transformers model of the target generates, first"
        " mini/0"
    }
    summary = summarise(records, manifest, resamples=49)
    assert text.proof(summary).startswith("proof: none; vanilla's own output is wrong")


def test_a_near_tie_at_an_output_without_one_in_vanilla_breaks_a_method(make_records):
    assert list(find_broken_methods(make_records(ties=1), near_tie_manifest(0.5, n=0))) == ["sps"]


def test_a_mismatch_breaks_a_method(make_records):
    records = make_records(verdict="mismatch")
    assert find_broken_methods(records, {}) == {
        "sps": "12 outputs are neither vanilla's nor tied with it, first mini/0"
    }


def test_a_failed_audit_of_the_file_breaks_a_method(make_records):
    manifest = {"method_files": {"sps": "aa", "vanilla": "bb"}}
    audited = []

    def failed_audit(method, file_sha256):
        audited.append((method, file_sha256))
        return "its audit failed" if method == "sps" else None

    assert find_broken_methods(make_records(), manifest, failed_audit) == {
        "sps": "its audit failed"
    }
    assert set(audited) == {("sps", "aa"), ("vanilla", "bb")}


@pytest.mark.parametrize("fake", [{"peer": True}, {"guarantee": "quality_only"}])
def test_methods_without_a_lossless_claim_need_no_audit(make_records, fake):
    manifest = {"method_files": {"sps": "aa"}}
    assert find_broken_methods(make_records(**fake), manifest, lambda *_: "failed") == {}


def test_only_the_newest_audit_of_the_same_file_counts(tmp_path):
    def write(name, age_s, **facts):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"method": "sps", "sha256": "aa", **facts}))
        os.utime(file, (10_000 - age_s, 10_000 - age_s))

    assert find_failed_audit("sps", "aa", tmp_path) is None
    write("old", 50, verdict="BROKEN")
    assert "specbench audit sps" in find_failed_audit("sps", "aa", tmp_path)
    write("other-file", 10, verdict="BROKEN", sha256="bb")
    write("other-method", 10, verdict="BROKEN", method="pld")
    write("new", 20, verdict="FAULTY")
    (tmp_path / "half.json").write_text('{"method": "s')
    (tmp_path / "list.json").write_text("[]")
    assert find_failed_audit("sps", "aa", tmp_path).startswith("its audit says FAULTY")
    write("newest", 15, verdict="NOT SHOWN")
    assert find_failed_audit("sps", "aa", tmp_path).startswith("its audit says NOT SHOWN")
    write("newest", 5, verdict="PASSED")
    assert find_failed_audit("sps", "aa", tmp_path) is None


def test_a_method_broken_by_near_ties_has_no_speedup_in_any_table(make_records, manifest):
    summary = summarise(make_records(ties=12), manifest | near_tie_manifest(0.3), resamples=49)
    rows = [r for rows in (summary.rows, *summary.families.values()) for r in rows]
    own = [row for row in rows if row.label == "sps"]
    assert all(row.broken and row.speedup is None and row.letters == "" for row in own)
    assert {row.speedup_note for row in own} == {f"BROKEN: {own[0].broken_why}"}


@pytest.mark.parametrize(
    ("ties", "measure", "lines"),
    [
        (0, {}, []),
        (
            0,
            near_tie_manifest(0.01),
            ["near-ties: none found, at most 0.12 expected from rounding"],
        ),
        (
            3,
            near_tie_manifest(0.25),
            [
                "near-ties: sps 3 found, at most 3 expected (p 0.61), 2 explained by the width of"
                " verification"
            ],
        ),
        (3, {}, ["near-ties: sps 3 found, 2 explained by the width of verification"]),
    ],
)
def test_notes_have_near_ties_found_expected_and_explained(
    make_records, manifest, ties, measure, lines
):
    summary = summarise(make_records(ties=ties, explained=2), manifest | measure, resamples=49)
    assert text.near_ties(summary) == lines


def test_every_method_has_the_bound_of_its_mismatch_rate(make_records, manifest):
    summary = summarise(make_records(), manifest, resamples=49)
    (row,) = (row for row in summary.rows if row.label == "sps")
    assert (row.questions_checked, row.questions_mismatched) == (12, 0)
    assert row.mismatch_bound == pytest.approx(1 - 0.05 ** (1 / 12))
    assert text.proof(summary) == "proof: 0 of 12 prompts differ from vanilla (95% bound: 22%)"
