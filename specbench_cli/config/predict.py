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
        "default": "as in run",
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
            "Costs to predict with. Several files are averaged.",
            default="the run's",
        ),
    ] = Field([])
    against: Annotated[
        Path | None, Option(PREDICTION, "FILE", "Predict times on another machine from its costs.")
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
            help="Simulate the run's methods under load, as in `specbench run`.",
            default=None,
        ),
    ] = None
    sweep: Annotated[
        list[str],
        _run_option(
            "sweep",
            panel=PREDICTION,
            metavar="METHOD.PARAM=VALUES",
            help="Simulate other settings of a method, from its recorded acceptance.",
            default=None,
        ),
    ] = Field([])
    row: Annotated[
        str | None,
        Option(
            PREDICTION,
            "LABEL",
            "With --sweep: take the acceptance from this method run.",
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
            "Model the run on an accelerator, or on N with tensor parallelism: h100, h100x8.",
        ),
    ] = None
    shape: Annotated[
        str | None,
        Option(ROOFLINE, "TARGET[+DRAFT]", "Model these architectures instead: llama-2-70b+7b."),
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
    probe: Annotated[bool, Option(PROBE, None, "Measure forward costs on this machine.")] = False
    target: Annotated[str | None, _run_option("target")] = None
    draft: Annotated[str | None, _run_option("draft")] = None
    device: Annotated[str | None, _run_option("device")] = None
    dtype: Annotated[
        str | None,
        _run_option(
            "dtype",
            help="As in `specbench run`. With --hardware: the modelled type.",
            default="as in run; bfloat16 with --hardware",
        ),
    ] = None
    graphs: Annotated[str | None, _run_option("graphs")] = None
    threads: Annotated[str | None, _run_option("threads")] = None
    methods: Annotated[
        list[str],
        _run_option(
            "methods",
            help="Probe the heads of these methods.",
            default="all shipped with the target",
        ),
    ] = Field([])
    set: Annotated[list[str], _run_option("set", metavar="METHOD.PARAM=VALUE")] = Field([])
    plugins: Annotated[
        list[str], _run_option("plugins", help="Load methods from a Python file.", default=None)
    ] = Field([])
    rounds: Annotated[
        int | None, Field(ge=1), Option(PROBE, "N", "Number of timings per point.", default="24")
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
    trust: Annotated[bool, replace(TRUST, panel=PROBE)] = False
    as_json: Annotated[bool, Option(OUTPUT, None, "Print JSON.", name="--json")] = False
