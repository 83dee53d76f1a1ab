"""`specbench predict`: measure the time of model forwards, and predict the times of a run from
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.commands._trust import permission_check
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.config.predict import PredictOptions
    from specbench_cli.measure.costs import Costs
    from specbench_cli.predict.accelerators import Roofline
    from specbench_cli.store.run_dir import RunDir

EXAMPLES = (
    "specbench predict --probe",
    "specbench predict --probe --target embedded-1m --threads 1 --out costs.json",
    "specbench predict --probe -m eagle3 --set eagle3.head=my-head",
    "specbench predict --probe --batch 8",
    "specbench predict last",
    "specbench predict last --costs costs.json --json",
    "specbench predict last --costs before.json --costs after.json",
    "specbench predict last --against other-machine.json",
    "specbench predict last --sweep sps.length=1:10:1 --costs one-thread.json",
    "specbench predict last --load poisson:1:8:1 --batch 8",
    "specbench predict last --hardware h100x2 --shape llama-2-70b+7b",
    "specbench predict last --hardware a100x4 --shape mixtral-8x7b --batch 8 --context 4096",
    "specbench predict --compare costs.json other-machine.json",
)
EPILOG = "\n\n".join(
    (
        "Examples:",
        *EXAMPLES,
        "--probe stores costs in the cache folder ($SPECBENCH_CACHE, by default"
        " ~/.cache/specbench). Each combination of machine, models, device, dtype and number of"
        " threads has its own file. A prediction reads the file that matches the run. If the run"
        " measured costs itself (specbench run --probe N), the prediction uses those. They are"
        " more accurate, because a machine's speed can change by a third within minutes.",
    )
)


@parsed_command("specbench_cli.config.predict:PredictOptions")
def predict(options: PredictOptions) -> ExitCode:
    """Predict the decode times of a run from the times of single forward passes.

    First measure these times (the costs) with --probe. This takes one or two minutes for the
    embedded models. Then pass RUN: each of its recorded forward passes gets the time that the probe
    measured. With --hardware, the times come from a roofline model of an accelerator instead.
    """
    if sum((options.run is not None, options.probe, options.compare is not None)) != 1:
        raise UsageError(
            "give exactly one of RUN, --probe and --compare FILE FILE", "specbench predict --help"
        )
    if options.probe:
        return _probe(options)
    _check_combination(options, "RUN", "methods", "set", "plugins")
    from specbench_cli.commands.predicting import roofline as modelled

    roofline = modelled.roofline_from_options(options)
    models = [name for name in MODELS if roofline is None or name != "dtype"]
    _check_combination(options, "RUN", *models)
    _check_combination(options, "RUN", "rounds", "out", "overwrite", "trust")
    if options.compare is not None:
        _check_combination(options, "--compare", *REPLAY, *ROOFLINE)
        return _compare(*options.compare, options.as_json)
    return _replay(options, str(options.run), roofline)


MODELS = ("target", "draft", "device", "dtype", "graphs", "threads", "allow_noise")
"""Options of `--probe` that are also settings of a run."""
REPLAY = ("costs", "against", "load", "sweep", "row", "batch")
"""Options of the replay of a run."""
ROOFLINE = ("hardware", "shape", "context", "overhead")
"""Options of the roofline model of other hardware."""


def _probe(options: PredictOptions) -> ExitCode:
    """Measure how long model forwards take on this machine."""
    _check_combination(options, "--probe", *(name for name in REPLAY if name != "batch"), *ROOFLINE)
    if options.batch == 1:
        raise UsageError(
            "--probe always measures batch size 1; --batch adds larger batch sizes, so it must be 2"
            " or more",
            "specbench predict --probe --batch 8",
        )
    from specbench_cli.commands.predicting.probe import probe

    settings = {name: value for name in (*MODELS, "plugins") if (value := getattr(options, name))}
    return probe(settings, options, permission_check(options.trust))


def _replay(options: PredictOptions, run: str, roofline: Roofline | None) -> ExitCode:
    """Predict the times of a run: with its own or other settings, under load, or on other
    hardware.
    """
    from specbench_cli.commands.predicting import roofline as modelled
    from specbench_cli.commands.predicting import scripted

    if roofline is not None:
        _check_combination(options, "--hardware", "costs", "against")
    if options.row is not None and not options.sweep:
        raise UsageError(
            "--row selects the method whose acceptance --sweep uses, so it needs --sweep",
            f"specbench predict {run} --sweep sps.length=1:10:1 --row 'sps length=5'",
        )
    if options.load is not None:
        _check_combination(options, "--load", "against", "sweep")
        return scripted.under_load(run, options.load, options, roofline)
    if options.sweep:
        _check_combination(options, "--sweep", "against", "batch", "hardware")
        return scripted.predict_settings(run, options)
    if roofline is not None:
        from specbench_cli.store.run_dir import RunDir, find_run

        return modelled.predict(RunDir.open(find_run(run)), roofline, options.as_json)
    _check_combination(options, "RUN without --load or --hardware", "batch")
    return _predict(run, options.costs, options.against, options.as_json)


def _check_combination(options: PredictOptions, option: str, *names: str) -> None:
    """Raise UsageError if an option was given that cannot be combined with `option`."""
    if wrong := options.changed_flags(*names):
        raise UsageError(
            f"{', '.join(wrong)} cannot be combined with {option}", "specbench predict --help"
        )


def _predict(name: str, files: Sequence[Path], other: Path | None, json: bool) -> ExitCode:
    """Predict a run's times from measured forward times, and print them."""
    from specbench_cli.measure.costs import Costs
    from specbench_cli.predict.prediction import predict as replay
    from specbench_cli.predict.run_costs import check_models, find_difference, load_costs
    from specbench_cli.report.terminal.prediction import print_prediction
    from specbench_cli.store.run_dir import RunDir, find_run

    run = RunDir.open(find_run(name))
    probes = [check_models(Costs.load(file), run) for file in files] or load_costs(run)
    costs, also = probes[0], probes[1:]
    against = check_models(Costs.load(other), run) if other else None
    prediction = replay(run.records(), run.manifest, costs, against, also)
    if json:
        foreign = find_difference(costs, run)
        output.json_line(
            {
                "event": "done",
                "run": run.path,
                "costs": costs.facts | {"modelled_for": foreign},
                "also": [each.facts for each in also],
                "against": against and against.facts,
                "missing": prediction.missing,
                "rows": prediction.rows,
            }
        )
        return ExitCode.OK
    print_prediction(prediction, _head(run, probes, against))
    return ExitCode.OK


