"""Tests of exporting records to a parquet table."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import pandas as pd

from specbench_cli.store.export import write_parquet
from specbench_cli.store.schema import BatchMembership, DraftedTokens, Likelihood, Ns, Record


def test_parquet_has_one_row_per_record_and_one_column_per_field(tmp_path, make_record):
    file = tmp_path / "records.parquet"
    failed = make_record(
        turn=2, output_ids=None, n_tokens=None, steps=None, forwards=None, ns=Ns(), verdict=None,
        finish="error", error="boom",
    )  # fmt: skip
    whole = make_record(
        drafts=[DraftedTokens([6, 7], None, [0, 1]), DraftedTokens([9, 3], [-1, -1], [])],
        extra={"reused": 4},
        log_probs=[-0.5, 0.0, -2.0, -1.5, -0.75],
    )
    whole.forwards.messages = [[0, 1, 5, 9, 64]]
    write_parquet([whole, failed], file)
    table = pd.read_parquet(file)
    assert list(table["turn"]) == [1, 2]
    assert list(table["pass"]) == [1, 1]
    first = table.iloc[0]
    assert list(first["output_ids"]) == [5, 6, 7, 8, 2]
    assert list(first["steps_committed"]) == [3, 1]
    assert list(first["forwards_t1_ns"]) == [30, 50, 80, 95]
    assert first["params_effective"] == '{"length": 2}'
    assert first["forwards_kinds"].startswith('[{"model": "target"')
    assert first["verdict_kind"] == "near-tie"
    assert list(first["log_probs"]) == [-0.5, 0.0, -2.0, -1.5, -0.75]
    assert list(map(list, first["forwards_messages"])) == [[0, 1, 5, 9, 64]]
    assert json.loads(first["drafts"])[1] == {"tokens": [9, 3], "parents": [-1, -1], "path": []}
    assert json.loads(first["extra"]) == {"reused": 4}
    assert pd.isna(table.iloc[1]["drafts"])
    assert first["ns_total"] == 100
    assert table.iloc[1]["error"] == "boom"
    assert pd.isna(table.iloc[1]["ns_total"])


def test_parquet_has_every_field_of_a_record(tmp_path, make_record):
    """The fields of nested values are columns too."""
    cumulants = [at / 8 for at in range(16)]
    whole = make_record(
        likelihood=Likelihood(-2.5, 4.0, cumulants),
        batch=BatchMembership(2, 1, 200, 90),
        target_equivalents=2.5,
        version=3,
    )
    write_parquet([whole, make_record(turn=2)], tmp_path / "records.parquet")
    table = pd.read_parquet(tmp_path / "records.parquet")
    due = set()
    for field in fields(Record):
        name, value = field.name.rstrip("_"), getattr(whole, field.name)
        nested = is_dataclass(value)
        due |= {f"{name}_{inner.name}" for inner in fields(value)} if nested else {name}
    assert set(table.columns) == due
    first, second = (table.iloc[at] for at in (0, 1))
    assert (first["likelihood_excess"], first["likelihood_variance"]) == (-2.5, 4.0)
    assert list(first["likelihood_cumulants"]) == cumulants
    assert (first["batch_size"], first["batch_finished"]) == (2, 90)
    assert (first["target_equivalents"], first["version"]) == (2.5, 3)
    assert pd.isna(second["likelihood_excess"]) and pd.isna(second["batch_size"])


def test_parquet_of_no_records_has_the_columns(tmp_path):
    write_parquet([], tmp_path / "none.parquet")
    table = pd.read_parquet(tmp_path / "none.parquet")
    assert len(table) == 0
    assert {"prompt_id", "steps_levels", "forwards_kind", "ns_host"} <= set(table.columns)
