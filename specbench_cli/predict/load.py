"""What a run's rows would meet under load: modelled, by a machine's costs and recorded acceptance.

The engine's own driver decodes the run's first turns once more, with the rows' own methods and
policies, as scripts say (`engine.simulation`): outputs are those recorded, and the draft model is
right where a drafted token was accepted and wrong where one was rejected. Of tokens that were never
tested each is right with the chance that tested ones of the same output had.

A forward over several sequences costs what one over as many rows does, after the mean context of
its rows, those of a prompt beside others among them, and what each further sequence adds by the
probe of batches (`costs.BatchCost`), which knows the host's work, too. Where none were probed,
further sequences add nothing, and the host's work is a sequence's own. Prompts that are prefilled
together by themselves cost what each does.

The same scripts say what other settings of a row would have taken, one prompt after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench_cli import registry
from specbench_cli.config import sweep
from specbench_cli.config.arrivals import Arrivals
from specbench_cli.errors import SpecbenchError, UsageError
from specbench_cli.measure.costs import Costs
from specbench_cli.predict.run_costs import probe_command
from specbench_cli.report.load import LoadRow
from specbench_cli.report.numbers.speedups import BASELINE
from specbench_cli.report.source import Source
from specbench_cli.store.schema import LOSSLESS, Record

if TYPE_CHECKING:
    from specbench_cli.engine.method import Method
    from specbench_cli.engine.simulation import Rows, Script

LENGTHS = ("heuristic", "synergy", "smartspec")
"""Rules that ask nothing of what the draft model says."""


class Prices:
    """What forwards take by a machine's costs; see `simulation.Price`.

    Attributes:
        costs: these.
        forwards, extrapolated: how many there were, and of them those beyond the probe's points.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.forwards = self.extrapolated = 0
        self._last = ""  # whose weights are in the caches

    @property
    def together(self) -> bool:
        """Whether it is known what sequences cost that are decoded together."""
        return self.costs.batch is not None

    def __call__(self, model: str, rows: Sequence[Rows]) -> float:
        """Nanoseconds."""
        costs, going = self.costs, [each for each in rows if not each.prompt]
        lone, self._last = self._last == model == "target", model
        if not going:
            return sum(costs.prefill_ns(model, each.new) for each in rows)
        nodes, batch = sum(each.new for each in going) - len(going), costs.batch
        if batch is not None:
            ns = batch.beside.get(model, 0.0) * (len(rows) - 1)
            if model == "target":
                ns += batch.step + batch.sequence * len(going) + batch.node * nodes
            else:
                ns += batch.draft * len(going)
        elif model == "target":
            ns = costs.host_ns(nodes=nodes, steps=len(going))
        else:
            ns = costs.host_ns(drafts=len(going), steps=0)
        new = sum(each.new for each in rows)
        context = sum(each.new * each.before for each in rows) / new
        self.forwards += 1
        self.extrapolated += not costs.covers(model, new, context)
        return ns + costs.forward_ns(model, new, context, lone=lone)


def simulated(
    run: Source,
    probes: Sequence[Prices],
    loads: Sequence[Arrivals],
    size: int,
    chunk: int | None,
) -> tuple[list[LoadRow], dict[str, str]]:
    """The rows of a run under loads, and by label why others have none.

    Args:
        probes: of one machine, by each of which a row has a pass. Policies go by the first one.
        size: sequences that take part in a step. chunk: most tokens of prompts beside them.
    Raises:
        UsageError: a trace lists fewer arrivals than the run has prompts.
    """
    from specbench_cli.engine.simulation import simulate

    policy, prompts, config = _told(run, probes[0].costs)
    rows: dict[str, dict[str, Record]] = {}
    for record in run.records():
        if record.unasked:
            continue
        if record.turn == 1:
            rows.setdefault(record.label, {}).setdefault(record.prompt_id, record)
    found: list[LoadRow] = []
    missing: dict[str, str] = {}
    for label, own in rows.items():
        records = list(own.values())
        try:
            method = _method(records)
            for prices in probes:
                _check_costs(method, prices.costs, run.manifest)
            scripts = _scripts(records, prompts, config)
            for load in loads:
                times = _times(load, len(records), config.get("seed") or 0)
                met = []
                for prices in probes:
                    batch = simulate(
                        *(method, scripts, prices),
                        size=size,
                        chunk=chunk,
                        arrivals=times,
                        costs=policy,
                    )
                    texts = [session.harness.text for session in batch.sessions]
                    first, ended = (
                        np.array([getattr(text, of) for text in texts]) / 1e9
                        for of in ("first_ns", "last_ns")
                    )
                    tokens = np.array([float(text.position) for text in texts])
                    met.append((np.array(times), first, ended, tokens))
                found.append(LoadRow.of(label, load.typed, met))
        except UsageError:
            raise
        except (SpecbenchError, ValueError) as fault:
            missing[label] = getattr(fault, "message", str(fault))
    return found, missing


