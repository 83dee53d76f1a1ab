"""Options of `specbench recommend` that are not also settings of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from specbench_cli.config.options import OUTPUT, TRUST, WHAT, Option
from specbench_cli.config.problems import shorten

OTHER_MACHINES = "Other machines and batch sizes"
"""Heading in the help for options about other batch sizes and machines."""


MAX_MINUTES = 100_000
"""Maximum time budget in minutes (69 days)."""


def _minutes(value: Any) -> Any:
    try:
        minutes = float(value)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes <= MAX_MINUTES:
        got = shorten(repr(value))
        raise ValueError(f"must be a number of minutes up to {MAX_MINUTES:,}, got {got}")
    return minutes


def _batch_sizes(value: Any) -> Any:
    """Parse batch sizes separated by commas. The value 0 means no batch sizes."""
    words = [word.strip() for word in str(value).split(",") if word.strip()]
    sound = all(word.isdecimal() and len(word) <= 6 for word in words)
    if not words or not sound or len(set(words)) < len(words):
        raise ValueError(
            "must be whole numbers below a million, separated by commas such as 2,4,8, or 0 for"
            f" none; got {shorten(repr(value))}"
        )
    return [int(word) for word in words if int(word) > 1]


class RecommendInvocation(BaseModel):
    """Options of `specbench recommend` that are not settings of the runs that it starts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    minutes: Annotated[
        float,
        BeforeValidator(_minutes),
        Option(WHAT, "MINUTES", "Time budget, in minutes."),
    ] = 10.0
    config: Annotated[
        Path | None,
        Option(WHAT, "FILE", "Read settings from a YAML file.", default="./specbench.yaml"),
    ] = None
    batches: Annotated[
        list[int],
        BeforeValidator(_batch_sizes),
        Option(
            OTHER_MACHINES,
            "N,N",
            "Batch sizes for which to predict the throughput. 0 means none.",
            as_text=True,
        ),
    ] = Field([2, 4, 8], validate_default=False)
    costs: Annotated[
        Path | None,
        Option(
            OTHER_MACHINES,
            "FILE",
            "Times of forward passes on this machine, measured by specbench predict --probe"
            " --batch 8.",
            default="in the cache folder",
        ),
    ] = None
    against: Annotated[
        list[Path],
        Option(
            OTHER_MACHINES,
            "FILE",
            "Times of forward passes on another machine, measured in the same way. Predict the"
            " methods' times there.",
        ),
    ] = []
    out: Annotated[
        Path | None,
        Option(OUTPUT, "DIR", "Output folder.", default="results/runs/NAME", short="-o"),
    ] = None
    as_json: Annotated[
        bool, Option(OUTPUT, None, "Print one JSON event per line.", name="--json")
    ] = False
    resume: Annotated[
        Path | None, Option(OUTPUT, "DIR", "Resume an interrupted recommendation.")
    ] = None
    force: Annotated[
        bool,
        Option(
            OUTPUT,
            None,
            "With --resume: continue even if the program, the machine or the data changed.",
        ),
    ] = False
    trust: Annotated[bool, TRUST] = False
