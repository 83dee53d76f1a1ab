"""Latency, throughput and goodput of requests that arrive at given times (`--load`).

TTFT (time to first token) and latency start when a request arrives, so they include the time in the
queue. Time per token starts at the first token. Goodput is the number of output tokens per second,
without rejected draft tokens (as in SmartSpec, arXiv:2406.14066). Intervals are 95% percentile
bootstrap intervals. Blocks of consecutive requests are resampled, since queued requests depend on
each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from specbench_cli.store.schema import Record
from specbench_cli.summary.columns import Column, Value, row_data, select_informative
from specbench_cli.summary.formats import NONE

Floats = NDArray[np.float64]
Parts = Sequence[Floats]
"""Values of a metric, one array per repeat, one value per request."""
RequestTimes = tuple[Floats, Floats, Floats, Floats]
"""Times of the requests of a repeat: arrival, first token, last token, and number of tokens.

Each array has one value per request. Times are in seconds since the start of the timer.
"""

PERCENTILES = (50, 90, 99)
RESAMPLES = 999


@dataclass(frozen=True)
class LoadRow:
    """Times of the requests of one method under one load, in the order of arrival.

    load: Option `--load`, as typed. None in older records.
    requests: Number of finished requests.
    ttft, latency: Seconds.
    per_token: Milliseconds per token, for requests with several tokens.
    gaps: Seconds between the ends of consecutive requests. The first gap starts at the first
        arrival.
    tokens: Number of output tokens, in the order in which requests end.
    offered_rate: Requests per second between the first and the last arrival. None if all arrive at
        once.
    saturated: True if most requests waited longer for their first token than they were decoded.
    """

    label: str
    load: str | None
    requests: int
    ttft: Parts
    per_token: Parts
    latency: Parts
    gaps: Parts
    tokens: Parts
    offered_rate: float | None
    saturated: bool

    @classmethod
    def from_requests(cls, label: str, load: str | None, passes: Sequence[RequestTimes]) -> Self:
        """Compute the row of a method from its requests. Arrivals are the same in all repeats."""
        ttft, per_token, latency, gaps, tokens = [], [], [], [], []
        for arrived, first, ended, counts in passes:
            by_arrival = np.argsort(arrived, kind="stable")
            with_several_tokens = by_arrival[counts[by_arrival] > 1]
            ttft.append((first - arrived)[by_arrival])
            latency.append((ended - arrived)[by_arrival])
            per_token.append(
                1e3 * (ended - first)[with_several_tokens] / (counts[with_several_tokens] - 1)
            )
            by_end = np.argsort(ended, kind="stable")
            gaps.append(np.diff(ended[by_end], prepend=arrived.min()))
            tokens.append(counts[by_end])
        waits, latencies = np.concatenate(ttft), np.concatenate(latency)
        span = float(np.ptp(passes[0][0]))
        return cls(
            label=label,
            load=load,
            requests=len(latencies),
            ttft=ttft,
            per_token=per_token,
            latency=latency,
            gaps=gaps,
            tokens=tokens,
            offered_rate=(len(passes[0][0]) - 1) / span if span > 0 else None,
            saturated=bool(np.mean(waits > latencies - waits) > 0.5),
        )

    def typical(self) -> Floats:
        """Return the latency of each request in seconds, as the median over the repeats of the run.

        If repeats have different numbers of requests, return the latencies of all repeats.
        """
        if len({len(part) for part in self.latency}) > 1:
            return np.concatenate(self.latency)
        return np.asarray(np.median(np.stack(self.latency), axis=0))

    @property
    def throughput(self) -> float:
        """Requests per second, from the first arrival to the last token."""
        return self.requests / float(np.concatenate(self.gaps).sum())

    @property
    def goodput(self) -> float:
        """Output tokens per second, from the first arrival to the last token."""
        return float(np.concatenate(self.tokens).sum() / np.concatenate(self.gaps).sum())

    @cached_property
    def figures(self) -> Mapping[str, tuple[float, float, float]]:
        """Throughput, goodput and percentiles of TTFT, latency and time per token.

        Each is (value, low, high), with the ends of its interval. If no request has a time, the
        percentiles of this time are missing.
        """
        gaps, tokens = resample_blocks(self.gaps).sum(1), resample_blocks(self.tokens).sum(1)
        found = {
            "requests_per_s": (self.throughput, *_ends(self.requests / gaps)),
            "tokens_per_s": (self.goodput, *_ends(tokens / gaps)),
        }
        named = {"ttft_s": self.ttft, "ms_per_token": self.per_token, "latency_s": self.latency}
        for name, parts in named.items():
            whole = np.concatenate(parts)
            if len(whole):
                drawn = np.percentile(resample_blocks(parts), PERCENTILES, axis=1)
                for percent, value, draws in zip(
                    PERCENTILES, np.percentile(whole, PERCENTILES), drawn, strict=True
                ):
                    found[f"{name}_p{percent}"] = (float(value), *_ends(draws))
        return found


def load_rows(records: Sequence[Record]) -> list[LoadRow]:
    """Return one row per method and load. Return [] if requests did not arrive over time.

    Methods are in the order of the records. The rows of a method are sorted by arrival rate.
    """
    rows: dict[str, dict[str | None, list[Record]]] = {}
    for record in records:
        if record.error is None and not record.void and record.batch and record.batch.first:
            own = rows.setdefault(record.label, {})
            own.setdefault(record.batch.load, []).append(record)
    found = []
    for label, loads in rows.items():
        load_rows_ = [_row(label, load, own) for load, own in loads.items()]
        found += sorted(load_rows_, key=lambda row: row.offered_rate or math.inf)
    return found


def _row(label: str, load: str | None, records: Sequence[Record]) -> LoadRow:
    passes: dict[int, list[Record]] = {}
    for record in records:
        passes.setdefault(record.pass_, []).append(record)
    passes_times = []
    for own in passes.values():
        batches = [record.batch for record in own if record.batch is not None]
        arrived, first, ended = (
            np.array([getattr(batch, of) or 0 for batch in batches]) / 1e9
            for of in ("arrived", "first", "finished")
        )
        tokens = np.array([record.n_tokens or 0 for record in own], dtype=np.float64)
        passes_times.append((arrived, first, ended, tokens))
    return LoadRow.from_requests(label, load, passes_times)


def resample_blocks(parts: Parts) -> Floats:
    """Return block bootstrap resamples of n values of a metric: [RESAMPLES, n].

    Each repeat is resampled in circular blocks of n^(1/3) consecutive requests (Hall, Horowitz,
    Jing 1995). Metrics with the same number of values get the same resampled requests.
    """
    draw, found = np.random.default_rng(0), []
    for part in parts:
        n = len(part)
        if n:
            block = math.ceil(n ** (1 / 3))
            starts = draw.integers(n, size=(RESAMPLES, -(-n // block), 1))
            drawn = (starts + np.arange(block)).reshape(RESAMPLES, -1)[:, :n] % n
            found.append(part[drawn])
    return np.concatenate(found, axis=1)


def _ends(draws: Floats) -> tuple[float, float]:
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)


def as_dict(row: LoadRow) -> Mapping[str, object]:
    """Return a row as a mapping for programs: rates and percentiles with their intervals."""
    return row_data(select_informative(DATA, [row]), row)


def latency_errors(
    modelled: Sequence[LoadRow], measured: Sequence[LoadRow]
) -> list[dict[str, Any]]:
    """Return the relative errors of modelled p50 and p99 latency against measured ones.

    Only methods that were measured under the same load are included. The latency of a request is
    its median over the repeats. Otherwise the p99 would show single disturbances of the machine,
    which no simulation can predict.
    """
    known = {(row.label, row.load): row for row in measured}
    found = []
    for row in modelled:
        other = known.get((row.label, row.load))
        if other is not None:
            (half, most), (own_half, own_most) = (
                np.percentile(each.typical(), (50, 99)) for each in (row, other)
            )
            relative_errors = {
                "latency_s_p50_error": float(half / own_half - 1),
                "latency_s_p99_error": float(most / own_most - 1),
            }
            found.append({"method": row.label, "load": row.load, **relative_errors})
    return found


# ---- saturation ----------------------------------------------------------------------------------


def saturation_notes(rows: Sequence[LoadRow]) -> list[str]:
    """Return a note for each method with several arrival rates: the rate at which it saturates."""
    by_label: dict[str, list[LoadRow]] = {}
    for row in rows:
        if row.offered_rate is not None:
            by_label.setdefault(row.label, []).append(row)
    return [
        f"{label}: {_describe_saturation(own)}" for label, own in by_label.items() if len(own) > 1
    ]


def saturation_index(rows: Sequence[LoadRow]) -> int:
    """Return the index of the lowest arrival rate from which on a method is saturated.

    If it is not saturated at the highest rate, return the number of rates.

    Args:
        rows: Rows of one method, lowest rate first.
    """
    return 1 + max((at for at, row in enumerate(rows) if not row.saturated), default=-1)


def _describe_saturation(rows: Sequence[LoadRow]) -> str:
    """Describe the saturation of one method.

    Args:
        rows: Rows of the method, lowest rate first.
    """
    first = saturation_index(rows)
    if first == len(rows):
        return f"not saturated up to {rows[-1].offered_rate:.3g} requests/s"
    most = max(rows, key=lambda row: row.goodput)
    below = f", not at {rows[first - 1].offered_rate:.3g}" if first else ", the lowest rate"
    return (
        f"saturated from {rows[first].offered_rate:.3g} requests/s on{below}; at most"
        f" {most.throughput:.3g} requests/s and {most.goodput:.0f} tokens/s"
    )


# ---- columns -------------------------------------------------------------------------------------

TITLE = "Under load"
NOTE = (
    "Times start when a request arrives, so they include the time in the queue. Intervals are 95%"
    " bootstrap intervals over blocks of requests. Goodput: output tokens per second. Saturated:"
    " most requests waited longer for their first token than they were decoded."
)


def _interval(row: LoadRow, name: str) -> str:
    if name not in row.figures:
        return NONE
    value, low, high = row.figures[name]
    return f"{value:.3g} [{low:.3g}, {high:.3g}]"


def _figure(heading: str, name: str) -> Column[LoadRow]:
    """Return the column of a metric with its interval."""

    def end(at: int) -> Callable[[LoadRow], Value]:
        return lambda row: row.figures[name][at] if name in row.figures else None

    return Column(
        heading,
        format=lambda row: _interval(row, name),
        data={name: end(0), f"{name}_low": end(1), f"{name}_high": end(2)},
        when=lambda rows: any(name in row.figures for row in rows),
    )


def _percentiles(heading: str, key: str) -> list[Column[LoadRow]]:
    """Return one column per percentile of a time. The first heading has the name of the time."""
    before = (f"{heading} ", *("" for _ in PERCENTILES[1:]))
    return [
        _figure(f"{time}p{percent}", f"{key}_p{percent}")
        for time, percent in zip(before, PERCENTILES, strict=True)
    ]


def _percentiles_column(heading: str, parts: Callable[[LoadRow], Parts]) -> Column[LoadRow]:
    """Return a column whose cells have all percentiles of a time."""

    def format_row(row: LoadRow) -> str:
        whole = np.concatenate(parts(row))
        if not len(whole):
            return NONE
        return " /".join(f"{each:5.2f}" for each in np.percentile(whole, PERCENTILES))

    return Column(heading, align="c", format=format_row)


def _last(row: LoadRow) -> str:
    _, low, high = row.figures["latency_s_p99"]
    return f"[{low:.2f}, {high:.2f}]"


def _format_offered_rate(row: LoadRow, at_once: str) -> str:
    return at_once if row.offered_rate is None else f"{row.offered_rate:.3g}"


_METHOD: Column[LoadRow] = Column(
    "method", align="l", format=lambda row: row.label, data={"method": lambda row: row.label}
)
_LOAD: Column[LoadRow] = Column(
    "load",
    format=lambda row: row.load or NONE,
    data={"load": lambda row: row.load, "requests": lambda row: row.requests},
)
_OFFERED: Column[LoadRow] = Column(
    "offered /s",
    format=lambda row: _format_offered_rate(row, "all at once"),
    data={"offered_per_s": lambda row: row.offered_rate},
)
_SATURATED: Column[LoadRow] = Column(
    "",
    align="l",
    format=lambda row: "saturated" if row.saturated else "",
    data={"saturated": lambda row: row.saturated},
)
_FIGURES = (
    _figure("requests /s", "requests_per_s"),
    _figure("goodput tok/s", "tokens_per_s"),
    *_percentiles("TTFT s", "ttft_s"),
    *_percentiles("ms/token", "ms_per_token"),
    *_percentiles("latency s", "latency_s"),
)
DATA = (_METHOD, _LOAD, _OFFERED, _SATURATED, *_FIGURES)
"""Columns of CSV and JSON."""
PAGE = (_METHOD, _OFFERED, *_FIGURES, _SATURATED)
"""Columns of the HTML table."""
TERMINAL: tuple[Column[LoadRow], ...] = (
    replace(_METHOD, heading=""),
    Column("offered", format=lambda row: _format_offered_rate(row, "at once")),
    Column("req/s", format=lambda row: f"{row.throughput:.2f}"),
    Column("tok/s", format=lambda row: f"{row.goodput:.0f}"),
    _percentiles_column("TTFT s", lambda row: row.ttft),
    _percentiles_column("ms/token", lambda row: row.per_token),
    _percentiles_column("latency s", lambda row: row.latency),
    Column("", align="l", format=_last),
    _SATURATED,
)
"""Columns of the terminal table, below `HEAD`."""
HEAD = "p50 / p90 / p99, with the 95% interval of the latency's p99"
