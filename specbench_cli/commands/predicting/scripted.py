"""`specbench predict` with --load or --sweep: simulate a run under load or with other settings.

The simulation uses the draft tokens that the run accepted, and measured times of model forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from specbench_cli import output
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.config.arrivals import Arrivals
    from specbench_cli.config.predict import PredictOptions
    from specbench_cli.predict.accelerators import Roofline
    from specbench_cli.predict.costs import BatchCosts
    from specbench_cli.store.run_dir import RunDir
    from specbench_cli.summary.load import LoadRow


class LoadPrediction(NamedTuple):
    """Latency and throughput of a run's methods under load: simulated, and measured if available.

    Attributes:
        run: The run whose recorded outputs are simulated.
        probes: Measured forward costs, one item per probe. The simulation uses each as one repeat.
        roofline: Model of the hardware. None means that the costs were measured.
        size: Batch size, the maximum number of sequences in a step.
        modelled: Simulated results.
        measured: Results that the run measured under the same load.
        missing: For each method that was not simulated, the reason, by the method's label.
    """

    run: RunDir
    probes: list[BatchCosts]
    roofline: Roofline | None
    size: int
    modelled: list[LoadRow]
    measured: list[LoadRow]
    missing: Mapping[str, str]

    def total(self, counter: str) -> int:
        """Return a counter's sum over all probes.

        Args:
            counter: "forwards" for all simulated forwards, or "extrapolated" for those whose cost
                was
                extrapolated.
        """
        return sum(getattr(each, counter) for each in self.probes)


def under_load(
    name: str, load: str, options: PredictOptions, roofline: Roofline | None
) -> ExitCode:
    """Predict and print the latency and throughput of a run's methods under load."""
    from specbench_cli.config.arrivals import Arrivals
    from specbench_cli.store.run_dir import RunDir, find_run

    try:
        loads = Arrivals.parse_sweep(load)
    except ValueError as error:
        raise UsageError(f"--load {error}", "specbench predict --help") from error
    found = _predict_load(RunDir.open(find_run(name)), loads, options, roofline)
    if options.as_json:
        output.json_line(_as_dict(found))
    else:
        output.data("\n".join(_lines(found)))
    return ExitCode.OK


def _predict_load(
    run: RunDir, loads: Sequence[Arrivals], options: PredictOptions, roofline: Roofline | None
) -> LoadPrediction:
    """Simulate the methods of a run under each load."""
    from specbench_cli.commands.predicting import roofline as elsewhere
    from specbench_cli.measure.costs import Costs
    from specbench_cli.predict.costs import BatchCosts
    from specbench_cli.predict.load import simulate_load
    from specbench_cli.predict.run_costs import check_models, load_costs
    from specbench_cli.summary import load as table

    config = run.manifest.get("config", {}).get("effective", {})
    size, chunk = options.batch or config.get("batch") or 1, config.get("prefill_chunk")
    if roofline is not None:
        roofline = replace(roofline, batch=size)
        probes = [BatchCosts(elsewhere.under_load(run, roofline))]
    else:
        given_costs = [check_models(Costs.load(file), run) for file in options.costs]
        probes = [BatchCosts(each) for each in given_costs or load_costs(run)]
    simulated, missing = simulate_load(
        *(run.records(), run.prompts(), run.manifest, probes, loads, size, chunk)
    )
    rows = [table.LoadRow.from_requests(each.label, each.load, each.passes) for each in simulated]
    typed = {each.text for each in loads}
    measured = [row for row in table.load_rows(list(run.records())) if row.load in typed]
    return LoadPrediction(run, probes, roofline, size, rows, measured, missing)


def _as_dict(prediction: LoadPrediction) -> dict[str, Any]:
    """Return a load prediction as a dictionary for JSON output."""
    from specbench_cli.commands.predicting import roofline as elsewhere
    from specbench_cli.predict.run_costs import find_difference
    from specbench_cli.summary import load as table

    costs, roofline = prediction.probes[0].costs, prediction.roofline
    return {
        "event": "done",
        "run": prediction.run.path,
        "costs": costs.facts | {"modelled_for": find_difference(costs, prediction.run)},
        "also": [each.costs.facts for each in prediction.probes[1:]],
        "roofline": None if roofline is None else elsewhere.facts(roofline),
        "batch": prediction.size,
        "modelled": [table.as_dict(row) for row in prediction.modelled],
        "saturation_modelled": table.saturation_notes(prediction.modelled),
        "measured": [table.as_dict(row) for row in prediction.measured],
        "errors": table.latency_errors(prediction.modelled, prediction.measured),
        "missing": prediction.missing,
        "forwards": prediction.total("forwards"),
        "extrapolated": prediction.total("extrapolated"),
    }


