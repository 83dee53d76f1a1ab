"""Latencies and throughput of requests that arrive by the clock (`--load`).

TTFT (time to first token) and latency begin when a request arrives, so that waiting for a seat is
part of them. ms a token: from the first token on. Intervals: 95%, percentile bootstrap over
requests; those of a queue depend on each other, so that a true interval is wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbench_cli.store.schema import Record

Floats = NDArray[np.float64]

PERCENTILES = (50, 90, 99)
RESAMPLES = 999


@dataclass(frozen=True, slots=True)
class LoadRow:
    """What requests of one row met.

    requests: how many came to an end. seconds: from the first arrival to the last token.
    tokens: of all outputs. ttft, latency: seconds; per_token: milliseconds; one a request.
    offered: requests a second between the first and the last arrival; None where all came at once.
    saturated: whether most of them waited longer for their first token than it took to decode them.
    """

    label: str
    requests: int
    seconds: float
    tokens: int
    ttft: Floats
    per_token: Floats
    latency: Floats
    offered: float | None
    saturated: bool


def load_rows(records: Sequence[Record]) -> list[LoadRow]:
    """The rows of a run under load, in the order of its records; none of another run."""
    rows: dict[str, list[Record]] = {}
    for record in records:
        if record.error is None and not record.void and record.batch and record.batch.first:
            rows.setdefault(record.label, []).append(record)
    return [_row(label, own) for label, own in rows.items()]


def _row(label: str, records: Sequence[Record]) -> LoadRow:
    batches = [record.batch for record in records if record.batch is not None]
    arrived = np.array([batch.arrived or 0 for batch in batches]) / 1e9
    first = np.array([batch.first or 0 for batch in batches]) / 1e9
    ended = np.array([batch.finished for batch in batches]) / 1e9
    tokens = np.array([record.n_tokens or 0 for record in records])
    passes = np.array([record.pass_ for record in records])
    seconds = sum(
        float(ended[passes == number].max() - arrived[passes == number].min())
        for number in np.unique(passes)
    )
    span = float(arrived.max() - arrived.min())
    decoding, n = ended - first, int((passes == passes[0]).sum())
    return LoadRow(
        label=label,
        requests=len(records),
        seconds=seconds,
        tokens=int(tokens.sum()),
        ttft=first - arrived,
        per_token=1e3 * decoding[tokens > 1] / (tokens[tokens > 1] - 1),
        latency=ended - arrived,
        offered=(n - 1) / span if span > 0 else None,
        saturated=bool(np.mean(first - arrived > decoding) > 0.5),
    )


def interval(values: Floats, percent: float) -> tuple[float, float]:
    """A 95% interval of a percentile."""
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.percentile(values[draws], percent, axis=1), (2.5, 97.5))
    return float(low), float(high)


def as_dict(row: LoadRow) -> Mapping[str, object]:
    """A row for programs: percentiles with their intervals, by name."""
    figures = {"ttft_s": row.ttft, "ms_per_token": row.per_token, "latency_s": row.latency}
    found: dict[str, object] = {
        "method": row.label,
        "requests": row.requests,
        "offered_per_s": row.offered,
        "requests_per_s": row.requests / row.seconds,
        "tokens_per_s": row.tokens / row.seconds,
        "saturated": row.saturated,
    }
    for name, values in figures.items():
        for percent in PERCENTILES if len(values) else ():
            low, high = interval(values, percent)
            key = f"{name}_p{percent}"
            found[key] = float(np.percentile(values, percent))
            found[f"{key}_low"], found[f"{key}_high"] = low, high
    return found


def load_lines(records: Sequence[Record]) -> list[str]:
    """The rows as a table of text; none of a run without load."""
    rows = load_rows(records)
    if not rows:
        return []
    wide = max(8, *(len(row.label) for row in rows))
    offered = rows[0].offered
    arriving = "all at once" if offered is None else f"{offered:.3g} requests/s offered"
    lines = [
        f"under load ({arriving}); p50 / p90 / p99, with the 95% interval of the latency's p99",
        f" {'':{wide}}  req/s  tok/s  {'TTFT s':^18} {'ms/token':^18} {'latency s':^18}",
    ]
    for row in rows:
        low, high = interval(row.latency, 99)
        lines.append(
            f" {row.label:{wide}} {row.requests / row.seconds:6.2f} {row.tokens / row.seconds:6.0f}"
            f"  {_three(row.ttft)} {_three(row.per_token)} {_three(row.latency)}"
            f" [{low:.2f}, {high:.2f}]" + ("  saturated" if row.saturated else "")
        )
    return lines


def _three(values: Floats) -> str:
    if not len(values):
        return f"{'-':^18}"
    return " /".join(f"{each:5.2f}" for each in np.percentile(values, PERCENTILES))
