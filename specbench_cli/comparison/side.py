"""One side of a comparison (BASE or NEW): a run, or several runs of one program version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specbench_cli.comparison.compared_output import ComparedOutput, PairKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Facts about a method of a run.

    timing_free: True if the method's steps do not depend on timing; None if unknown.
    models: models that the method drafts with: "draft", another model's name, or a kind of head.
        None if unknown.
    """

    label: str
    method: str
    params: Mapping[str, Any]
    timing_free: bool | None
    models: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """BASE or NEW: the data of a run that a comparison needs.

    facts: settings and versions of the run (`summary.compatibility`), and the devices of workers.
        machine: id of the machine.
    rows: facts about each method, by label.
    outputs: outputs of the first run, with all its repeats.
    processes: outputs of every process, for the timing gate. A process is a repeat of one of the
        runs.
    start_times: start time of each process's run; empty if unknown.
    left_out: sentences on runs whose times are not included.
    prompts: digest of each prompt's text and token ids, by prompt and turn; empty if not stored.
    status: status of the run ("finished", "running", "interrupted").
    """

    name: str
    created_utc: str
    facts: Mapping[str, str]
    machine: str | None
    noisy: bool
    rows: Mapping[str, RowFacts]
    outputs: Mapping[PairKey, ComparedOutput]
    processes: tuple[tuple[ComparedOutput, ...], ...] = field(default=())
    start_times: tuple[str | None, ...] = ()
    left_out: tuple[str, ...] = ()
    prompts: Mapping[tuple[str, int], str] = field(default_factory=dict)
    status: str = "finished"


_DEFAULT_FACTS = {"grammar": "None", "contrast": "None", "acceptance": "None"}
"""Defaults of facts that older sides do not have."""


def describe_changed_facts(facts: Iterable[str], base: Side, new: Side) -> list[str]:
    """Describe the facts that both sides have with different values, such as `seed 0 -> 1`."""
    was, now = (_DEFAULT_FACTS | dict(side.facts) for side in (base, new))
    return [
        f"{fact} {_format_value(was[fact])} -> {_format_value(now[fact])}"
        for fact in facts
        if fact in was and fact in now and was[fact] != now[fact]
    ]


def describe_changed_params(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the parameters of a method that differ, such as `nodes 16 -> 15`."""
    return [
        f"{name} {was.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in {**was, **now}
        if name not in was or name not in now or was[name] != now[name]
    ]


def _format_value(value: str) -> str:
    return "not set" if value == "None" else value
