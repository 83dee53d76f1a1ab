"""Tests that tables have accuracy only for scored answers."""

import csv
import io

import pytest

from specbench_cli.report.export import row_dicts
from specbench_cli.report.report_data import Incidents, ReportData
from specbench_cli.report.terminal.table import print_runs
from specbench_cli.store.run_dir import RunDir
from specbench_cli.summary.facts import Facts
from specbench_cli.summary.summary import summarise


@pytest.fixture
def reading(synthetic, manifest, tmp_path):
    """Return a function that makes report data with scored maths questions. Only sps is wrong."""

    def make(scored=True):
        records = synthetic.records()
        for record in records:
            if scored and record.family == "math_reasoning":
                record.score = float(record.label != "sps")
        summary = summarise(records, manifest, resamples=19)
        run = RunDir(tmp_path / "run", manifest)
        return ReportData(run, Facts.from_manifest(manifest), summary, Incidents())

    return make


def test_accuracy_is_the_mean_score_of_scored_answers(reading):
    found = {(row["family"], row["label"]): row["score"] for row in row_dicts(reading().summary)}
    assert found["math_reasoning", "pld"] == found["all", "pld"] == 1
    assert found["math_reasoning", "sps"] == found["all", "sps"] == 0
    assert found["qa", "pld"] is None


def test_tables_by_family_have_accuracy_if_anything_is_scored(reading, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_runs([reading()], families=True)
    assert "accuracy by family" in capsys.readouterr().out
    print_runs([reading(scored=False)], families=True)
    assert "accuracy" not in capsys.readouterr().out


def test_tsv_has_accuracy(reading, capsys):
    print_runs([reading()], families=True, form="tsv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out), delimiter="\t"))
    assert {row["accuracy"] for row in rows if row["family"] == "math_reasoning"} == {"0", "1"}
    assert {row["accuracy"] for row in rows if row["family"] == "qa"} == {""}
