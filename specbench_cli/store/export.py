"""Export of records as one table, as a parquet file or a pandas DataFrame.

Nested fields become columns. For example, the field `ns.total` becomes the column `ns_total`. Lists
stay lists.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli.store.schema import BatchMembership, Likelihood, Ns, Record, Steps, Trace

if TYPE_CHECKING:
    import pandas
    import pyarrow

_BATCH = 500
_NESTED = ("kinds", "messages")


def write_parquet(records: Iterable[Record], path: Path) -> None:
    """Write records to a parquet file with zstd compression.

    The columns of parameters, kinds of forwards, drafts and counters of methods contain JSON
    text.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, rows = _schema(), iter(records)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := [_flatten(record) for record in itertools.islice(rows, _BATCH)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def to_frame(records: Iterable[Record]) -> pandas.DataFrame:
    """Return records as a pandas DataFrame, with one row per record."""
    import pyarrow as pa

    rows = [_flatten(record) for record in records]
    return pa.Table.from_pylist(rows, schema=_schema()).to_pandas()


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    ints, text, number = pa.list_(pa.int64()), pa.string(), pa.float64()
    return pa.schema(
        [(n, pa.int64()) for n in ("schema", "turn", "pass", "seed", "n_tokens", "peak_bytes")]
        + [(n, pa.int64()) for n in ("target_forwards", "draft_forwards", "version")]
        + [(n, text) for n in ("prompt_id", "cluster", "task", "family", "category", "finish")]
        + [(n, text) for n in ("method", "label", "sampling", "guarantee", "error")]
        + [(n, text) for n in ("params_passed", "params_effective", "params_source", "worker")]
        + [(n, text) for n in ("forwards_kinds", "drafts", "extra", "synthetic")]
        + [(n, pa.bool_()) for n in ("peer", "void", "verdict_rounding", "valid")]
        + [(n, number) for n in ("other_cpu", "score", "verdict_gap", "log_likelihood", "energy_j")]
        + [("target_equivalents", number)]
        + [
            (f"likelihood_{f.name}", pa.list_(number) if f.name == "cumulants" else number)
            for f in fields(Likelihood)
        ]
        + [
            (f"batch_{f.name}", text if f.name == "load" else pa.int64())
            for f in fields(BatchMembership)
        ]
        + [("verdict_kind", text)]
        + [(n, pa.int64()) for n in ("verdict_position", "verdict_expected")]
        + [("output_ids", ints), ("origin", pa.list_(text)), ("log_probs", pa.list_(number))]
        + [(f"ns_{f.name}", pa.int64()) for f in fields(Ns)]
        + [(f"steps_{f.name}", ints) for f in fields(Steps)]
        + [(f"forwards_{f.name}", ints) for f in fields(Trace) if f.name not in _NESTED]
        + [("forwards_messages", pa.list_(ints))]
    )


def _flatten(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in asdict(record).items():
        if isinstance(value, dict) and name != "extra":
            row |= {f"{name}_{key}": inner for key, inner in value.items()}
        else:
            row[name.rstrip("_")] = value
    for name in ("params_passed", "params_effective", "forwards_kinds", "drafts", "extra"):
        if row.get(name) is not None:
            row[name] = json.dumps(row[name])
    return row
