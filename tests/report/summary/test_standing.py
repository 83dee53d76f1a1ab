"""What breaks a row: wrong outputs, more near-ties than rounding makes, a failed audit."""

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
def cells(synthetic):
    """sps on 12 prompts, the first `ties` of them near-ties, `explained` by width."""

    def make(ties=0, explained=0, passes=1, **fake):
        fakes = (synthetic.vanilla, synthetic.Fake("sps", length=5, alpha=0.7, **fake))
        records = synthetic.records(fakes, prompts=12, passes=passes, tokens=16)
        for record in records:
            place = int(record.prompt_id.split("/")[1])
            if record.label == "sps" and place < ties:
                record.verdict = Verdict("near-tie", 3, 1e-5, 7, rounding=place < explained)
        return records

    return make


def measured(chance, n=12):
    """A manifest in which so many outputs may differ, each with a chance."""
    rows = [[f"mini/{i}", 1, chance] for i in range(n)]
    return {"near_ties": {"outputs": 12, "expected": chance * n, "chances": rows}}


def sps(records):
    return [record for record in records if record.label == "sps"]


def test_near_ties_are_counted_by_output_and_compared_with_vanillas_gaps(cells):
    found = count_near_ties(sps(cells(ties=3, explained=2)), measured(0.25))
    assert (found.found, found.explained, found.expected) == (3, 2, pytest.approx(3.0))
    assert found.p == pytest.approx(0.6093, abs=1e-4)
    assert not found.excess_message


def test_a_near_tie_in_two_passes_is_one_and_has_two_chances(cells):
    found = count_near_ties(sps(cells(ties=3, passes=2)), measured(0.25))
    assert (found.found, found.expected) == (3, pytest.approx(12 * (1 - 0.75**2)))


def test_nothing_is_expected_of_a_run_whose_gaps_were_not_measured(cells):
    found = count_near_ties(sps(cells(ties=3)), {})
    assert (found.found, found.expected, found.p) == (3, None, None)
    assert not found.excess_message


def test_more_near_ties_than_rounding_makes_break_a_row(cells):
    records = cells(ties=12, explained=12)
    assert find_broken_methods(records, measured(0.6)) == {}
    why = find_broken_methods(records, measured(0.3))
    assert list(why) == ["sps"]
    assert why["sps"].startswith("12 near-ties, where rounding explains at most 3.6 (p 5e-07)")


def test_near_ties_that_width_does_not_explain_may_be_half_as_many(cells):
    assert find_broken_methods(cells(ties=12, explained=6), measured(0.6)) == {}
    why = find_broken_methods(cells(ties=12), measured(0.6))
    assert why["sps"] == (
        "12 near-ties that the width of verification does not explain, where rounding explains at"
        " most 3.6 (p 5e-07)"
    )


def drawn(excess, n=12):
    """What is known of drawn outputs' likelihood, of a coin that lands one way each time."""
    steps = (-0.5, 0.5)
    moments = [n * math.log(sum(math.exp(t * step) for step in steps) / 2) for t in TILTS]
    return Likelihood(excess, n * 0.25, moments)


def test_drawn_outputs_too_likely_or_unlikely_break_a_row(cells):
    for excess, bad in ((6.0, True), (-6.0, True), (2.5, False)):
        records = cells(guarantee="exact_law", verdict="unchecked")
        for record in sps(records):
            record.likelihood = drawn(excess)
        deviations, p = compute_likelihood_deviation(sps(records))
        assert deviations == pytest.approx(12 * excess / 6)
        # A coin that lands one way 144 times has a chance of 2e-43; the bound is above it.
        assert (p < 1e-10) is bad
        assert ("sps" in find_broken_methods(records, {})) is bad


def test_a_lossy_row_may_be_as_likely_as_it_likes(cells):
    records = cells(guarantee="quality_only", verdict="unchecked")
    for record in sps(records):
        record.likelihood = drawn(6.0)
    assert find_broken_methods(records, {}) == {}


def test_counters_that_depend_on_the_prompts_before_break_a_row(cells):
    why = find_broken_methods(cells(), {"leaks": {"sps": "mini/0"}})
    assert why == {
        "sps": "it keeps state from other prompts: mini/0, decoded again at the end of the run,"
        " gave a different result"
    }


