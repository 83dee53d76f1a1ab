"""Predicted decode times of a run from a machine's costs, compared with the measured times.

Each recorded forward gets the time that a probe of the machine measured for its number of new
tokens and its context (`costs.TableCosts`). The trace is replayed with these times (`replay`).
Every step adds the time of the host's work.

- Trees: a step with more drafted tokens than levels drafted a tree. Its verification has the probed
  cost of trees.
- Warm weights: a target forward directly after another one finds the weights in the CPU caches. -
  Host work: taken from the method's own probe. Without one, it is taken from the probe of a draft
  model with chains or trees (`Costs.hosts`).
- Several probes: if the machine was probed several times, times are means over the probes.
- Several workers: only the busiest worker counts, as if the work of the other workers overlapped
  perfectly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean, median
from typing import Any

from specbench_cli.measure.costs import Costs
from specbench_cli.predict.costs import TableCosts
from specbench_cli.predict.replay import RecordedForwards, find_tree_steps, replay
from specbench_cli.predict.run_costs import head_labels, probe_command
from specbench_cli.store.schema import Record, Steps, Trace

ALL = "all"
"""Task or method name of rows over all tasks or methods."""


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """Predicted times of an output in ns.

    forwards: number of forwards.
    extrapolated: number of forwards outside the range that the probe measured.
    """

    prefill: float
    decode: float
    forwards: int
    extrapolated: int


@dataclass(frozen=True, slots=True)
class PredictedOutput:
    """Measured and predicted times of an output.

    measured: decode time in ns; None if it is noisy.
    predicted: times predicted with this machine's costs.
    elsewhere: times predicted with another machine's costs; None if no such costs are used.
    """

    label: str
    task: str
    measured: int | None
    predicted: PredictedTime
    elsewhere: PredictedTime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrediction:
    """Decode times of a method on a task, in ns, summed over outputs.

    measured, predicted: sums over the outputs with measured times.
    void: number of outputs without times (noisy).
    predicted_void: predicted time of the outputs without times.
    elsewhere: time predicted with another machine's costs, over all outputs.
    efficiency: predicted / measured.
    error: efficiency - 1.
    cell_error: median absolute value of the relative error over outputs.
    extrapolated: share of forwards outside the range that the probe measured.
    """

    label: str
    task: str
    outputs: int
    void: int
    measured: int | None
    predicted: float | None
    predicted_void: float | None
    elsewhere: float | None
    efficiency: float | None
    error: float | None
    cell_error: float | None
    extrapolated: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions by method and task.

    missing: label -> reason for methods without a prediction.
    """

    rows: tuple[TaskPrediction, ...]
    missing: dict[str, str]


def predict(
    records: Iterable[Record],
    manifest: Mapping[str, Any],
    costs: Costs,
    against: Costs | None,
    also: Sequence[Costs] = (),
) -> Prediction:
    """Predict the decode times of a run.

    Args:
        records: records of the run.
        manifest: the run's manifest, for the order of methods and tasks.
        costs: measured costs of the run's machine.
        against: measured costs of another machine, for which times are predicted too.
        also: costs of further probes of the run's machine.
    """
    outputs: dict[tuple[str, str], list[PredictedOutput]] = defaultdict(list)
    missing: dict[str, str] = {}
    for record in records:
        why = _unpredictable_reason(record, manifest, (costs, *also), against)
        if why is not None:
            missing.setdefault(record.label, why)
            continue
        assert record.forwards is not None
        assert record.steps is not None
        trace_and_steps = record.forwards, record.steps
        outputs[record.label, record.task].append(
            PredictedOutput(
                label=record.label,
                task=record.task,
                measured=None if record.void else record.ns.decode,
                predicted=_mean(
                    [
                        predict_output(*trace_and_steps, each, record.method)
                        for each in (costs, *also)
                    ]
                ),
                elsewhere=predict_output(*trace_and_steps, against, record.method)
                if against
                else None,
            )
        )
    labels = _sort_rows((row["label"] for row in _config(manifest).get("methods", [])), outputs, 0)
    tasks = _sort_rows((task["name"] for task in manifest.get("tasks", [])), outputs, 1)
    rows = []
    for label in labels:
        by_task = {task: outputs[label, task] for task in tasks if (label, task) in outputs}
        rows += [_row(label, task, group) for task, group in by_task.items()]
        if len(by_task) > 1:
            rows.append(_row(label, ALL, list(chain.from_iterable(by_task.values()))))
    if len(labels) > 1:
        rows.append(_row(ALL, ALL, list(chain.from_iterable(outputs.values()))))
    return Prediction(tuple(rows), {k: why for k, why in missing.items() if k not in labels})


def _mean(found: Sequence[PredictedTime]) -> PredictedTime:
    """Return the mean of the predictions of one output from several probes."""
    prefill, decode = (mean(getattr(each, of) for each in found) for of in ("prefill", "decode"))
    return replace(found[0], prefill=prefill, decode=decode)


