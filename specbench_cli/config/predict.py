"""Options of `specbench predict`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import ARGUMENTS, OUTPUT, OVERWRITE, TRUST, Option, settings
from specbench_cli.config.run import RunConfig

PREDICTED = "Prediction"
ROOFLINE = "Roofline (modelled)"
PROBE = "Probe"


def _of_run(name: str, **changes: Any) -> Option:
    """Return the option of a run setting that a probe also has."""
    option = next(each.option for each in settings(RunConfig) if each.name == name)
    inherited = {"panel": PROBE, "help": "As in run.", "default": "run's", "complete": None}
    return replace(option, **(inherited | changes))


class PredictOptions(CommandOptions):
    """Options and arguments of one call of `specbench predict`."""

    run: Annotated[str | None, Option(ARGUMENTS, "RUN", "A run's folder, or `last`.")] = None
    costs: Annotated[
        list[Path],
        Option(
            PREDICTED,
            "FILE",
            "Costs to predict by; of several probes, before the run and after it, the mean.",
            default="the run's",
        ),
    ] = Field([])
    against: Annotated[
        Path | None, Option(PREDICTED, "FILE", "Another machine's: what it would take.")
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None, Option(PREDICTED, "FILE FILE", "How far two probes are apart.")
    ] = None
    load: Annotated[
        str | None,
        _of_run(
            "load",
            panel=PREDICTED,
            help="What its rows would meet under load: simulated, by costs and recorded acceptance."
            " As in run.",
            default=None,
        ),
    ] = None
    sweep: Annotated[
        list[str],
        _of_run(
            "sweep",
            panel=PREDICTED,
            metavar="M.PARAM=VALUES",
            help="What other settings of a row would have taken: simulated, by costs and what the"
            " row accepted. As in run.",
            default=None,
        ),
    ] = Field([])
    row: Annotated[
        str | None,
        Option(
            PREDICTED,
            "LABEL",
            "With --sweep: the row whose acceptance counts.",
            default="its method's that was tested most",
        ),
    ] = None
    batch: Annotated[
        int | None,
        Field(ge=1),
        Option(
            PREDICTED,
            "N",
            "Most sequences in a step: that --load simulates, or that --probe measures; with"
            " --hardware, in each.",
            default="the run's; --probe, --hardware: 1",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        Option(
            ROOFLINE,
            "NAME[xN]",
            "Replay the run on this accelerator, or on N in tensor parallel: h100, h100x8.",
        ),
    ] = None
    shape: Annotated[
        str | None,
        Option(ROOFLINE, "TARGET[+DRAFT]", "As if its models had these shapes: llama-2-70b+7b."),
    ] = None
    context: Annotated[
        int | None,
        Field(ge=1),
        Option(ROOFLINE, "N", "Rows before every forward.", default="as recorded"),
    ] = None
    overhead: Annotated[
        float | None,
        Field(ge=0),
        Option(
            ROOFLINE,
            "US",
            "Microseconds that every forward takes beside its roofline.",
            default="0",
        ),
    ] = None
    probe: Annotated[bool, Option(PROBE, None, "Measure this machine's costs.")] = False
    target: Annotated[str | None, _of_run("target")] = None
    draft: Annotated[str | None, _of_run("draft")] = None
    device: Annotated[str | None, _of_run("device")] = None
    dtype: Annotated[
        str | None,
        _of_run(
            "dtype",
            help="As in run; with --hardware, of the roofline.",
            default="run's; --hardware: bfloat16",
        ),
    ] = None
    graphs: Annotated[str | None, _of_run("graphs")] = None
    threads: Annotated[str | None, _of_run("threads")] = None
    methods: Annotated[
        list[str],
        _of_run(
            "methods",
            help="Whose heads to probe.",
            default="all that ship with the target",
        ),
    ] = Field([])
    set: Annotated[list[str], _of_run("set", metavar="M.PARAM=VALUE")] = Field([])
    plugins: Annotated[
        list[str], _of_run("plugins", help="Python file with methods.", default=None)
    ] = Field([])
    rounds: Annotated[
        int | None, Field(ge=1), Option(PROBE, "N", "Times of each point.", default="24")
    ] = None
    allow_noise: Annotated[
        bool,
        _of_run("allow_noise", help="Keep times taken while other programs ran.", default=None),
    ] = False
    out: Annotated[
        Path | None,
        Option(PROBE, "FILE", "Where the costs go.", default="the cache", short="-o"),
    ] = None
    overwrite: Annotated[bool, replace(OVERWRITE, panel=PROBE)] = False
    trust: Annotated[bool, replace(TRUST, panel=PROBE)] = False
    as_json: Annotated[bool, Option(OUTPUT, None, "JSON on stdout.", name="--json")] = False
