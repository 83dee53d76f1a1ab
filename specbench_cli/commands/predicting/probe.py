"""`specbench predict --probe`: measure how long single model forwards take, and store the times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli import output, registry
from specbench_cli.commands._progress import count_rounds
from specbench_cli.config import permission
from specbench_cli.config.load import load
from specbench_cli.config.sources import from_command_line
from specbench_cli.errors import EnvironmentFault, ExitCode

if TYPE_CHECKING:
    from specbench_cli.config.predict import PredictOptions
    from specbench_cli.config.run import RunConfig
    from specbench_cli.measure.bench import Bench
    from specbench_cli.measure.probe import ProbeResult
    from specbench_cli.plan.plan import Plan

HOST_PROMPTS = 24
"""Number of prompts of the task `mini` that are decoded to measure the time on the host."""


def probe(given: dict[str, Any], options: PredictOptions, check: permission.Check) -> ExitCode:
    """Measure the times of model forwards on this machine, store them and print them.

    Args:
        given: those options of the command that are settings of a run.
        options: all options of the command.
        check: function that raises UsageError for plug-ins in `specbench.yaml` that the user did
            not permit.
    """
    config = _make_config(given, options.methods, options.set, check)
    # Validate first: importing torch takes a second.
    from specbench_cli.measure.bench import Bench
    from specbench_cli.measure.costs import CostSetup, cache_path, check_writable
    from specbench_cli.measure.isolation.plugin_process import check_plugins
    from specbench_cli.measure.machine import fingerprint
    from specbench_cli.measure.method_costs import make_costs, probed_models
    from specbench_cli.plan.plan import make_plan
    from specbench_cli.report.terminal.prediction import print_costs

    check_plugins(config)
    plan = make_plan(config)
    bench = Bench(plan)
    machine = fingerprint()
    setup = CostSetup(dtype=config.dtype, **bench.resolved_config())
    file = options.out or cache_path(machine["id"], probed_models(bench), setup)
    overwrite = options.overwrite or options.out is None  # files in the cache may be replaced
    check_writable(file, overwrite=overwrite)
    result = _measure_rounds(bench, plan, options)
    costs = make_costs(result, bench, plan, machine)
    costs.save(file, overwrite=overwrite, tracked=True)
    if options.as_json:
        facts = costs.model_dump(mode="json", by_alias=True)
        output.json_line({"event": "done", "file": file, "costs": facts})
    else:
        print_costs(costs)
        output.note(f"in {file}")
    return ExitCode.OK


def _measure_rounds(bench: Bench, plan: Plan, options: PredictOptions) -> ProbeResult:
    """Measure all rounds of a probe, each of which times every kind of forward. Return the times.

    Raises:
        EnvironmentFault: other processes used too much CPU.
    """
    from specbench_cli.measure.method_costs import (
        create_batch_decodings,
        create_session_decodings,
        probed_batch_sizes,
    )
    from specbench_cli.measure.probe import ROUNDS, Probe
    from specbench_cli.measure.quiet import MeasurementWindows, NoiseMeter

    rounds, config = options.rounds or ROUNDS, plan.config
    with count_rounds(rounds, json=options.as_json) as progress:
        probe = Probe(
            bench.workspace,
            MeasurementWindows(NoiseMeter(), allow_noise=config.allow_noise),
            {
                name: each
                for method_run in plan.method_runs
                for name, each in create_session_decodings(method_run).items()
            },
            positions=bench.context,
            prompts=[bench.encode_prompt(question, ()) for question in plan.questions],
            batches=probed_batch_sizes(options.batch),
            batch_decodings=create_batch_decodings("draft" in bench.workspace.decoders),
            seed=config.seed,
        )
        for done in range(1, rounds + 1):
            probe.measure_round()
            progress(done)
        result = probe.result()
    if result is None or result.too_noisy:
        void = rounds if result is None else result.quietness.void
        raise EnvironmentFault(
            f"other programs used too much CPU in {void} of {rounds} rounds: no costs were stored",
            "close them and probe again, or keep noisy times: specbench predict --probe"
            " --allow-noise",
        )
    return result


def _make_config(
    given: dict[str, Any],
    methods: Sequence[str],
    sets: Sequence[str],
    check: permission.Check,
) -> RunConfig:
    """Return the settings of a run from which the probe takes its models and methods.

    The methods are all those whose heads the probe times.
    """
    from specbench_cli.models.resolve import resolve

    # The probe times the target and the heads of plug-ins in one process. So plug-ins do not get a
    # process of their own.
    fixed = {"tasks": ["mini"], "limit": HOST_PROMPTS, "category": [], "isolation": "none"}

    def load_config(names: Sequence[str], sets: Sequence[str]) -> RunConfig:
        return load(
            from_command_line({**fixed, **given, "methods": names}, sets),
            None,
            methods=registry,
            env=os.environ,
            folder=Path(),
            check=check,
        )[0]

    config = load_config(("vanilla", "sps", "sps-tree", *methods), sets)
    target = resolve(config.target)
    has_draft = bool(config.draft or target.draft)
    draft_methods = ("sps", "sps-tree") if has_draft else ()
    return load_config(
        (
            "vanilla",
            *draft_methods,
            *(methods or _methods_with_heads(target.shipped_heads, has_draft)),
        ),
        sets,
    )


def _methods_with_heads(kinds: frozenset[str], has_draft: bool) -> list[str]:
    """Return the built-in methods that can run with these kinds of heads.

    Args:
        kinds: Kinds of heads that specbench ships for the target.
        has_draft: True if there is a draft model. Otherwise methods with a draft model are left
            out.
    """
    if not kinds:
        return []
    found = []
    for name, entry in registry.built_in_methods().items():
        if not entry.peer and (has_draft or "draft" not in entry.needs):
            wanted = {each.kind.kind for each in registry.build(name, {}).artifacts()}
            found += [name] * bool(wanted and wanted <= kinds)
    return found
