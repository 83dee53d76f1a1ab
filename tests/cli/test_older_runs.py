"""Runs of every earlier record schema are read, reported and compared.

`older_runs/schema-N` holds the manifest, prompts and records that the version with schema N wrote
for `specbench run -m vanilla -m sps -m pld --limit 3 --max-new-tokens 16 --allow-noise`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specbench_cli import app
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import SCHEMA

RUNS = Path(__file__).with_name("older_runs")
NEWEST = RUNS / f"schema-{SCHEMA}"
SCHEMAS = range(1, SCHEMA + 1)
MAT = {"vanilla": 1.0, "sps": 3.75, "pld": 1.8}
MAT_OF_SCHEMA_1 = MAT | {"pld": 1.5}
"""The versions with schema 1 shipped another embedded target, which generates other text."""


@pytest.fixture
def run(tmp_path, request):
    """Return a copy of the run with the schema that the test's parameter names."""
    return Path(shutil.copytree(RUNS / f"schema-{request.param}", tmp_path / "run"))


@pytest.fixture
def cli(capsys):
    def call(*args):
        code = app._run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


every_schema = pytest.mark.parametrize("run", SCHEMAS, indirect=True)


@every_schema
def test_every_record_is_read(run):
    stored = (run / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records = list(RunDir.open(run).records())
    assert len(records) == len(stored) == 9
    for record, line in zip(records, stored, strict=True):
        facts = json.loads(line)
        assert (record.prompt_id, record.label) == (facts["prompt_id"], facts["label"])
        assert list(record.output_ids) == facts["output_ids"]


@every_schema
def test_report_has_the_metrics_of_the_records(run, cli):
    code, out, _ = cli("report", run, "--json")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    rows = [line for line in lines if line["family"] == "all"]
    schema = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["schema"]
    expected = MAT_OF_SCHEMA_1 if schema == 1 else MAT
    assert {row["method"]: round(row["mat"], 6) for row in rows} == expected
    assert all(row["speedup"] > 0 for row in rows)
    assert {row["output"] for row in rows} == {"reference", "3 identical"}


@pytest.mark.parametrize("run", SCHEMAS[1:], indirect=True)
def test_run_is_compared_with_one_of_the_newest_schema(run, cli):
    code, out, _ = cli("compare", run, NEWEST, "--json")
    assert code == 0
    assert {line["outcome"] for line in json.loads(out)["rows"]} == {"same"}


def test_compare_names_the_differing_models_of_two_runs(cli):
    code, _, err = cli("compare", RUNS / "schema-1", NEWEST)
    assert code == 2
    assert "target embedded-7m" in err
