"""`specbench predict`: what forwards cost here, and what a run should have taken by that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench_cli import output
from specbench_cli.commands import OUTPUT, OVERWRITE
from specbench_cli.commands._trust import permission_check
from specbench_cli.config.options import TRUST
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.measure.costs import Costs

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
        "Costs are kept in the cache folder ($SPECBENCH_CACHE, else the user's) for each machine,"
        " models, device, dtype and threads; a run is predicted with those it was made with. A"
        " machine can be a third slower for a minute: specbench run --probe N measures costs"
        " between the run's own prompts, and those count then.",
    )
)
PREDICTED = "Prediction"
ROOFLINE = "Roofline (modelled)"
PROBE = "Probe"


def predict(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run's folder, or `last`.", show_default=False),
    ] = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Costs to predict by; of several probes, before the run and after it, the mean.",
            show_default="the run's",
            rich_help_panel=PREDICTED,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Another machine's: what it would take.", rich_help_panel=PREDICTED
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="FILE FILE",
            help="How far two probes are apart.",
            show_default=False,
            rich_help_panel=PREDICTED,
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="ARRIVALS",
            help="What its rows would meet under load: simulated, by costs and recorded acceptance."
            " As in run.",
            show_default=False,
            rich_help_panel=PREDICTED,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M.PARAM=VALUES",
            help="What other settings of a row would have taken: simulated, by costs and what the"
            " row accepted. As in run.",
            show_default=False,
            rich_help_panel=PREDICTED,
        ),
    ] = None,
    row: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL",
            help="With --sweep: the row whose acceptance counts.",
            show_default="its method's that was tested most",
            rich_help_panel=PREDICTED,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most sequences in a step: that --load simulates, or that --probe measures; with"
            " --hardware, in each.",
            show_default="the run's; --probe, --hardware: 1",
            rich_help_panel=PREDICTED,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[xN]",
            help="Replay the run on this accelerator, or on N in tensor parallel: h100, h100x8.",
            rich_help_panel=ROOFLINE,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET[+DRAFT]",
            help="As if its models had these shapes: llama-2-70b+7b.",
            rich_help_panel=ROOFLINE,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Rows before every forward.",
            show_default="as recorded",
            rich_help_panel=ROOFLINE,
        ),
    ] = None,
    overhead: Annotated[
        float | None,
        typer.Option(
            metavar="US",
            min=0,
            help="Microseconds that every forward takes beside its roofline.",
            show_default="0",
            rich_help_panel=ROOFLINE,
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure this machine's costs.", rich_help_panel=PROBE)
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="As in run.", show_default="run's", rich_help_panel=PROBE
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="As in run.", show_default="run's", rich_help_panel=PROBE
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="As in run.", show_default="run's", rich_help_panel=PROBE
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="As in run; with --hardware, of the roofline.",
            show_default="run's; --hardware: bfloat16",
            rich_help_panel=PROBE,
        ),
    ] = None,
    graphs: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help="As in run.", show_default="run's", rich_help_panel=PROBE
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(metavar="N", help="As in run.", show_default="run's", rich_help_panel=PROBE),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            help="Whose heads to probe.",
            show_default="all that ship with the target",
            rich_help_panel=PROBE,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="M.PARAM=VALUE",
            help="As in run.",
            show_default="run's",
            rich_help_panel=PROBE,
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Python file with methods.", rich_help_panel=PROBE),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Times of each point.",
            show_default="24",
            rich_help_panel=PROBE,
        ),
    ] = None,
    allow_noise: Annotated[
        bool,
        typer.Option(
            "--allow-noise",
            help="Keep times taken while other programs ran.",
            rich_help_panel=PROBE,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Where the costs go.",
            show_default="the cache",
            rich_help_panel=PROBE,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help=OVERWRITE, rich_help_panel=PROBE)
    ] = False,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST.help, rich_help_panel=PROBE)] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON on stdout.", rich_help_panel=OUTPUT)
    ] = False,
) -> ExitCode:
    """Predict a run's decode times from what single forwards cost on this machine.

    First --probe (a minute or two for the shipped models), then RUN: it is replayed, forward by
    forward. With --hardware and --shape it is replayed at the costs of a roofline instead.
    """
    models = {
        "target": target,
        "draft": draft,
        "device": device,
        "dtype": dtype,
        "graphs": graphs,
        "threads": threads,
        "allow_noise": allow_noise,
        "plugins": plugin,
    }
    given = {name: value for name, value in models.items() if value not in (None, False)}
    others = {
        "--costs": costs,
        "--against": against,
        "--load": load,
        "--sweep": sweep,
        "--row": row,
        "--batch": batch,
    }
    lines = {"--hardware": hardware, "--shape": shape, "--context": context, "--overhead": overhead}
    if sum((run is not None, probe, compare is not None)) != 1:
        raise UsageError(
            "predict takes one of RUN, --probe and --compare FILE FILE", "specbench predict --help"
        )
    if probe:
        beside = {name: value for name, value in others.items() if name != "--batch"}
        _refuse(beside | lines, "--probe")
        if batch == 1:
            raise UsageError(
                "--batch 1 of --probe is what is measured in any case; several sequences together"
                " are 2 or more",
                "specbench predict --probe --batch 8",
            )
        from specbench_cli.commands.predicting.probe import probe as measure

        check = permission_check(trust)
        return measure(given, method or [], set_ or [], rounds, batch, out, json, check, overwrite)
    _refuse({"--method": method, "--set": set_, "--plugin": given.pop("plugins", None)}, "RUN")
    from specbench_cli.commands.predicting import roofline as elsewhere
    from specbench_cli.commands.predicting import scripted

    if hardware is not None:
        given.pop("dtype", None)
    roofline = elsewhere.asked(
        hardware, shape, dtype=dtype, context=context, overhead=overhead, batch=batch
    )
    _refuse({f"--{name.replace('_', '-')}": value for name, value in given.items()}, "RUN")
    _refuse({"--rounds": rounds, "--out": out, "--overwrite": overwrite, "--trust": trust}, "RUN")
    if compare is not None:
        _refuse(others | lines, "--compare")
        return _compare(*compare, json)
    assert run is not None
    if roofline is not None:
        _refuse({"--costs": costs, "--against": against}, "--hardware")
    if row is not None and not sweep:
        raise UsageError(
            "--row says whose acceptance --sweep goes by",
            f"specbench predict {run} --sweep sps.length=1:10:1 --row 'sps length=5'",
        )
    if load is not None:
        _refuse({"--against": against, "--sweep": sweep}, "--load")
        return scripted.under_load(run, costs or (), load, batch, json, roofline)
    if sweep:
        _refuse({"--against": against, "--batch": batch, "--hardware": hardware}, "--sweep")
        return scripted.resettled(run, costs or (), sweep, row, json)
    if roofline is not None:
        from specbench_cli.store.run_dir import RunDir, folder

        return elsewhere.predict(RunDir.open(folder(run)), roofline, json)
    _refuse({"--batch": batch}, "RUN without --load or --hardware")
    return _predict(run, costs or (), against, json)


def _predict(name: str, files: Sequence[Path], other: Path | None, json: bool) -> ExitCode:
    """Replay a run."""
    from specbench_cli.measure.costs import Costs
    from specbench_cli.predict.prediction import predict as replay
    from specbench_cli.predict.run_costs import fitting, foreign_to, own
    from specbench_cli.report.terminal.prediction_table import print_prediction
    from specbench_cli.store.run_dir import RunDir, folder
    from specbench_cli.summary.facts import Facts

    run = RunDir.open(folder(name))
    probes = [fitting(Costs.load(file), run) for file in files] or own(run)
    costs, also = probes[0], probes[1:]
    against = fitting(Costs.load(other), run) if other else None
    prediction = replay(run.records(), run.manifest, costs, against, also)
    foreign = foreign_to(costs, run)
    if json:
        output.json_line(
            {
                "event": "done",
                "run": run.path,
                "costs": costs.brief | {"modelled_for": foreign},
                "also": [each.brief for each in also],
                "against": against and against.brief,
                "missing": prediction.missing,
                "rows": prediction.rows,
            }
        )
        return ExitCode.OK
    facts = Facts.of(run.manifest)
    head = facts.header({}, width=100)
    if not facts.decoding.startswith("greedy"):
        head.append("host: probed with greedy decoding; what sampling adds is not predicted")
    when = " and ".join(each.created_utc for each in probes)
    head.append(f"costs: {costs.label}, probed {when}")
    head += [f"drift: {_drift(costs, each)}" for each in also]
    if any(each.quietness.noisy for each in probes):
        head.append("noisy costs: probed while other programs were running (--allow-noise)")
    if foreign:
        head.append(f"modelled for {foreign}: errors are not the model's alone")
    if against:
        head.append(f"elsewhere, modelled: {against.label}, probed {against.created_utc}")
    print_prediction(prediction, head, elsewhere=against is not None)
    return ExitCode.OK


def _drift(first: Costs, then: Costs) -> str:
    """How far a later probe of the machine is from an earlier one."""
    from statistics import median

    from specbench_cli.measure.costs import differences
    from specbench_cli.summary.formats import percent

    found = differences(first, then)
    moved = median(each.second_ns / max(each.first_ns, 1.0) - 1 for each in found)
    return f"the median of {len(found)} points moved by {percent(moved, 1)} between them"


def _compare(first: Path, second: Path, json: bool) -> ExitCode:
    """How far two probes are apart."""
    from specbench_cli.measure.costs import Costs, differences
    from specbench_cli.report.terminal.prediction_table import print_differences

    found = differences(Costs.load(first), Costs.load(second))
    if not found:
        raise UsageError(f"{first} and {second} share no point", "specbench predict --probe")
    if json:
        points = [{**each.model_dump(), "relative": each.relative} for each in found]
        output.json_line({"event": "done", "points": points})
    else:
        print_differences(found)
    return ExitCode.OK


def _refuse(options: Mapping[str, Any], beside: str) -> None:
    """Options that mean nothing beside another word of the command."""
    if wrong := [name for name, value in options.items() if value]:
        raise UsageError(f"{', '.join(wrong)} cannot go with {beside}", "specbench predict --help")