@dataclass(frozen=True, slots=True)
class Setting:
    """A method's row as it would have been with other parameters: modelled.

    label: the row's. of: the recorded row, whose acceptance it has. outputs: how many.
    mat: tokens a verification. decode, vanilla: ns of decoding, summed over outputs, and of plain
    decoding of the same. measured: what the run's own row of that label took, None if it has none
    whose outputs all have times. acceptance: of the recorded row's tested tokens those that stood.
    length: of each step's draft by a model, None where steps' lengths are their own.
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
        """Over plain decoding, both modelled."""
        return self.vanilla / self.decode

    @property
    def break_even(self) -> float | None:
        """The acceptance at which it would take as long as plain decoding; None where drafts have
        no one length, or where even drafts that all stand do not pay."""
        return None if self.length is None else break_even(self.mat / self.speedup, self.length)

    @property
    def error(self) -> float | None:
        """modelled / measured, less one."""
        return None if not self.measured else self.decode / self.measured - 1


def settled(probes: Sequence[Sequence[Setting]]) -> list[Setting]:
    """The same settings by several probes of a machine, before a run and after it: the means."""
    return [
        replace(
            each[0],
            decode=mean(one.decode for one in each),
            vanilla=mean(one.vanilla for one in each),
        )
        for each in zip(*probes, strict=True)
    ]


def break_even(mat: float, length: int) -> float | None:
    """The acceptance at which drafts of a length bring so many tokens a step; None: at none.

    Each token is taken to stand as often, whatever came before it (`goodput.emitted`).
    """
    from specbench_cli.engine.drafting.goodput import emitted

    if mat > length + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if emitted(middle, length) < mat else (low, middle)
    return (low + high) / 2


def resettled(
    run: Source, costs: Costs, swept: Mapping[str, Mapping[str, Sequence[Any]]], row: str | None
) -> tuple[list[Setting], Prices]:
    """What settings of a run's methods would have taken, by what one recorded row accepted.

    Args:
        costs: what a forward costs, and the host's step of one sequence.
        swept: by method the values of its parameters, of which every combination is a row.
        row: whose acceptance counts; None: of each method's rows the one that was tested most.
    Raises:
        UsageError: the run has no such row, or knows too little of it; a value is not allowed.
    """
    from specbench_cli.engine.simulation import simulate

    alone = Prices(costs.model_copy(update={"batch": None}))
    policy, prompts, config = _told(run, costs)
    passes: dict[str, dict[tuple[str, int], list[Record]]] = {}
    for record in run.records():
        if record.unasked:
            continue
        own = passes.setdefault(record.label, {})
        own.setdefault((record.prompt_id, record.turn), []).append(record)
    rows = {label: [each[0] for each in own.values()] for label, own in passes.items()}
    plain = registry.build(BASELINE, {})
    found = []
    for name, values in swept.items():
        base = _informed(rows, name, row)
        try:
            method = _method(rows[base])
            _check_costs(method, costs, run.manifest)
            scripts = _scripts(rows[base], prompts, config)
        except _NotModelled as fault:
            raise UsageError(f"{base}: {fault.message}", "specbench predict --help") from fault
        passed = rows[base][0].params.passed
        stood, fell = (
            sum((record.origin or []).count(word) for record in rows[base])
            for word in ("accepted", "recovered")
        )

        def decoded(method: Method, scripts: Sequence[Script] = scripts) -> tuple[float, float]:
            """Decode time in ns and tokens a verification."""
            batch = simulate(method, scripts, alone, size=1, costs=policy)
            texts = [session.harness.text for session in batch.sessions]
            tokens, steps = (  # the prefill makes the first token, and counts as a step
                sum(getattr(text, of) - 1 for text in texts) for of in ("position", "steps")
            )
            decode = float(sum(text.last_ns - text.first_ns for text in texts))
            return decode, tokens / max(1, steps)

        vanilla, _ = decoded(plain)
        for point in sweep.points(values):
            label = " ".join([name, *sweep.settings(point)])
            other = registry.build(name, {**passed, **point})
            decode, mat = decoded(other)
            length = getattr(other.params, "length", None) if "draft" in other.needed else None
            took = [
                median(record.ns.decode or 0 for record in each if not record.void)
                for each in passes.get(label, {}).values()
                if any(not record.void for record in each)
            ]
            measured = sum(took) if len(took) == len(scripts) else None
            row_of = (label, base, len(scripts), mat, decode, vanilla, measured)
            one = length if isinstance(length, int) else None
            found.append(Setting(*row_of, stood / max(1, stood + fell), one))
    return found, alone


def _informed(rows: Mapping[str, Sequence[Record]], method: str, row: str | None) -> str:
    """The label of the method's row that is asked for, or whose drafts were tested most."""
    own = {label: records for label, records in rows.items() if records[0].method == method}
    named = own if row is None else {label: own[label] for label in own if label == row}
    if not named:
        raise UsageError(
            f"the run has no row {row or method!r} of {method}; it has {', '.join(rows)}",
            "name the recorded row with --row, and its method's parameter with --sweep",
        )

    def tested(label: str) -> int:
        origins = [record.origin or () for record in named[label]]
        return sum(word in ("accepted", "recovered") for own in origins for word in own)

    return max(named, key=tested)


