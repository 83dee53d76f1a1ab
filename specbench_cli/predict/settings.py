"""Modelled times of a run's methods with other parameters, such as other draft lengths.

The engine decodes the recorded outputs again, one prompt after another. It does not run the models.
Their outputs come from the records (`scripts`), and the time of each forward from a cost table
(`costs.BatchCosts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from specbench_cli import registry
from specbench_cli.config import sweep
from specbench_cli.errors import UsageError
from specbench_cli.measure.costs import Costs
from specbench_cli.predict.costs import BatchCosts
from specbench_cli.predict.scripts import (
    CannotSimulate,
    check_costs,
    load_policy_costs,
    make_scripts,
    method_from_records,
    prompt_ids,
    replay_scripts,
)
from specbench_cli.store.run_dir import Prompt
from specbench_cli.store.schema import BASELINE, Record

if TYPE_CHECKING:
    from specbench_cli.engine.method import Method
    from specbench_cli.engine.simulation import ScriptedRequest


@dataclass(frozen=True, slots=True)
class ModelledSetting:
    """Modelled result of a method with other parameters.

    label: label of the setting.
    of: label of the recorded method whose accepted tokens are used.
    outputs: number of outputs.
    mat: tokens per verification.
    decode: decode time in ns, summed over outputs.
    vanilla: decode time in ns of plain decoding of the same outputs, modelled.
    measured: measured decode time of the run's method with this label. None if there is no such
        method, or if some of its outputs have no time.
    acceptance: accepted / tested tokens of the recorded method.
    length: draft length of each step; None if steps choose their own.
    """

    label: str
    of: str
    outputs: int
    mat: float
    decode: float
    vanilla: float
    measured: float | None
    acceptance: float
    length: int | None

    @property
    def speedup(self) -> float:
        """Speedup over plain decoding. Both times are modelled."""
        return self.vanilla / self.decode

    @property
    def break_even(self) -> float | None:
        """Acceptance rate at which the method would be as fast as plain decoding.

        None if the draft length varies, or if the method is slower even if every token is accepted.
        """
        return None if self.length is None else break_even(self.mat / self.speedup, self.length)

    @property
    def error(self) -> float | None:
        """Relative error of the modelled decode time: modelled / measured - 1."""
        return None if not self.measured else self.decode / self.measured - 1


def mean_settings(probes: Sequence[Sequence[ModelledSetting]]) -> list[ModelledSetting]:
    """Return each setting with the means of its times over several probes of a machine."""
    return [
        replace(
            each[0],
            decode=mean(one.decode for one in each),
            vanilla=mean(one.vanilla for one in each),
        )
        for each in zip(*probes, strict=True)
    ]


def break_even(mat: float, length: int) -> float | None:
    """Return the acceptance rate at which drafts of `length` tokens reach a MAT, or None.

    The acceptance rate is assumed to be the same at every position (`load_aware.expected_tokens`).
    """
    from specbench_cli.engine.drafting.load_aware import expected_tokens

    if mat > length + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, length) < mat else (low, middle)
    return (low + high) / 2


def simulate_settings(
    records: Iterable[Record],
    prompts: Iterable[Prompt],
    manifest: Mapping[str, Any],
    costs: Costs,
    swept: Mapping[str, Mapping[str, Sequence[Any]]],
    row: str | None,
) -> tuple[list[ModelledSetting], BatchCosts]:
    """Simulate a run's methods with other parameters, at the acceptance of a recorded method.

    Args:
        records, prompts, manifest: data of the recorded run.
        costs: costs of a forward, and of the host's step for one sequence.
        swept: method -> parameter -> values. Every combination is a setting.
        row: label of the recorded method. None takes, for each method, the label with the most
            tested tokens.

    Returns:
        The settings, and the cost function with its counts of forwards.

    Raises:
        UsageError: the run has no such method, or lacks data about it; a value is not allowed.
    """
    alone = BatchCosts(costs.model_copy(update={"batch": None}))
    ids, policy = prompt_ids(prompts), load_policy_costs(manifest, costs)
    config = manifest.get("config", {}).get("effective", {})
    passes: dict[str, dict[tuple[str, int], list[Record]]] = {}
    for record in (each for each in records if not each.has_prompt_error):
        own = passes.setdefault(record.label, {})
        own.setdefault((record.prompt_id, record.turn), []).append(record)
    rows = {label: [each[0] for each in own.values()] for label, own in passes.items()}
    plain = registry.build(BASELINE, {})
    found = []
    for name, values in swept.items():
        base = _choose_row(rows, name, row)
        try:
            check_costs(method_from_records(rows[base]), costs, manifest)
            scripts = make_scripts(rows[base], ids, config)
        except CannotSimulate as fault:
            raise UsageError(f"{base}: {fault.message}", "specbench predict --help") from fault
        vanilla, _ = _simulate_decoding(plain, scripts, alone, policy)
        for point in sweep.list_combinations(values):
            label = " ".join([name, *sweep.format_params(point)])
            method = registry.build(name, {**rows[base][0].params.passed, **point})
            decode, mat = _simulate_decoding(method, scripts, alone, policy)
            found.append(
                ModelledSetting(
                    label=label,
                    of=base,
                    outputs=len(scripts),
                    mat=mat,
                    decode=decode,
                    vanilla=vanilla,
                    measured=_measured_decode_ns(passes.get(label, {}).values(), len(scripts)),
                    acceptance=_acceptance(rows[base]),
                    length=_length(method),
                )
            )
    return found, alone


def _simulate_decoding(
    method: Method, scripts: Sequence[ScriptedRequest], costs: BatchCosts, policy: Any
) -> tuple[float, float]:
    """Return the decode time of all outputs in ns, and the number of tokens per verification."""
    found = replay_scripts(method, scripts, costs, policy=policy)
    # Subtract the prefill, which counts as a step and generates the first token.
    tokens, steps = (sum(getattr(each, of) - 1 for each in found) for of in ("tokens", "steps"))
    decode = float(sum(each.last - each.first for each in found))
    return decode, tokens / max(1, steps)


def _measured_decode_ns(outputs: Iterable[Sequence[Record]], n: int) -> float | None:
    """Return the sum of the outputs' median decode times in ns; None unless all n have times."""
    medians = [
        median(record.ns.decode or 0 for record in passes if not record.void)
        for passes in outputs
        if any(not record.void for record in passes)
    ]
    return sum(medians) if len(medians) == n else None


def _acceptance(records: Sequence[Record]) -> float:
    """Return the share of tested tokens that were accepted."""
    accepted, rejected = (
        sum((record.origin or []).count(word) for record in records)
        for word in ("accepted", "recovered")
    )
    return accepted / max(1, accepted + rejected)


def _length(method: Method) -> int | None:
    """Return the draft length of a method with a draft model.

    None if the draft length varies from step to step.
    """
    length = getattr(method.params, "length", None) if "draft" in method.requirements else None
    return length if isinstance(length, int) else None


def _choose_row(rows: Mapping[str, Sequence[Record]], method: str, row: str | None) -> str:
    """Return the requested label of a method, or the label with the most tested tokens."""
    own = {label: records for label, records in rows.items() if records[0].method == method}
    named = own if row is None else {label: own[label] for label in own if label == row}
    if not named:
        raise UsageError(
            f"the run has no method {row or method!r} of {method}; it has {', '.join(rows)}",
            "name a label of the run with --row, and a parameter of its method with --sweep",
        )

    def count_tested(label: str) -> int:
        origins = [record.origin or () for record in named[label]]
        return sum(word in ("accepted", "recovered") for own in origins for word in own)

    return max(named, key=count_tested)
