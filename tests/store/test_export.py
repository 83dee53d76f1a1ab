"""The parquet table holds what the records hold."""

from __future__ import annotations

import json

import pandas as pd

from specbench_cli.store.export import write_parquet
from specbench_cli.store.schema import Drafted, Ns


def test_parquet_has_a_row_a_record_and_a_column_a_field(tmp_path, make_record):
    file = tmp_path / "records.parquet"
    failed = make_record(
        turn=2, output_ids=None, n_tokens=None, steps=None, forwards=None, ns=Ns(), verdict=None,
        finish="error", error="boom",
    )  # fmt: skip
    whole = make_record(
        drafts=[Drafted([6, 7], None, [0, 1]), Drafted([9, 3], [-1, -1], [])],
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


def test_parquet_of_no_records_has_the_columns(tmp_path):
    write_parquet([], tmp_path / "none.parquet")
    table = pd.read_parquet(tmp_path / "none.parquet")
    assert len(table) == 0
    assert {"prompt_id", "steps_levels", "forwards_kind", "ns_host"} <= set(table.columns)
