"""Tests of the table of claimed and measured speedups, and of the methods paragraph."""

from __future__ import annotations

import pytest

from specbench_cli.api import Claim
from specbench_cli.registry import Papers
from specbench_cli.report import claims
from specbench_cli.report.content import report as page_of
from specbench_cli.report.markdown import render
from specbench_cli.report.paper.methods_text import sentences
from specbench_cli.report.report_data import read_report_data, read_runs

CLAIMED = Papers(
    claims=(
        Claim(
            speedup="2.90x",
            models="Vicuna-7B",
            task="MT-Bench",
            temperature=0.0,
            hardware="one A100",
            source="abstract",
        ),
    )
)


@pytest.fixture
def only_sps_claims(monkeypatch):
    monkeypatch.setattr(claims, "find_papers", lambda name: [CLAIMED] if name == "sps" else [])


def test_a_claim_is_compared_with_the_fastest_variant_of_its_method(
    make_run, synthetic, only_sps_claims
):
    worse = synthetic.Fake("sps-1", method="sps", length=1, alpha=0.7, draft_cost=0.12)
    reading = read_report_data(make_run(fakes=[synthetic.vanilla, synthetic.sps, worse]))
    (line,) = claims.compare_claims(reading.summary, reading.facts)
    values = (column.format(line) for column in claims.COLUMNS)
    label, claimed, claimed_setting, source, measured, measured_setting = values
    assert (label, claimed, source) == ("sps", "2.90x", "abstract")
    assert claimed_setting == "Vicuna-7B, MT-Bench, T=0, one A100"
    assert measured.startswith(f"{line.row.speedup:.2f}x [")
    assert measured_setting == "embedded-7m, draft embedded-1m, mini, greedy fp32, cpu"


def test_a_report_without_claims_has_no_claims_table(make_run, synthetic, monkeypatch):
    reading = read_report_data(make_run(fakes=[synthetic.vanilla, synthetic.pld]))
    monkeypatch.setattr(claims, "find_papers", lambda name: [])
    page = render(page_of(reading.summary, reading.run.manifest, reading.incidents, ()))
    assert claims.TITLE not in page


def test_an_unknown_method_has_no_claims():
    assert list(claims.find_papers("no-such-method")) == []


def test_the_paragraph_is_filled_from_the_manifest(make_run):
    reading = read_report_data(make_run())
    text = " ".join(sentences(reading.summary, reading.run.manifest))
    for fact in (
        "specbench 0.1.0 on 12 questions of mini (version 1)",
        "target was embedded-7m, the draft embedded-1m, run in 32-bit",
        "decoded greedily, one request at a time, seed 0",
        "a some CPU with 2 cores; 2 threads were used, with PyTorch 2.13.0",
        "left out: 0 of 72",
        "0 of 12 questions were mismatched",
        "bootstrap-t on the log ratio over questions, stratified",
    ):
        assert fact in text
    config = reading.run.manifest["config"]
    one = config | {"effective": config["effective"] | {"threads": 1}}
    alone = sentences(reading.summary, reading.run.manifest | {"config": one})
    assert "; 1 thread was used, with" in " ".join(alone)


def test_the_paragraph_describes_unusual_settings(make_run, synthetic):
    fakes = [synthetic.vanilla, synthetic.sps]

    def noisy(manifest):
        manifest["noisy"] = True
        manifest["config"]["effective"].update(verify="coupled", temperature=0.8)

    one = read_report_data(make_run("a", fakes, change=noisy, passes=2))
    text = " ".join(sentences(one.summary, one.run.manifest))
    assert "noise that is the same for all methods at temperature 0.8" in text
    assert "in each of 2 processes" in text
    assert "over questions and processes" in text
    assert "the times are noisy" in text
    two = read_runs([one.run, make_run("b", fakes)], force=True)
    text = " ".join(sentences(two.summary, two.run.manifest))
    assert "They are shown side by side (--force)" in text
    assert "share a letter" not in text


def test_missing_facts_have_no_sentence(make_run):
    reading = read_report_data(make_run())
    text = " ".join(sentences(reading.summary, {}))
    assert "machine" not in text
    assert "None" not in text
    assert "?" not in text
