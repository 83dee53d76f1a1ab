"""Tests that files and tables follow the declarations of the metrics."""

from dataclasses import fields, replace

import pytest

from specbench_cli.report.export import row_dicts
from specbench_cli.summary import metrics
from specbench_cli.summary.metrics import METRICS, MethodSummary
from specbench_cli.summary.summary import summarise

TABLES = {name: value for name, value in vars(metrics).items() if isinstance(value, tuple)}


@pytest.fixture
def summary(synthetic, manifest):
    return summarise(synthetic.records(prompts=4), manifest, resamples=49)


def test_files_have_every_metric_under_its_name(summary):
    assert list(METRICS) == [field.name for field in fields(MethodSummary)]
    for row in row_dicts(summary):
        assert list(row) == ["family", *METRICS]


def test_every_metric_has_a_meaning():
    assert not [name for name, each in METRICS.items() if not each.meaning]


def test_a_column_has_the_heading_and_value_of_its_metric(summary):
    row = replace(summary.rows[0], mat=2.345)
    assert metrics.MAT.heading == METRICS["mat"].heading == "MAT"
    assert metrics.MAT.format(row) == METRICS["mat"].form(2.345) == "2.35"
    assert [get(row) for get in metrics.MAT.data.values()] == [2.345]


def test_every_metric_with_a_heading_is_in_a_table():
    table_columns = {id(column) for table in TABLES.values() for column in table}
    own = {name: id(column) for name, column in metrics._COLUMNS.items()}
    only_in_sweeps = {"discard_rate", "verification_rate"}
    only_in_family_tables = {"n_prompts"}  # only in the family tables of an HTML page
    assert {
        name for name, at in own.items() if at not in table_columns
    } == only_in_sweeps | only_in_family_tables


@pytest.mark.parametrize("name", sorted(TABLES))
def test_columns_of_a_table_have_unique_names(name):
    names = [key for column in TABLES[name] for key in column.data]
    assert len(names) == len(set(names))