def _lines(prediction: LoadPrediction) -> list[str]:
    """Return a load prediction as lines of text."""
    from specbench_cli.report.terminal.table import load_lines
    from specbench_cli.summary import load as table

    modelled, measured, size = prediction.modelled, prediction.measured, prediction.size
    tables = [
        *load_lines(modelled, title="modelled under load"),
        *load_lines(measured, title="measured under the same load"),
    ]
    return [
        *_head(prediction),
        *([_batch_note(size)] if size > 1 and not prediction.probes[0].batches_probed else ()),
        *(line.plain for line in tables),
        *(
            f"modelled / measured, {each['method']} at {each['load']}: latency p50"
            f" {each['latency_s_p50_error']:+.1%}, p99 {each['latency_s_p99_error']:+.1%}"
            for each in table.latency_errors(modelled, measured)
        ),
        *(f"not modelled: {label}: {why}" for label, why in prediction.missing.items()),
    ]


def _head(prediction: LoadPrediction) -> list[str]:
    """Return the heading lines of a load prediction: batch size, and source of the forward
    costs.
    """
    if prediction.roofline is not None:
        from specbench_cli.report.terminal.prediction import roofline_head

        return roofline_head(prediction.roofline, prediction.run.manifest.get("models", {}))
    when = " and ".join(each.costs.created_utc for each in prediction.probes)
    beyond = prediction.total("extrapolated") / max(1, prediction.total("forwards"))
    costs = f"{prediction.probes[0].costs.label}, probed {when}, {beyond:.0%} of them extrapolated"
    return [f"modelled: batch {prediction.size}, {costs}"]


def _batch_note(size: int) -> str:
    return (
        "batches were not probed: a forward over several sequences is assumed to cost as much as a"
        " forward of one sequence with the same number of tokens"
        f" (specbench predict --probe --batch {size})"
    )


def predict_settings(name: str, options: PredictOptions) -> ExitCode:
    """Predict and print the times that a run's methods would have with other settings."""
    from specbench_cli.config.sources import from_sweeps
    from specbench_cli.measure.costs import Costs
    from specbench_cli.predict.run_costs import check_models, find_difference, load_costs
    from specbench_cli.predict.settings import mean_settings, simulate_settings
    from specbench_cli.report.terminal.prediction import print_settings
    from specbench_cli.store.run_dir import RunDir, find_run

    swept: dict[str, dict[str, Sequence[object]]] = {}
    for (method, param), values in from_sweeps(options.sweep).sweeps.items():
        swept.setdefault(method, {})[param] = values.value
    run = RunDir.open(find_run(name))
    probes = [check_models(Costs.load(file), run) for file in options.costs] or load_costs(run)
    costs, also = probes[0], probes[1:]
    by_probe, prices = zip(
        *(
            simulate_settings(run.records(), run.prompts(), run.manifest, each, swept, options.row)
            for each in probes
        ),
        strict=True,
    )
    found = mean_settings(by_probe)
    forwards, extrapolated = (
        sum(getattr(each, of) for each in prices) for of in ("forwards", "extrapolated")
    )
    foreign = find_difference(costs, run)
    if options.as_json:
        derived = ("speedup", "break_even", "error")
        rows = [asdict(each) | {of: getattr(each, of) for of in derived} for each in found]
        counters = {"forwards": forwards, "extrapolated": extrapolated}
        source = {"run": run.path, "costs": costs.facts | {"modelled_for": foreign}}
        probed = {"also": [each.facts for each in also]}
        output.json_line({"event": "done", **source, **probed, "modelled": rows, **counters})
        return ExitCode.OK
    beyond, when = extrapolated / max(1, forwards), " and ".join(p.created_utc for p in probes)
    head = [f"modelled: {costs.label}, probed {when}, {beyond:.0%} extrapolated"]
    if foreign:
        head.append(f"the costs are for {foreign}, which adds to the errors")
    print_settings(found, head)
    return ExitCode.OK
