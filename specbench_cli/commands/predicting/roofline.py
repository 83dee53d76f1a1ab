"""`specbench predict --hardware`: predict a run's times with a roofline model of an accelerator.

The roofline model computes the time of each forward from the accelerator's memory bandwidth and its
peak FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specbench_cli import output
from specbench_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specbench_cli.config.predict import PredictOptions
    from specbench_cli.measure.costs import Costs
    from specbench_cli.predict.accelerators import Roofline
    from specbench_cli.store.run_dir import RunDir

DTYPE = "bfloat16"


def roofline_from_options(options: PredictOptions) -> Roofline | None:
    """Return the roofline model that the command-line options describe.

    Return None if no option asks for one.

    Raises:
        UsageError: some of the options are missing, or a name is unknown.
    """
    from specbench_cli.predict.accelerators import Roofline

    if options.hardware is None or options.shape is None:
        given = {
            "--hardware": options.hardware,
            "--shape": options.shape,
            "--context": options.context,
            "--overhead": options.overhead,
        }
        if wrong := [name for name, value in given.items() if value is not None]:
            raise UsageError(
                f"{', '.join(wrong)}: also give --hardware and --shape; a roofline needs both",
                "specbench predict last --hardware h100 --shape llama-2-70b+7b",
            )
        return None
    return Roofline.from_options(
        options.hardware,
        options.shape,
        dtype=options.dtype or DTYPE,
        batch=options.batch or 1,
        context=options.context,
        overhead=1e3 * (options.overhead or 0.0),
    )


def predict(run: RunDir, roofline: Roofline, json: bool) -> ExitCode:
    """Predict a run's times with a roofline model and print them."""
    from specbench_cli.predict.roofline import replay_roofline, rows_as_dicts
    from specbench_cli.report.terminal.prediction import print_replayed, roofline_head

    models = run.manifest.get("models", {})
    found = replay_roofline(run.records(), run.manifest, roofline)
    if json:
        rows = rows_as_dicts(found.rows)
        output.json_line(
            {
                "event": "done",
                "run": run.path,
                "modelled": facts(roofline),
                "recorded_with": {role: each.get("label") for role, each in models.items()},
                "missing": found.missing,
                "rows": rows,
            }
        )
        return ExitCode.OK
    print_replayed(found, roofline, roofline_head(roofline, models))
    return ExitCode.OK


def under_load(run: RunDir, roofline: Roofline) -> Costs:
    """Return the forward costs for a simulation of load, up to the batch size of the roofline
    model.

    Raises:
        UsageError: A batch of the run's longest texts does not fit into the accelerator's memory.
    """
    records = list(run.records())
    prompts = {(each.prompt_id, each.turn): len(each.ids) for each in run.prompts()}
    texts = [prompts.get((each.prompt_id, each.turn), 0) + (each.n_tokens or 0) for each in records]
    roofline.check_fits(roofline.context or max(texts, default=1))
    mean = roofline.context or sum(texts) / max(1, len(texts))
    models = run.manifest.get("models", {})
    return replace(roofline, batch=1).make_cost_table(models, roofline.batch, mean)


def facts(roofline: Roofline) -> dict[str, Any]:
    """Return the modelled hardware and models as a dictionary for JSON output."""
    device = roofline.accelerator

    def shape(role: str) -> Mapping[str, Any]:
        return {"name": roofline.names[role], **roofline.shapes[role].model_dump()}

    return {
        "hardware": roofline.hardware,
        "devices": roofline.devices,
        "device": device.model_dump(),
        "shapes": {role: shape(role) for role in roofline.shapes},
        "dtype": roofline.dtype,
        "batch": roofline.batch,
        "context": roofline.context,
        "overhead_ns": roofline.overhead,
        "bytes_held_by_weights": sum(
            n for what, n in roofline.memory_use(1).items() if what.startswith("weights")
        ),
    }
