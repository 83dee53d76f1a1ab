"""The probing half of `specbench predict`: which models and methods, and where costs are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_cli import __version__, output, registry
from specbench_cli.commands._progress import count_rounds
from specbench_cli.config.load import load
from specbench_cli.config.sweep import settings
from specbench_cli.errors import EnvironmentFault, ExitCode

if TYPE_CHECKING:
    from specbench_cli.config.run import RunConfig
    from specbench_cli.execute.planning.plan import Arm
    from specbench_cli.measure.rounds import Decoding, Together

GROWN: tuple[dict[str, Any], ...] = (
    {"depth": 2, "width": 4, "nodes": 4},
    {"depth": 5, "width": 4, "nodes": 16},
    {"depth": 5, "width": 8, "nodes": 32},
)
DRAFTING: dict[str, tuple[dict[str, Any], ...]] = {
    "vanilla": (),
    "sps": ({"length": 2}, {"length": 6}),
    "sps-tree": (
        {"widths": (2, 1)},
        {"widths": (4, 1, 1, 1, 1)},
        *({"shape": "dynamic"} | params for params in GROWN),
    ),
    "eagle2": GROWN,
    "eagle3": GROWN,
    "mtp": ({"length": 1}, {"length": 4}),
}
"""Parameters of the sessions that tell what drafting costs the host; of others, those given."""

TOGETHER: dict[str, tuple[dict[str, Any], ...]] = {
    "vanilla": ({},),
    "pld": ({},),
    "eqspec": ({"length": 2}, {"length": 6}),
}
"""What decodes batches that are probed, as far as there is a draft model for it."""

PROMPTS = 24
"""Of `mini`, decoded to time the host's work."""

LOST = 0.1
"""Of a probe's rounds; if noise took more there are no costs."""


def probe(
    given: dict[str, Any],
    methods: Sequence[str],
    sets: Sequence[str],
    rounds: int | None,
    batch: int | None,
    out: Path | None,
    json: bool,
) -> ExitCode:
    """Measure the costs and keep them.

    Args:
        given: options of a run that were given.
        methods: whose heads are probed; none stands for those whose heads are shipped.
        sets: `METHOD.PARAM=VALUE` texts.
        batch: most sequences that are decoded together.
    """
    asked = _asked(given, methods, sets)
    # From here on torch is needed, which takes a second: what could be refused before was.
    from specbench_cli.execute.bench import Bench
    from specbench_cli.execute.planning.plan import make_plan
    from specbench_cli.execute.window import Windows
    from specbench_cli.measure.costs import Costs, Setup, check_writable
    from specbench_cli.measure.kept import kept_at
    from specbench_cli.measure.machine import fingerprint
    from specbench_cli.measure.probe import ROUNDS
    from specbench_cli.measure.probe import probe as measure
    from specbench_cli.measure.quiet import QuietMeter
    from specbench_cli.report.terminal.prediction_table import print_costs

    plan = make_plan(asked)
    bench = Bench(plan)
    machine, models = fingerprint(), _public(bench.models() | bench.drafting_heads())
    setup = Setup(dtype=asked.dtype, **bench.resolved())
    file = out or kept_at(machine["id"], models, setup)
    check_writable(file)
    wanted = rounds or ROUNDS
    with count_rounds(wanted, json=json) as progress:
        found = measure(
            bench.workspace,
            Windows(QuietMeter(), allow_noise=asked.allow_noise),
            {name: each for arm in plan.arms for name, each in _sessions(arm).items()},
            positions=bench.context,
            prompts=[bench.prompt(question, ()) for question in plan.questions],
            batches=_sizes(batch),
            together=_together("draft" in bench.workspace.decoders),
            seed=asked.seed,
            rounds=wanted,
            progress=progress,
        )
    if found is None or found.quietness.void > LOST * wanted:
        void = wanted if found is None else found.quietness.void
        raise EnvironmentFault(
            f"other programs took too much of this machine in {void} of {wanted} rounds:"
            " no costs were kept",
            "end them and probe again, or keep such times: specbench predict --probe --allow-noise",
        )
    costs = Costs(
        version=__version__,
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        models=models,
        setup=setup,
        seed=asked.seed,
        quietness=found.quietness,
        curves=found.curves,
        host=found.host,
        hosts=found.hosts,
        batch=found.batch,
    )
    costs.save(file)
    if json:
        facts = costs.model_dump(mode="json", by_alias=True)
        output.json_line({"event": "done", "file": file, "costs": facts})
    else:
        print_costs(costs)
        output.note(f"in {file}")
    return ExitCode.OK


def _asked(given: dict[str, Any], methods: Sequence[str], sets: Sequence[str]) -> RunConfig:
    """The configuration of a run on the models to be probed, by a run's own rules of precedence."""
    from specbench_cli.models.resolve import resolve

    # Heads of plug-ins too are timed in this process, by the clock that times the target.
    fixed = {"tasks": ["mini"], "limit": PROMPTS, "category": [], "isolation": "none"}

    def ask(names: Sequence[str], sets: Sequence[str]) -> RunConfig:
        return load(
            {**fixed, **given, "methods": names},
            sets,
            None,
            methods=registry,
            env=os.environ,
            folder=Path(),
        )[0]

    asked = ask(("vanilla", "sps", "sps-tree", *methods), sets)
    target = resolve(asked.target)
    drafted = bool(asked.draft or target.draft)
    usual = ("sps", "sps-tree") if drafted else ()
    return ask(("vanilla", *usual, *(methods or _shipped(target.shipped_heads, drafted))), sets)


def _shipped(kinds: frozenset[str], drafted: bool) -> list[str]:
    """Our methods all of whose trained modules are among these kinds.

    Args:
        drafted: whether there is a draft model.
    """
    if not kinds:
        return []
    found = []
    for name, entry in registry.METHODS.items():
        if not entry.peer and (drafted or "draft" not in entry.needs):
            wanted = {each.kind.kind for each in registry.build(name, {}).artifacts()}
            found += [name] * bool(wanted and wanted <= kinds)
    return found


def _sessions(arm: Arm) -> dict[str, Decoding]:
    """What decodes the sessions of a method, by name."""
    return {
        " ".join((arm.label, *settings(params))): registry.build(
            arm.name, {**arm.passed, **params}
        ).generate
        for params in DRAFTING.get(arm.name, ({},))
    }


def _sizes(most: int | None) -> tuple[int, ...]:
    """The batches that are probed: 1, 2, 4 and so on, up to the most."""
    if most is None:
        return ()
    doubled = (1 << power for power in range(most.bit_length()))
    return tuple(dict.fromkeys((*doubled, most)))


def _together(drafted: bool) -> dict[str, Together]:
    """What decodes batches, by name."""
    return {
        " ".join((name, *settings(params))): registry.build(name, params).generate_batch
        for name, each in TOGETHER.items()
        for params in each
        if drafted or "draft" not in registry.METHODS[name].needs
    }


def _public(models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each model what tells it from others."""
    kept = ("label", "sha256", "family", "parameters", "n_layers", "engine", "revision")
    return {
        role: {name: facts[name] for name in kept if name in facts}
        for role, facts in models.items()
    }