def _head(run: RunDir, probes: Sequence[Costs], against: Costs | None) -> list[str]:
    """Return the heading lines of a prediction.

    They name the run, and say where and when the forward times were measured.
    """
    from specbench_cli.predict.run_costs import find_difference
    from specbench_cli.summary.facts import Facts

    costs, also = probes[0], probes[1:]
    facts = Facts.from_manifest(run.manifest)
    head = facts.header({}, width=100)
    if not facts.decoding.startswith("greedy"):
        head.append(
            "host: probed with greedy decoding, so extra host time of sampling is not predicted"
        )
    when = " and ".join(each.created_utc for each in probes)
    head.append(f"costs: {costs.label}, probed {when}")
    head += [f"drift: {_drift(costs, each)}" for each in also]
    if any(each.quietness.noisy for each in probes):
        head.append("noisy costs: probed while other programs were running (--allow-noise)")
    if foreign := find_difference(costs, run):
        head.append(f"the costs are for {foreign}, which adds to the errors")
    if against:
        head.append(f"predicted for another machine: {against.label}, probed {against.created_utc}")
    return head


def _drift(first: Costs, then: Costs) -> str:
    """Return as text how much forward times changed from an earlier to a later probe (the
    median).
    """
    from statistics import median

    from specbench_cli.measure.costs import compare_probes
    from specbench_cli.summary.formats import percent

    found = compare_probes(first, then)
    moved = median(each.second_ns / max(each.first_ns, 1.0) - 1 for each in found)
    return f"costs changed by {percent(moved, 1)} between probes (median of {len(found)} points)"


def _compare(first: Path, second: Path, json: bool) -> ExitCode:
    """Print the differences between the forward times of two probes."""
    from specbench_cli.measure.costs import Costs, compare_probes
    from specbench_cli.report.terminal.prediction import print_differences

    found = compare_probes(Costs.load(first), Costs.load(second))
    if not found:
        raise UsageError(
            f"{first} and {second} have no measured point in common", "specbench predict --probe"
        )
    if json:
        points = [{**each.model_dump(), "relative": each.relative} for each in found]
        output.json_line({"event": "done", "points": points})
    else:
        print_differences(found)
    return ExitCode.OK
