"""Modelled decode times on another accelerator, from a recorded run and a roofline model.

The recorded run provides the tokens of each forward, the accepted tokens and the output lengths. So
acceptance is that of the run's models, but times are those of the modelled shapes. In a batch, all
sequences are assumed to be copies of the recorded sequence. The module also computes how sensitive
a speedup is to each input of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_cli.predict.accelerators import Roofline
from specbench_cli.predict.costs import TableCosts
from specbench_cli.predict.replay import RecordedForwards, replay
from specbench_cli.store.schema import BASELINE, Record

STEP = 0.1
"""Relative change of an input, up and down, to compute the sensitivity of a speedup."""

OutputTurn = tuple[str, int]
"""Key of an output of a method: prompt and turn."""

Times = dict[str, dict[OutputTurn, float]]
"""Decode times in ns, by label and output."""


@dataclass(frozen=True, slots=True)
class ChangedInput:
    """Relative change of a speedup if an input of the model changes.

    `less` is the change if the input is 10% smaller, and `more` if it is 10% larger.
    """

    less: float
    more: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """Modelled decoding of a method on the modelled devices.

    outputs: number of replayed outputs, each once.
    ns: sum of their modelled decode times.
    tokens_per_s: tokens per second of all sequences of the batch.
    speedup: vanilla's modelled time for the same tokens over the method's; None without vanilla.
        per_device: speedup per device.
    measured: measured speedup of the same outputs on the run's machine.
    sensitivity: input of the model -> change of the speedup.
    """

    label: str
    outputs: int
    ns: float
    tokens_per_s: float
    speedup: float | None
    per_device: float | None
    measured: float | None
    sensitivity: Mapping[str, ChangedInput]


@dataclass(frozen=True, slots=True)
class RooflineReplay:
    """Modelled results of a run's methods, in the order of the run.

    missing: label -> reason for methods without a result.
    """

    rows: tuple[RooflineRow, ...]
    missing: dict[str, str]


def replay_roofline(
    records: Iterable[Record], manifest: Mapping[str, Any], roofline: Roofline
) -> RooflineReplay:
    """Model the decode times of a run on other hardware.

    Args:
        records: records of the run.
        manifest: the run's manifest, for its models and the order of its methods.
        roofline: the hardware and the models' shapes.

    Raises:
        UsageError: the models and the run's longest text do not fit in the devices' memory.
    """
    found: dict[str, dict[OutputTurn, Record]] = {}
    missing: dict[str, str] = {}
    for record in records:
        why = _missing_reason(record, roofline)
        if why is not None:
            missing.setdefault(record.label, why)
        else:  # repeats differ only in their measured times
            found.setdefault(record.label, {}).setdefault((record.prompt_id, record.turn), record)
    config, models = manifest.get("config", {}).get("effective", {}), manifest.get("models", {})
    planned = (row["label"] for row in config.get("methods", []))
    kept = {label: found[label] for label in dict.fromkeys((*planned, *found)) if label in found}
    rooms = [_length(each, roofline) for own in kept.values() for each in own.values()]
    roofline.check_fits(max(rooms, default=1))
    inputs = roofline.inputs
    less, more = (
        [roofline.scale_input(name, by) for name in inputs] for by in (1 - STEP, 1 + STEP)
    )
    times, *scaled = _times(kept, models, [roofline, *less, *more])
    speedups, *moved = (_speedups(kept, each) for each in (times, *scaled))
    measured = _speedups(
        kept,
        {
            label: {key: float(each.ns.decode or 0) for key, each in own.items()}
            for label, own in kept.items()
        },
    )
    rows = []
    for label, own in kept.items():
        ns, speedup = sum(times[label].values()), speedups.get(label)
        tokens = sum((each.n_tokens or 1) - 1 for each in own.values())
        rows.append(
            RooflineRow(
                label=label,
                outputs=len(own),
                ns=ns,
                tokens_per_s=roofline.batch * tokens * 1e9 / ns if ns else 0.0,
                speedup=speedup,
                per_device=None if speedup is None else speedup / roofline.devices,
                measured=measured.get(label),
                sensitivity={
                    name: ChangedInput(down[label] / speedup - 1, up[label] / speedup - 1)
                    for name, down, up in zip(
                        inputs, moved[: len(inputs)], moved[len(inputs) :], strict=True
                    )
                    if speedup
                },
            )
        )
    return RooflineReplay(tuple(rows), {k: why for k, why in missing.items() if k not in kept})


def _missing_reason(record: Record, roofline: Roofline) -> str | None:
    """Return the reason why a record cannot be replayed; None if it can."""
    if record.error is not None:
        return "failed"
    if record.forwards is None or record.steps is None:
        return "its forwards are not metered"
    if record.batch is not None:
        return "it decoded prompts in batches, but the model needs single prompts; use --batch 1"
    known = roofline.shapes
    lacking = sorted({kind.model for kind in record.forwards.kinds} - known.keys())
    if lacking == ["draft"]:
        return f"its draft model has no shape: --shape {roofline.names['target']}+DRAFT"
    return f"its {', '.join(lacking)} has no shape" if lacking else None


def _length(record: Record, roofline: Roofline) -> int:
    """Return the number of rows (tokens) in the KV cache at the end of an output, with
    the prompt.
    """
    trace, new = record.forwards, record.n_tokens or 0
    assert trace is not None
    prompt = sum(
        n
        for at, n in zip(trace.kind, trace.n_tokens, strict=True)
        if trace.kinds[at].role == "prefill" and trace.kinds[at].model == "target"
    )
    return (prompt if roofline.context is None else roofline.context) + new


def _times(
    kept: Mapping[str, Mapping[OutputTurn, Record]],
    models: Mapping[str, Mapping[str, Any]],
    rooflines: Sequence[Roofline],
) -> list[Times]:
    """Return the decode times of the outputs for each roofline. Host work is assumed to take no
    time.
    """
    n_layers = {role: facts.get("n_layers") for role, facts in models.items()}
    costs = [TableCosts(each.make_cost_table(models)) for each in rooflines]
    found: list[Times] = [{label: {} for label in kept} for _ in rooflines]
    for label, own in kept.items():
        for key, record in own.items():
            assert record.forwards is not None
            recording = RecordedForwards.from_trace(
                record.forwards, record.steps, n_layers=n_layers
            )
            for times, cost in zip(found, costs, strict=True):
                times[label][key] = replay(recording, cost).busiest
    return found


def _speedups(
    kept: Mapping[str, Mapping[OutputTurn, Record]], times: Mapping[str, Mapping[OutputTurn, float]]
) -> dict[str, float]:
    """Return the speedups over vanilla.

    Only outputs that both the method and vanilla have are used. Times are scaled to equal numbers
    of tokens.
    """
    plain = kept.get(BASELINE, {})
    found = {}
    for label, own in kept.items():
        base = took = 0.0
        for key, record in own.items():
            n, of = _decoded_tokens(record), _decoded_tokens(plain[key]) if key in plain else 0
            if n and of and times[label][key] and times[BASELINE][key]:
                base += times[BASELINE][key] * n / of
                took += times[label][key]
        if took:
            found[label] = base / took
    return found


def _decoded_tokens(record: Record) -> int:
    return (record.n_tokens or 1) - 1


def rows_as_dicts(rows: Sequence[RooflineRow]) -> list[dict[str, Any]]:
    """Return the rows as flat JSON objects."""
    return [
        {
            "label": row.label,
            "modelled": True,
            "outputs": row.outputs,
            "modelled_ns": row.ns,
            "modelled_tokens_per_s": row.tokens_per_s,
            "modelled_speedup": row.speedup,
            "modelled_speedup_per_device": row.per_device,
            "measured_speedup_here": row.measured,
            **{
                f"{name.replace(' ', '_')}_{sign}": change
                for name, each in row.sensitivity.items()
                for sign, change in (("-10%", each.less), ("+10%", each.more))
            },
        }
        for row in rows
    ]
