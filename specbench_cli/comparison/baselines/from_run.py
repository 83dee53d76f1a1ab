"""Conversion of run folders to sides of a comparison.

Only the data that a comparison needs is kept from each record.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from specbench_cli.comparison.compared_output import ComparedOutput, Counters, PairKey, Times
from specbench_cli.comparison.side import RowFacts, Side
from specbench_cli.errors import UsageError
from specbench_cli.store.jsonl import pause_garbage_collection
from specbench_cli.store.record_queries import no_output_error
from specbench_cli.store.run_dir import RunDir
from specbench_cli.store.schema import Record, Steps, Trace
from specbench_cli.summary.compatibility import collect_facts
from specbench_cli.summary.pairing import untimed_reason

_DIGITS = 16
"""Number of hexadecimal digits of a digest in a baseline file."""
_TARGET = "target"


def read_run(path: Path) -> Side:
    """Read a run as one side of a comparison.

    Raises:
        UsageError: there is no run, it is damaged, or it has no record.
    """
    run = RunDir.open(path)
    outputs: dict[PairKey, ComparedOutput] = {}
    processes: dict[int, list[ComparedOutput]] = defaultdict(list)
    seen: dict[str, RowFacts] = {}
    with pause_garbage_collection():
        for output, row in run.map_records(_output_and_row):
            outputs[output.key] = output
            processes[output.key.pass_].append(output)
            seen[row.label] = _merge_row(seen.get(row.label), row)
    if not outputs:
        raise no_output_error(path)
    answered = {key.prompt_turn for key in outputs}
    try:
        return Side(
            name=path.resolve().name,
            created_utc=str(run.manifest.get("created_utc", "")),
            facts=_facts(run),
            machine=run.manifest.get("machine", {}).get("id"),
            noisy=bool(run.manifest.get("noisy", False)),
            rows=_rows(run.manifest, seen),
            outputs=dict(sorted(outputs.items())),
            processes=tuple(
                tuple(sorted(processes[number], key=lambda output: output.key))
                for number in sorted(processes)
            ),
            start_times=(run.manifest.get("created_utc"),) * len(processes),
            prompts={
                (prompt.prompt_id, prompt.turn): _digest([prompt.text, prompt.ids])
                for prompt in run.prompts()
                if (prompt.prompt_id, prompt.turn) in answered
            },
            status=str(run.manifest.get("status", "finished")),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path / 'manifest.json'} is damaged: it is not the manifest of a run ({error!r})",
            hint="start a new run: specbench run",
        ) from error


def output_from_record(record: Record) -> ComparedOutput:
    """Reduce a record to the data that a comparison needs."""
    lost = untimed_reason(record) is not None
    return ComparedOutput(
        key=PairKey(record.prompt_id, record.turn, record.label, record.pass_, record.seed),
        task=record.task,
        family=record.family,
        cluster=record.cluster,
        method=record.method,
        sampling=record.sampling,
        guarantee=record.guarantee,
        peer=record.peer,
        ids=None if record.output_ids is None else _digest(record.output_ids),
        counters=_counters(record, record.steps),
        finish=record.finish,
        verdict=None if record.verdict is None else record.verdict.kind,
        error=record.error,
        times=None if lost else _times(record),
    )


def _counters(record: Record, steps: Steps | None) -> Counters:
    return Counters(
        n_tokens=record.n_tokens,
        committed=None if steps is None else sum(steps.committed),
        steps=None if steps is None else len(steps.levels),
        levels=None if steps is None else sum(steps.levels),
        nodes=None if steps is None else sum(steps.nodes),
        tested=None if steps is None else sum(steps.tested),
        accepted=None if steps is None else sum(steps.accepted),
        target_forwards=record.target_forwards,
        draft_forwards=record.draft_forwards,
    )


def _times(record: Record) -> Times:
    ns = record.ns
    draft, verify, fastest = (
        (None,) * 3 if record.forwards is None else _forward_times(record.forwards)
    )
    return Times(
        decode=ns.decode,
        draft=ns.draft,
        verify=ns.verify,
        host=ns.host,
        draft_forward=draft,
        verify_forward=verify,
        total=ns.total,
        draft_fastest=fastest,
    )


def _forward_times(trace: Trace) -> tuple[int | None, int | None, int | None]:
    """Return three times in ns: of draft forwards, verify forwards, and the fastest draft forwards.

    Forwards are of the same kind if they have the same model, layers and number of tokens. The
    first two times are medians, and the third is a minimum. Each is computed per kind, and then
    averaged over the kinds. A time is None if there is no such forward. Cancelled forwards do not
    count, because they ended early.
    """
    cancelled, durations = set(trace.unused), defaultdict[tuple[int, int], list[int]](list)
    for place, (kind, n, t0, t1) in enumerate(
        zip(trace.kind, trace.n_tokens, trace.t0_ns, trace.t1_ns, strict=True)
    ):
        if place not in cancelled:
            durations[kind, n].append(t1 - t0)
    draft, verify = (
        [own for (kind, _), own in durations.items() if trace.kinds[kind].role == role]
        for role in ("draft", "verify")
    )
    return _weighted_mean(draft, median), _weighted_mean(verify, median), _weighted_mean(draft, min)


def _weighted_mean(
    durations: Sequence[Sequence[int]], summarize: Callable[[Sequence[int]], float]
) -> int | None:
    """Return the mean of a summary (median or minimum) over kinds of forwards.

    Each kind is weighted by its number of forwards.
    """
    count = sum(map(len, durations))
    return round(sum(len(own) * summarize(own) for own in durations) / count) if count else None


def _facts(run: RunDir) -> dict[str, str]:
    found, config = collect_facts(run), run.manifest.get("config", {}).get("effective", {})
    if devices := config.get("devices"):
        found["devices"] = ",".join(f"{role}={device}" for role, device in devices.items())
    if "load" in config:
        found["load"] = str(config["load"])
    return found


def _output_and_row(record: Record) -> tuple[ComparedOutput, RowFacts]:
    """Reduce a record to the data that a comparison needs about the output and its method."""
    models = None
    if record.forwards is not None:
        models = tuple(sorted({kind.model for kind in record.forwards.kinds} - {_TARGET}))
    return output_from_record(record), RowFacts(
        label=record.label,
        method=record.method,
        params=record.params.effective,
        timing_free=None,
        models=models,
    )


def _merge_row(before: RowFacts | None, row: RowFacts) -> RowFacts:
    """Merge the facts about a method from two records: the models of both records are kept."""
    if before is None or before.models is None or row.models == before.models:
        return row
    models = before.models if row.models is None else {*before.models, *row.models}
    return replace(row, models=tuple(sorted(models)))


def _rows(manifest: Mapping[str, Any], seen: Mapping[str, RowFacts]) -> dict[str, RowFacts]:
    """Return the facts about each method that has outputs, in the order of the manifest.

    A manifest of an older version lacks some facts. These are taken from the records.

    Args:
        seen: facts from the records, by label of the method.
    """
    rows: dict[str, RowFacts] = {}
    for row in manifest.get("rows") or ():
        if found := seen.get(row["label"]):
            uses = row.get("uses")
            rows[found.label] = replace(
                found,
                params=row.get("params", found.params),
                timing_free=row.get("timing_free"),
                models=found.models if uses is None else tuple(uses),
            )
    return rows | {label: found for label, found in seen.items() if label not in rows}


def _digest(value: Iterable[Any]) -> str:
    text = json.dumps(value, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
