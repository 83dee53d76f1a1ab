"""One side of a comparison: what is needed of a run, or of several runs of one program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbench_cli.compare.cell import Cell, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """A row as its run says it. timing_free: whether steps are the same however fast the machine
    is; null where the run does not say. models: the drafts and heads whose forwards it made."""

    label: str
    method: str
    params: Mapping[str, Any]
    timing_free: bool | None
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """BASE or NEW.

    facts: what must be the same, in the words of `report.belonging`. machine: its id. cells: of the
    first process for every (prompt, turn, label, pass, seed). processes: every process's cells (the
    passes of a run are processes, and so are further runs saved in a baseline), for the timing
    gate; `cells` is the union of the first run's.
    """

    name: str
    created_utc: str
    facts: Mapping[str, str]
    machine: str | None
    noisy: bool
    rows: Mapping[str, RowFacts]
    cells: Mapping[Key, Cell]
    processes: tuple[tuple[Cell, ...], ...] = field(default=())
