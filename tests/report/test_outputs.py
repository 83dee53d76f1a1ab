"""Tests of the files that a run writes at its end and of `specbench report`."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pandas as pd
import pytest

from specbench_cli.commands.report import report
from specbench_cli.config.commands import ReportOptions
from specbench_cli.errors import UsageError
from specbench_cli.report import outputs
from specbench_cli.report.outputs import write_outputs
from specbench_cli.store import run_dir
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Ns, Verdict, from_json

pytestmark = pytest.mark.usefixtures("figures")


@pytest.fixture
def run(synthetic, manifest, tmp_path, monkeypatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = RunDir.create(tmp_path / "results" / "runs" / "20261121T102403Z-mini-0", manifest)
    records = synthetic.records(prompts=12)
    sps = [place for place, record in enumerate(records) if record.label == "sps"]
    records[sps[0]] = replace(records[sps[0]], verdict=Verdict("near-tie", 7, 1.5e-5, 12))
    records[sps[1]] = replace(records[sps[1]], void=True, other_cpu=0.31, ns=Ns())
    pld = next(place for place, record in enumerate(records) if record.label == "pld")
    records[pld] = replace(
        records[pld], error="ValueError: a | b", finish="error", verdict=None, ns=Ns(),
        output_ids=None, n_tokens=None, steps=None,
    )  # fmt: skip
    run.append(records)
    run.close("finished")
    return run


@pytest.fixture
def without_figures(monkeypatch):
    """Figures take longest, and what is tested is elsewhere."""
    monkeypatch.setattr(outputs, "write_figures", lambda *_, **__: [])


def test_a_run_writes_csv_parquet_figures_and_a_report_at_its_end(run):
    reading = write_outputs(run)
    assert {file.name for file in run.path.iterdir()} == {
        "manifest.json",
        "records.jsonl",
        "summary.csv",
        "records.parquet",
        "report.md",
        "figures",
        ".specbench.json",
    }
    assert reading.report_arguments == "last"
    assert len(pd.read_parquet(run.path / "records.parquet")) == 12 * 6
    page = (run.path / "report.md").read_text()
    assert "![speedup over vanilla](figures/speedup.svg)" in page
    assert "| sps | mini/0 | 1 | 0 | near-tie | 7 | 0.000015 |" in page
    assert "| pld | mini/0 | 1 | 0 | ValueError: a \\| b |" in page
    assert "| sps | mini/1 | 1 | 0 | 31.0% |" in page
    assert "| limit | 48 (flag) |" in page
    assert "| machine.cpu | some CPU |" in page
    assert str(run.path.parent) not in page


@pytest.mark.usefixtures("without_figures")
def test_summary_csv_has_every_figure_overall_and_by_family(run):
    summary = write_outputs(run).summary
    with (run.path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 7
    overall = {row["label"]: row for row in rows if row["family"] == "all"}
    sps = next(row for row in summary.rows if row.label == "sps")
    assert float(overall["sps"]["speedup"]) == sps.speedup
    assert float(overall["sps"]["mat_macro"]) == sps.mat_macro
    assert len(overall["sps"]["acceptance_by_position"].split()) == 5
    assert overall["vanilla"]["speedup_low"] == ""


@pytest.mark.usefixtures("without_figures")
def test_report_of_a_clean_run_has_no_incidents(synthetic, manifest, tmp_path):
    run = RunDir.create(tmp_path / "run", manifest)
    run.append(synthetic.records([synthetic.vanilla, synthetic.sps], prompts=4))
    assert write_outputs(run).report_arguments == str(run.path)
    page = (run.path / "report.md").read_text()
    for title in ("Outputs that differ", "Failed outputs", "Noisy outputs"):
        assert title not in page


@pytest.mark.usefixtures("without_figures")
def test_long_lists_of_incidents_are_shortened(synthetic, manifest, tmp_path):
    bad = synthetic.Fake("bad", length=5, alpha=0.9, verdict="mismatch")
    run = RunDir.create(tmp_path / "run", manifest)
    run.append(synthetic.records([synthetic.vanilla, bad], prompts=60))
    write_outputs(run)
    page = (run.path / "report.md").read_text()
    assert page.count("| bad | mini/") == 50
    assert "And 10 more, in records.jsonl." in page


def test_report_prints_a_table_by_family(run, capsys):
    assert report(ReportOptions(runs=["last"], form="tsv")) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 + 6 * 7
    assert "by task: specbench report last" in err


def test_report_writes_the_requested_formats(run, capsys):
    assert report(ReportOptions(runs=[str(run.path)], to="md, csv,json")) == 0
    folder = run.path / "report"
    assert {file.name for file in folder.iterdir()} == {
        "report.md",
        "figures",
        "summary.csv",
        "summary.json",
        ".specbench.json",
    }
    whole = json.loads((folder / "summary.json").read_text())
    assert whole["prompts"] == {"mini": 12}
    assert whole["runs"] == ["20261121T102403Z-mini-0"]
    assert whole["rows"][0]["family"] == "all"
    assert str(folder / "report.md") in capsys.readouterr().out


@pytest.mark.usefixtures("without_figures")
def test_a_run_given_twice_counts_once(run, tmp_path):
    assert (
        report(ReportOptions(runs=[str(run.path), "last"], to="csv,json", out=tmp_path / "once"))
        == 0
    )
    whole = json.loads((tmp_path / "once" / "summary.json").read_text())
    assert whole["passes"] == 1
    assert len(whole["rows"]) == 6 * 7


def test_figures_are_drawn_once_for_all_formats(run, tmp_path, monkeypatch):
    drawn = []
    picture = tmp_path / "speedup.png"
    monkeypatch.setattr(outputs, "write_figures", lambda *_, **__: drawn.append(1) or [picture])
    files = outputs.write(outputs.read_report_data(run), tmp_path, ("md", "html", "latex"))
    assert drawn == [1]
    assert len(files) == len(set(files))
    assert {"report.md", "report.html", "report.tex", "speedup.png"} <= {f.name for f in files}


def test_records_are_parsed_once_for_figures_of_all_rows(run, tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(run_dir, "from_json", lambda line: parsed.append(1) or from_json(line))
    outputs.write(outputs.read_report_data(run), tmp_path, ("md", "latex", "csv", "json"))
    one_prompt = 6
    assert len(parsed) <= 12 * 6 + 2 * one_prompt + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "pdf"}, "'pdf' is not one of md, html, latex, csv, json"),
        ({"to": ","}, "names no format"),
        ({"out": "there"}, "--out needs --to"),
        ({"also": "speed"}, "--also must be spec-bench, got 'speed'"),
    ],
)
def test_invalid_option_is_rejected_with_the_allowed_values(run, options, message):
    with pytest.raises(UsageError, match=message):
        report(ReportOptions(runs=[str(run.path)], **options))


def test_folder_that_cannot_be_made_is_a_usage_error(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        report(ReportOptions(runs=[str(run.path)], to="csv", out=tmp_path / "file" / "x"))


def test_folder_without_a_run_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="contains no run"):
        report(ReportOptions(runs=[str(tmp_path)]))
