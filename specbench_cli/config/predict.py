"""Options of `specbench predict`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import ARGUMENTS, OUTPUT, OVERWRITE, TRUST, Option, option_fields
from specbench_cli.config.run import RunConfig

PREDICTION = "Prediction"
ROOFLINE = "Roofline (modelled)"
PROBE = "Probe"


def _run_option(name: str, **changes: Any) -> Option:
    """Return a run's option in the form that `specbench predict --probe` uses.

    Args:
        name: Field of `RunConfig`.
        changes: Attributes of `Option` that differ from those of `specbench run`.
    """
    option = next(each.option for each in option_fields(RunConfig) if each.name == name)
    inherited = {
        "panel": PROBE,
        "help": "As in `specbench run`.",
        "default": "the default of specbench run",
        "complete": None,
    }
    return replace(option, **(inherited | changes))


class PredictOptions(CommandOptions):
    """Options and arguments of `specbench predict`."""

    run: Annotated[str | None, Option(ARGUMENTS, "RUN", "Run folder, or `last`.")] = None
    costs: Annotated[
        list[Path],
        Option(
            PREDICTION,
            "FILE",
            "Costs of the run's machine, written by --probe --out. With several files, report the"
            " mean of their predictions.",
            default="measured by the run, else in the cache folder",
        ),
    ] = Field([])
    against: Annotated[
        Path | None,
        Option(
            PREDICTION,
            "FILE",
            "Costs of another machine, written by --probe --out there. Also predict times there.",
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        Option(PREDICTION, "FILE FILE", "Compare the costs of two probes."),
    ] = None
    load: Annotated[
        str | None,
        _run_option(
            "load",
            panel=PREDICTION,
            help="Simulate the run's methods under load. ARRIVALS: as in `specbench run`.",
            default=None,
        ),
    ] = None
    sweep: Annotated[
        list[str],
        _run_option(
            "sweep",
            panel=PREDICTION,
            metavar="METHOD.PARAM=VALUES",
            help="Predict times with other parameters of a method, from its recorded acceptance.",
            default=None,
        ),
    ] = Field([])
    row: Annotated[
        str | None,
        Option(
            PREDICTION,
            "LABEL",
            "With --sweep: the row of RUN's table whose recorded acceptance is used, by its label.",
            default="the one with the most drafted tokens",
        ),
    ] = None
    batch: Annotated[
        int | None,
        Field(ge=1),
        Option(
            PREDICTION,
            "N",
            "Batch size for --load, --probe or --hardware.",
            default="the run's; 1 with --probe or --hardware",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        Option(
            ROOFLINE,
            "NAME[xN]",
            "Model the run on an accelerator, e.g. h100, or on N of them with tensor parallelism,"
            " e.g. h100x8. Names: specbench list hardware.",
        ),
    ] = None
    shape: Annotated[
        str | None,
        Option(
            ROOFLINE,
            "TARGET[+DRAFT]",
            "With --hardware: model these architectures instead of the run's models, e.g."
            " llama-2-70b+7b. Names: specbench list shapes.",
        ),
    ] = None
    context: Annotated[
        int | None,
        Field(ge=1),
        Option(ROOFLINE, "N", "Context length of every forward.", default="as recorded"),
    ] = None
    overhead: Annotated[
        float | None,
        Field(ge=0),
        Option(
            ROOFLINE,
            "US",
            "Overhead per forward, in microseconds.",
            default="0",
        ),
    ] = None
    probe: Annotated[
        bool, Option(PROBE, None, "Measure the times of forward passes on this machine.")
    ] = False
    target: Annotated[str | None, _run_option("target")] = None
    draft: Annotated[str | None, _run_option("draft")] = None
    device: Annotated[str | None, _run_option("device")] = None
    dtype: Annotated[
        str | None,
        _run_option(
            "dtype",
            help="As in `specbench run`. With --hardware: the modelled type.",
            default="the default of specbench run; bfloat16 with --hardware",
        ),
    ] = None
    graphs: Annotated[str | None, _run_option("graphs")] = None
    threads: Annotated[str | None, _run_option("threads")] = None
    methods: Annotated[
        list[str],
        _run_option(
            "methods",
            help="Probe the heads of these methods.",
            default="all that specbench has for the target",
        ),
    ] = Field([])
    set: Annotated[list[str], _run_option("set", metavar="METHOD.PARAM=VALUE")] = Field([])
    plugins: Annotated[
        list[str], _run_option("plugins", help="Load methods from a Python file.", default=None)
    ] = Field([])
    rounds: Annotated[
        int | None,
        Field(ge=1),
        Option(PROBE, "N", "Number of times that each forward pass is timed.", default="24"),
    ] = None
    allow_noise: Annotated[
        bool,
        _run_option(
            "allow_noise",
            help="Keep timings taken while other processes used the CPU.",
            default=None,
        ),
    ] = False
    out: Annotated[
        Path | None,
        Option(PROBE, "FILE", "Output file.", default="in the cache folder", short="-o"),
    ] = None
    overwrite: Annotated[bool, replace(OVERWRITE, panel=PROBE)] = False
    trust: Annotated[
        bool,
        replace(
            TRUST,
            panel=PROBE,
            help="Permit the plug-ins that ./specbench.yaml names. Otherwise specbench asks at a"
            " terminal, and stops with an error without one.",
        ),
    ] = False
    as_json: Annotated[bool, Option(OUTPUT, None, "Print JSON.", name="--json")] = False
