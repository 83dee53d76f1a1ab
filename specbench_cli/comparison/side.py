"""One side of a comparison: what is needed of a run, or of several runs of one program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specbench_cli.comparison.cell import ComparedOutput, PairKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """A row as its run says it.

    timing_free: whether steps are the same however fast the machine is; null where the run does not
    say. models: what it drafts with: "draft" or another model's name, the kind of a head; null
    where neither the run nor a trace says.
    """

    label: str
    method: str
    params: Mapping[str, Any]
    timing_free: bool | None
    models: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """BASE or NEW.

    facts: what must be the same, in the words of `report.belonging`, and the devices of workers.
    machine: its id. status: of the run ("finished", "running", "interrupted"). prompts: what was
    asked, by prompt and turn: a digest of text and token ids; nothing where they were not kept.
    cells: of the first run, its passes included. processes: every process's cells (the passes of a
    run are processes, and so are further runs of one program), for the timing gate. began: when
    each one's run began; nothing where that is not known. left_out: runs whose times are not among
    them, and why, a sentence each.
    """

    name: str
    created_utc: str
    facts: Mapping[str, str]
    machine: str | None
    noisy: bool
    rows: Mapping[str, RowFacts]
    cells: Mapping[PairKey, ComparedOutput]
    processes: tuple[tuple[ComparedOutput, ...], ...] = field(default=())
    start_times: tuple[str | None, ...] = ()
    left_out: tuple[str, ...] = ()
    prompts: Mapping[tuple[str, int], str] = field(default_factory=dict)
    status: str = "finished"


_DEFAULT_FACTS = {"grammar": "None", "contrast": "None", "acceptance": "None"}
"""Facts that sides from before do not say, and what they would."""


def describe_changed_facts(facts: Iterable[str], base: Side, new: Side) -> list[str]:
    """Those of some facts that both sides say, and differently: `seed 0 -> 1`."""
    was, now = (_DEFAULT_FACTS | dict(side.facts) for side in (base, new))
    return [
        f"{fact} {_format_value(was[fact])} -> {_format_value(now[fact])}"
        for fact in facts
        if fact in was and fact in now and was[fact] != now[fact]
    ]


def describe_changed_params(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Parameters of a row that differ: `nodes 16 -> 15`."""
    return [
        f"{name} {was.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in {**was, **now}
        if name not in was or name not in now or was[name] != now[name]
    ]


def _format_value(value: str) -> str:
    return "not set" if value == "None" else value