def predict_output(trace: Trace, steps: Steps, costs: Costs, method: str = "") -> PredictedTime:
    """Predict the times of one output from its trace and the measured costs of a machine.

    Args:
        method: name of the method, used to find host costs that were probed for it.
    """
    table = TableCosts(costs)
    n_layers = {model: facts.get("n_layers") for model, facts in costs.models.items()}
    recording = RecordedForwards.from_trace(trace, steps, n_layers=n_layers)
    host = (
        method if method in costs.hosts else _host_kind(trace, any(find_tree_steps(steps)), costs)
    )
    drafts = sum(trace.kinds[kind].role in ("draft", "aux") for kind in trace.kind)
    host_ns = costs.host_ns(drafts, sum(steps.nodes), steps=len(steps.committed), method=host)
    after_rows = (each for each in recording.decoding if each.rows[0].before)
    prefills = (  # probes of a draft model's prefill do not include logits either
        each if each.model == "target" else replace(each, share=1.0) for each in recording.prefill
    )
    return PredictedTime(
        prefill=costs.host_ns(method=host) + sum(map(table, prefills)),
        decode=replay(recording, table).busiest + host_ns,
        forwards=len(trace.kind),
        extrapolated=sum(not table.covers(each) for each in after_rows),
    )


def _host_kind(trace: Trace, trees: bool, costs: Costs) -> str:
    """Return the key in `Costs.hosts` of the host costs of a method that was not probed itself.

    The key is "" for chains (`Costs.host`). For trees, it is the key of draft trees, or the name of
    the draft model in older files.
    """
    drafting = {kind.model for kind in trace.kinds} - {"target"}
    lines = sorted(drafting & costs.hosts.keys() - (set() if trees else {"draft"}))
    return lines[0] if lines else ""


def _unpredictable_reason(
    record: Record, manifest: Mapping[str, Any], costs: Sequence[Costs], against: Costs | None
) -> str | None:
    """Return the reason why a record cannot be replayed, with a command that solves the problem.

    Return None if the record can be replayed.
    """
    if record.error is not None:
        return "failed"
    if record.forwards is None or record.steps is None:
        return "its forwards are not metered"
    if _config(manifest).get("contrast") is not None:
        return "contrastive decoding runs two prompts per forward, but the probe measures one"
    if record.batch is not None:
        return "it decoded prompts in batches, but the probe measures one prompt; use --batch 1"
    models = {kind.model for kind in record.forwards.kinds}
    heads = {name: sha for name, sha in head_labels(manifest).items() if name in models}
    for each in filter(None, (*costs, against)):
        if lacking := sorted(models - each.curves.keys()):
            why = f"the probe has no costs of its {', '.join(lacking)}"
        elif other := sorted(
            name for name, sha in heads.items() if not each.covers_models({name: sha})
        ):
            why = f"the probe measured another {', '.join(other)}"
        else:
            continue
        options = [("--method", record.method)] if heads else []
        options += [
            ("--set", f"{record.method}.{name}={value}")
            for name, value in record.params.passed.items()
            if name == "head"
        ]
        more = [word for pair in options for word in pair]
        return f"{why}; {probe_command(manifest, *more)}"
    return None


def _row(label: str, task: str, outputs: Sequence[PredictedOutput]) -> TaskPrediction:
    timed = [output for output in outputs if output.measured is not None]
    untimed = [output for output in outputs if output.measured is None]
    measured = sum(output.measured or 0 for output in timed)
    predicted = sum(output.predicted.decode for output in timed)
    efficiency = predicted / measured if measured else None
    errors = [
        abs(output.predicted.decode / output.measured - 1) for output in timed if output.measured
    ]
    elsewhere = [output.elsewhere.decode for output in outputs if output.elsewhere is not None]
    return TaskPrediction(
        label=label,
        task=task,
        outputs=len(outputs),
        void=len(untimed),
        measured=measured if timed else None,
        predicted=predicted if timed else None,
        predicted_void=sum(output.predicted.decode for output in untimed) if untimed else None,
        elsewhere=sum(elsewhere) if elsewhere else None,
        efficiency=efficiency,
        error=None if efficiency is None else efficiency - 1,
        cell_error=median(errors) if errors else None,
        extrapolated=sum(output.predicted.extrapolated for output in outputs)
        / max(1, sum(output.predicted.forwards for output in outputs)),
    )


def _sort_rows(
    planned: Iterable[str], outputs: Mapping[tuple[str, str], Sequence[PredictedOutput]], part: int
) -> list[str]:
    """Return the names that have outputs: names in the manifest first, in its order."""
    met = dict.fromkeys(key[part] for key in outputs)
    return [name for name in dict.fromkeys((*planned, *met)) if name in met]


def _config(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    config: Mapping[str, Any] = manifest.get("config", {}).get("effective", {})
    return config
