"""Costs of forwards for methods that choose draft sizes, and for predictions of speedups.

A probe (`measure.probe`) measures the costs before a run, or between its prompts. A run uses the
same costs until it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from specbench_cli import __version__, registry
from specbench_cli.config.sweep import format_params
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.costs import Costs, CostSetup, find_cached
from specbench_cli.measure.machine import fingerprint
from specbench_cli.measure.manifest import utc_now
from specbench_cli.measure.probe import Probe, ProbeResult
from specbench_cli.measure.probe_rounds import BatchDecoding, SessionDecoding
from specbench_cli.measure.quiet import MeasurementWindows, NoiseMeter
from specbench_cli.measure.step_costs import StepCosts, measure_step_costs, step_costs_from_probe
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan
from specbench_cli.store.run_dir import RunDir

TREE_PARAMS: tuple[dict[str, Any], ...] = (
    {"depth": 2, "width": 4, "nodes": 4},
    {"depth": 5, "width": 4, "nodes": 16},
    {"depth": 5, "width": 8, "nodes": 32},
)
PROBED_PARAMS: dict[str, tuple[dict[str, Any], ...]] = {
    "vanilla": (),
    "sps": ({"length": 2}, {"length": 6}),
    "sps-tree": (
        {"widths": (2, 1)},
        {"widths": (4, 1, 1, 1, 1)},
        *({"shape": "dynamic"} | params for params in TREE_PARAMS),
    ),
    "eagle2": TREE_PARAMS,
    "eagle3": TREE_PARAMS,
    "mtp": ({"length": 1}, {"length": 4}),
}
"""Parameters with which a probe decodes each method to measure its host work. A method that is
missing here is decoded with the parameters of the run."""

BATCH_PARAMS: dict[str, tuple[dict[str, Any], ...]] = {
    "vanilla": ({},),
    "pld": ({},),
    "eqspec": ({"length": 2}, {"length": 6}),
}
"""Methods and parameters with which a probe decodes batches. Methods that need a draft model are
left out if there is none."""

MAX_PROMPTS = 24
"""Maximum number of prompts of the run that a probe decodes to measure the host work."""


def provide_costs(plan: Plan, bench: Bench, run_dir: RunDir) -> None:
    """Provide the costs of forwards to the methods of a run. Do nothing if no method uses them.

    The costs come from the first of these sources:

    1. The manifest, if the run is resumed.
    2. The user's cache, if a probe measured the same machine, models, setup and software without
       noise. The cache is not used if a method adapts to the number of sequences in a batch.
    3. A quick probe now. If a method adapts to the number of sequences in a batch, the probe also
       times whole steps of several sequences.
    """
    if not any(method_run.method.uses_costs for method_run in plan.method_runs):
        return
    by_load = any(method_run.method.by_load for method_run in plan.method_runs)
    stored = run_dir.manifest.get("step_costs")
    if stored:
        costs = StepCosts.model_validate(stored)
    else:
        cached = None if by_load else _load_cached(plan, bench, run_dir.manifest["machine"])
        costs = cached or measure_step_costs(
            bench.workspace,
            MeasurementWindows(NoiseMeter(), allow_noise=True),
            bench.context,
            most=plan.config.batch if by_load else 0,
            sampling=plan.sampling,
        )
        run_dir.update(step_costs=costs.model_dump(mode="json"))
    bench.workspace.costs = cache(costs)


def _load_cached(plan: Plan, bench: Bench, machine: Mapping[str, Any]) -> StepCosts | None:
    """Return the cached costs of a probe with the same machine, models, setup and software.

    None if there is no such probe, or if its measurements were noisy.
    """
    facts = bench.model_entries() | bench.drafting_head_facts()
    models = {name: each["sha256"] for name, each in facts.items()}
    setup = CostSetup(dtype=plan.config.dtype, **bench.resolved_config())
    found = find_cached(machine["id"], models, setup)
    if found is None or found.quietness.noisy:
        return None
    then = found.version, found.machine.get("versions")
    return step_costs_from_probe(found) if then == (__version__, machine["versions"]) else None


def create_session_decodings(method_run: MethodRun) -> dict[str, SessionDecoding]:
    """Return functions that decode a prompt with a method, for a probe: name -> function.

    The name of a function contains the method's label and parameters.
    """
    return {
        " ".join((method_run.label, *format_params(params))): registry.build(
            method_run.name, {**method_run.user_params, **params}
        ).generate
        for params in PROBED_PARAMS.get(method_run.name, ({},))
    }


def probed_batch_sizes(most: int | None) -> tuple[int, ...]:
    """Return the batch sizes to probe: 1, 2, 4 and so on up to `most`, and `most` itself.

    If `most` is None, return no batch sizes.
    """
    if most is None:
        return ()
    doubled = (1 << power for power in range(most.bit_length()))
    return tuple(dict.fromkeys((*doubled, most)))


def create_batch_decodings(drafted: bool) -> dict[str, BatchDecoding]:
    """Return functions that decode a batch, for a probe: name -> function.

    Args:
        drafted: True if the run has a draft model.
    """
    return {
        " ".join((name, *format_params(params))): registry.build(name, params).generate_batch
        for name, each in BATCH_PARAMS.items()
        for params in each
        if drafted or "draft" not in registry.built_in_methods()[name].needs
    }


def make_costs(found: ProbeResult, bench: Bench, plan: Plan, machine: dict[str, Any]) -> Costs:
    """Return the result of a probe as `Costs`, with facts about machine, models and setup.

    Args:
        machine: Fingerprint of the machine.
    """
    return Costs(
        version=__version__,
        created_utc=utc_now(),
        machine=machine,
        models=probed_models(bench),
        setup=CostSetup(dtype=plan.config.dtype, **bench.resolved_config()),
        seed=plan.config.seed,
        **vars(found),
    )


def probed_models(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return facts that identify each probed model and draft head.

    The keys are the roles of models and the kinds of heads.
    """
    kept = ("label", "sha256", "family", "parameters", "n_layers", "engine", "revision")
    return {
        role: {name: facts[name] for name in kept if name in facts}
        for role, facts in (bench.model_entries() | bench.drafting_head_facts()).items()
    }


