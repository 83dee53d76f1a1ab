"""Arrival times of requests, for the option `--load`.

Requests arrive whether or not earlier requests are finished.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from specbench_cli import files
from specbench_cli.config import problems
from specbench_cli.config.sweep import format_value, parse_values

MAX_BYTES = 64 * files.MB
"""Maximum size of a trace file in bytes."""

SYNTAX = (
    "poisson:RATE (requests per second), burst:SIZE:SECONDS or trace:FILE (one time in s per line)"
)
"""Syntax of `--load`, for errors."""


def count_loads(text: str) -> int:
    """Return how many different loads a value of `--load` describes.

    Raises:
        ValueError: the value is not a list or range of rates.
    """
    kind, _, rest = text.partition(":")
    return len(parse_values(rest)) if kind == "poisson" else 1


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival times of requests.

    Attributes:
        kind: "poisson": requests arrive independently, on average `rate` per second. "burst":
            `size`
            requests arrive at once, every `seconds`. "trace": the times come from a file.
        text: The user's value of `--load`, e.g. `poisson:4`.
        trace_times: Arrival times of a trace in seconds, in ascending order.
    """

    kind: str
    text: str
    rate: float = 0.0
    size: int = 0
    seconds: float = 0.0
    trace_times: tuple[float, ...] = ()

    @classmethod
    def parse_sweep(cls, text: str) -> tuple[Arrivals, ...]:
        """Parse a value of `--load` with one or more rates, e.g. `poisson:1,2,4` or
        `poisson:1:8:1`.

        Raises:
            ValueError: The value is invalid. The message describes the syntax.
        """
        kind, _, rest = text.partition(":")
        if kind != "poisson":
            return (cls.parse(text),)
        try:
            rates = parse_values(rest)
        except ValueError as error:
            shown = problems.shorten(repr(text))
            raise ValueError(f"{shown}: RATE {error}; use {SYNTAX}") from error
        return tuple(cls.parse(f"poisson:{format_value(rate)}") for rate in rates)

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Parse a value of `--load` with one rate, e.g. `poisson:4`.

        Raises:
            ValueError: The value is invalid. The message describes the syntax.
        """
        kind, _, rest = text.partition(":")
        shown = problems.shorten(repr(text))
        if kind == "poisson":
            rate = _parse_positive(rest, "RATE", text)
            return cls(kind, f"poisson:{rate:.12g}", rate=rate)
        if kind == "burst":
            size, _, seconds = rest.partition(":")
            if not size.isdecimal() or not 0 < len(size) <= 18 or int(size) < 1:
                raise ValueError(f"{shown}: SIZE must be a whole number above 0; use {SYNTAX}")
            return cls(
                kind, text, size=int(size), seconds=_parse_positive(seconds, "SECONDS", text)
            )
        if kind == "trace" and rest:
            return cls(kind, text, trace_times=_read_trace(Path(rest)))
        raise ValueError(f"must be {SYNTAX}, got {shown}")

    def times(self, n: int, seed: int) -> list[float]:
        """Return the arrival times of n requests, in seconds from the start of the measurement.

        Raises:
            ValueError: A trace has fewer than n requests.
        """
        if self.kind == "poisson":
            draw = random.Random(seed)
            return list(accumulate(draw.expovariate(self.rate) for _ in range(n)))
        if self.kind == "burst":
            return [at // self.size * self.seconds for at in range(n)]
        if n > len(self.trace_times):
            raise ValueError(
                f"{len(self.trace_times)} arrival times for {n} prompts: add lines, or use"
                f" --limit {len(self.trace_times)}"
            )
        return list(self.trace_times[:n])


def _parse_positive(text: str, what: str, typed: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        typed = problems.shorten(repr(typed))
        raise ValueError(f"{typed}: {what} must be a number above 0; use {SYNTAX}")
    return number


def _read_trace(path: Path) -> tuple[float, ...]:
    try:
        lines = files.read_text(path, MAX_BYTES).split("\n")
    except (OSError, ValueError) as error:  # a name with a null byte, or text that is not UTF-8
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"trace {path} cannot be read: {why}") from error
    times: list[float] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            time = float(line)
        except ValueError:
            time = math.nan
        if not 0 <= time < math.inf:
            shown = problems.shorten(repr(line.strip()))
            raise ValueError(f"trace {path}, line {number}: {shown} is not a time in seconds")
        times.append(time)
    _check_order(path, times)
    return tuple(times)


def _check_order(path: Path, times: Sequence[float]) -> None:
    if not times:
        raise ValueError(f"trace {path} has no arrival time")
    for at, (a, b) in enumerate(pairwise(times), start=2):
        if b < a:
            raise ValueError(f"trace {path}: arrival {at} at {b:g} s comes before the one at {a:g}")