def test_a_lossless_row_that_was_compared_with_nothing_is_not_ranked(cells, manifest):
    summary = summarise(cells(verdict="unchecked"), manifest, resamples=49)
    (row,) = (row for row in summary.rows if row.label == "sps")
    assert (row.speedup, row.letters) == (None, "")
    assert row.speedup_note == "12 outputs were compared with nothing"


def test_vanilla_that_transformers_does_not_agree_with_proves_nothing(cells, manifest):
    records = cells()
    vanilla = next(record for record in records if record.label == "vanilla")
    vanilla.verdict = Verdict("mismatch", 3, 0.4, 7)
    why = find_broken_methods(records, {})
    assert why == {
        "vanilla": "1 output is not what the transformers model of the target generates, first"
        " mini/0"
    }
    summary = summarise(records, manifest, resamples=49)
    assert text.proof(summary).startswith("proof: none; vanilla's own output is wrong")


def test_a_near_tie_where_vanilla_has_no_tie_breaks_a_row(cells):
    assert list(find_broken_methods(cells(ties=1), measured(0.5, n=0))) == ["sps"]


def test_a_mismatch_breaks_a_row_whatever_else(cells):
    records = cells(verdict="mismatch")
    assert find_broken_methods(records, {}) == {
        "sps": "12 outputs are neither vanilla's nor tied with it, first mini/0"
    }


def test_a_failed_audit_of_the_methods_file_breaks_a_row(cells):
    manifest = {"method_files": {"sps": "aa", "vanilla": "bb"}}
    asked = []

    def failed_audit(method, file_sha256):
        asked.append((method, file_sha256))
        return "its audit failed" if method == "sps" else None

    assert find_broken_methods(cells(), manifest, failed_audit) == {"sps": "its audit failed"}
    assert set(asked) == {("sps", "aa"), ("vanilla", "bb")}


@pytest.mark.parametrize("fake", [{"peer": True}, {"guarantee": "quality_only"}])
def test_who_claims_nothing_is_not_audited(cells, fake):
    manifest = {"method_files": {"sps": "aa"}}
    assert find_broken_methods(cells(**fake), manifest, lambda *_: "failed") == {}


def test_only_the_newest_certificate_of_the_same_file_counts(tmp_path):
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


def test_a_row_broken_by_near_ties_has_no_figure_anywhere(cells, manifest):
    summary = summarise(cells(ties=12), manifest | measured(0.3), resamples=49)
    rows = [r for rows in (summary.rows, *summary.families.values()) for r in rows]
    own = [row for row in rows if row.label == "sps"]
    assert all(row.broken and row.speedup is None and row.letters == "" for row in own)
    assert {row.speedup_note for row in own} == {f"BROKEN: {own[0].broken_why}"}


@pytest.mark.parametrize(
    ("ties", "measure", "lines"),
    [
        (0, {}, []),
        (0, measured(0.01), ["near-ties: none found, at most 0.12 expected from rounding"]),
        (
            3,
            measured(0.25),
            [
                "near-ties: sps 3 found, at most 3 expected (p 0.61), 2 explained by the width of"
                " verification"
            ],
        ),
        (3, {}, ["near-ties: sps 3 found, 2 explained by the width of verification"]),
    ],
)
def test_near_ties_found_expected_and_explained_stand_under_the_table(
    cells, manifest, ties, measure, lines
):
    summary = summarise(cells(ties=ties, explained=2), manifest | measure, resamples=49)
    assert text.near_ties(summary) == lines


def test_every_row_has_the_bound_of_its_claim(cells, manifest):
    summary = summarise(cells(), manifest, resamples=49)
    (row,) = (row for row in summary.rows if row.label == "sps")
    assert (row.questions_checked, row.questions_mismatched) == (12, 0)
    assert row.mismatch_bound == pytest.approx(1 - 0.05 ** (1 / 12))
    assert text.proof(summary) == "proof: 0 of 12 prompts differ from vanilla (95% bound: 22%)"