class InterleavedProbe:
    """Probe that measures its rounds between the prompts of a repeat.

    In this way, the costs are measured under the same conditions as the prompts. The rounds are
    spread evenly over the repeat.

    Args:
        plan, bench: The plan of the run, and its loaded models.
        rounds: Number of rounds.
        isolated: Labels of methods that run in plug-in processes. The probe does not decode with
            these methods.

    Attributes:
        done: Number of rounds that are already measured.

    Raises:
        UsageError: the models cannot be probed.
    """

    def __init__(
        self, plan: Plan, bench: Bench, rounds: int, isolated: Collection[str] = ()
    ) -> None:
        self._plan, self._bench, self.rounds = plan, bench, rounds
        own = [
            method_run
            for method_run in plan.method_runs
            if method_run.label not in isolated
            and not method_run.method.peer
            and method_run.method.workers == 1
        ]
        config = plan.config
        self._probe = Probe(
            bench.workspace,
            MeasurementWindows(NoiseMeter(), allow_noise=config.allow_noise),
            {
                name: each
                for method_run in own
                for name, each in create_session_decodings(method_run).items()
            },
            positions=bench.context,
            prompts=[
                bench.encode_prompt(question, ()) for question in plan.questions[:MAX_PROMPTS]
            ],
            batches=probed_batch_sizes(config.batch if config.batch > 1 else None),
            batch_decodings=create_batch_decodings("draft" in bench.workspace.decoders),
            seed=config.seed,
        )
        self.done = 0

    def rounds_due(self, share: float) -> int:
        """Return the number of probe rounds to measure now.

        Args:
            share: Share of the repeat's prompts that are already measured, from 0 to 1.
        """
        return max(0, int(self.rounds * share + 1e-9) - self.done)

    def measure_round(self) -> None:
        """Measure one round of the probe."""
        self._probe.measure_round()
        self.done += 1

    def costs(self) -> Costs | None:
        """Return the measured costs.

        Return None if no round was measured, or too many rounds were noisy.
        """
        found = self._probe.result() if self.done else None
        if found is None or found.too_noisy:
            return None
        return make_costs(found, self._bench, self._plan, fingerprint())