def _told(run: Source, costs: Costs) -> tuple[Any, dict[tuple[str, int], tuple[int, ...]], Any]:
    """What policies were told of forwards, the prompts' ids, the run's configuration."""
    from specbench_cli.measure.step_costs import StepCosts, of_kept

    told = run.manifest.get("step_costs")
    policy = StepCosts.model_validate(told) if told else of_kept(costs)
    prompts = {(each.prompt_id, each.turn): tuple(each.ids) for each in run.prompts()}
    return policy, prompts, run.manifest.get("config", {}).get("effective", {})


def _times(load: Arrivals, n: int, seed: int) -> list[float]:
    try:
        return load.times(n, seed)
    except ValueError as error:
        raise UsageError(f"--load: {error}", "specbench predict --help") from error


class _NotModelled(SpecbenchError):
    """A row that no simulation knows enough of."""


def _method(records: Sequence[Record]) -> Method:
    """The row's method. Raises _NotModelled where scripts do not say what it asks for."""
    first = records[0]
    if first.peer:
        raise _NotModelled("another program's, whose steps are its own")
    if first.guarantee not in LOSSLESS:
        raise _NotModelled("lossy: what it would accept elsewhere is not recorded")
    if any(record.error is not None for record in records):
        raise _NotModelled("it failed on some prompts")
    try:
        method = registry.build(first.method, first.params.effective)
    except SpecbenchError as fault:
        raise _NotModelled(fault.message) from fault
    if not method.batches:
        raise _NotModelled("it decodes one prompt at a time")
    rule = getattr(method.params, "length", 0)
    if isinstance(rule, str) and rule not in LENGTHS:
        raise _NotModelled(f"length={rule} goes by what the draft model says of each token")
    if method.artifacts() or method.models() or method.any_vocabulary or method.needed - {"draft"}:
        raise _NotModelled("its drafts are of no draft model or lookup alone")
    return method


def _check_costs(method: Method, costs: Costs, manifest: Mapping[str, Any]) -> None:
    if "draft" in method.needed and "draft" not in costs.curves:
        raise _NotModelled(f"its draft model was not probed: {probe_command(manifest)}")


def _scripts(
    records: Sequence[Record],
    prompts: Mapping[tuple[str, int], tuple[int, ...]],
    config: Mapping[str, Any],
) -> list[Script]:
    """The requests of a row as they went."""
    from specbench_cli.engine.simulation import Script

    budget = config.get("max_new_tokens") or max(record.n_tokens or 0 for record in records)
    found = []
    for record in records:
        prompt = prompts.get((record.prompt_id, record.turn))
        if prompt is None or record.output_ids is None or record.origin is None:
            raise _NotModelled("the run does not hold its prompts, outputs and origins")
        output = tuple(record.output_ids)
        whole = budget if record.finish == "eos" else len(output)
        right = _right(record.origin, record.prompt_id)
        found.append(Script(prompt, output, right, whole, record.finish == "eos"))
    return found


def _right(origin: Sequence[str], prompt_id: str) -> tuple[bool, ...]:
    """Of each token whether the draft model says it: known of those that it was tested on."""
    stood, fell = origin.count("accepted"), origin.count("recovered")
    chance = stood / (stood + fell) if stood + fell else 0.0
    draw = Random(prompt_id)
    drawn = [draw.random() < chance for _ in origin]
    known = {"accepted": True, "recovered": False}
    return tuple(known.get(word, guess) for word, guess in zip(origin, drawn, strict=True))


def errors(modelled: Sequence[LoadRow], measured: Sequence[LoadRow]) -> list[dict[str, Any]]:
    """How far p50 and p99 of the latency are off where the same row was measured under the same
    load, as a share of the measured ones: of each request's median over the passes, for the worst
    request of several passes is the machine's worst moment, which no simulation knows."""
    known = {(row.label, row.load): row for row in measured}
    found = []
    for row in modelled:
        other = known.get((row.label, row.load))
        if other is not None:
            (half, most), (own_half, own_most) = (
                np.percentile(each.typical(), (50, 99)) for each in (row, other)
            )
            off = {
                "latency_s_p50_error": float(half / own_half - 1),
                "latency_s_p99_error": float(most / own_most - 1),
            }
            found.append({"method": row.label, "load": row.load, **off})
    return found
