"""Tests that methods that learn from earlier prompts have their own section in every table."""

import pytest

from specbench_cli.report import tables
from specbench_cli.report.content import report
from specbench_cli.report.markdown import render
from specbench_cli.report.outputs import write
from specbench_cli.report.report_data import Incidents, read_report_data
from specbench_cli.report.terminal.table import WIDTH, run_text
from specbench_cli.summary import text
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.summary import summarise


@pytest.fixture
def summary_and_manifest(synthetic, manifest):
    """A summary and its manifest: three methods without learning, two that learn, one lossy."""
    fast = synthetic.Fake("suffix", length=8, alpha=0.9, cost=1.1)
    slow = synthetic.Fake("sam", length=3, alpha=0.2, cost=1.3)
    lossy = synthetic.Fake("lax", length=5, alpha=0.9, guarantee="quality_only")
    fakes = [synthetic.vanilla, synthetic.sps, synthetic.pld, fast, slow, lossy]
    scopes = dict.fromkeys(("suffix", "sam"), "run")
    manifest["rows"] = [
        {"label": fake.label, "state_scope": scopes.get(fake.label, "prompt")} for fake in fakes
    ]
    return summarise(synthetic.records(fakes, prompts=12), manifest, resamples=50), manifest


def test_learning_methods_are_listed_after_all_others(summary_and_manifest):
    summary, _ = summary_and_manifest
    labels = [row.label for row in summary.rows]
    assert labels[3:] == ["suffix", "sam", "lax"] and set(labels[:3]) == {"vanilla", "sps", "pld"}
    speedups = {row.label: row.speedup for row in summary.rows}
    assert speedups["suffix"] > max(speedups["sps"], speedups["pld"])
    assert text.sections(summary.rows) == ((3, text.RUN_SCOPE), (5, text.LOSSY))
    for rows in summary.families.values():
        assert [row.label for row in rows] == labels


def test_terminal_and_markdown_have_a_heading_above_learning_methods(summary_and_manifest):
    summary, manifest = summary_and_manifest
    lines = run_text(summary, Facts.from_manifest(manifest)).splitlines()
    at = lines.index(text.RUN_SCOPE)
    assert [line.split()[0] for line in (lines[at - 1], *lines[at + 1 : at + 3])][1:] == [
        "suffix",
        "sam",
    ]
    assert lines[at + 3] == text.LOSSY and len(text.RUN_SCOPE) <= WIDTH
    page = render(report(summary, manifest, Incidents(), []))
    part = page.split("## All families")[1].split("\n\n")
    line_index = part.index(f"{text.RUN_SCOPE.capitalize()}.")
    assert "| suffix |" in part[line_index + 1] and "| sps |" not in part[line_index + 1]
    assert "| sps |" in part[line_index - 1] and "| suffix |" not in part[line_index - 1]


def test_html_page_has_tables_of_learning_methods(summary_and_manifest):
    found = {
        table.id: table
        for table in (
            *tables.overall_tables(summary_and_manifest[0]),
            *tables.family_tables(summary_and_manifest[0]),
        )
    }
    assert list(found) == [
        f"{part}-{kind}" for part in ("overall", "family") for kind in ("lossless", "run", "lossy")
    ]
    assert [row[1].text for row in found["overall-run"].rows] == ["suffix", "sam"]
    assert "depend on the order of the prompts" in found["overall-run"].note


def test_latex_and_csv_mark_learning_methods(make_run, synthetic, tmp_path):
    rows = [{"label": label} for label in ("vanilla", "sps")]
    learning = {"rows": [*rows, {"label": "pld", "state_scope": "run"}]}
    run = make_run(
        fakes=[synthetic.vanilla, synthetic.sps, synthetic.pld],
        change=lambda manifest: manifest.update(learning),
    )
    (tmp_path / "out").mkdir()
    write(read_report_data(run), tmp_path / "out", ["latex", "csv"])
    for part in ("overall", "cost", "families"):
        lines = (tmp_path / "out" / "latex" / f"{part}.tex").read_text().splitlines()
        places = [at for at, line in enumerate(lines) if "depend on the order" in line]
        assert places and all(lines[at + 1].lstrip().startswith("pld") for at in places)
    header, *rows = (tmp_path / "out" / "summary.csv").read_text().splitlines()
    column = header.split(",").index("state_scope")
    scopes = {row.split(",")[1]: row.split(",")[column] for row in rows if row.startswith("all,")}
    assert scopes == {"vanilla": "", "sps": "", "pld": "run"}


def test_runs_without_a_state_scope_have_one_section(synthetic, manifest):
    summary = summarise(synthetic.records(prompts=6), manifest, resamples=20)
    assert text.sections(summary.rows) == ()
