"""Acceptance rates of lossy methods, for the random controls of these methods.

A lossy method accepts some draft tokens, or whole reasoning steps, that lossless verification would
reject. Its random control accepts the same share of them, but chooses them at random. Comparing the
method with its control shows whether the method's rule chooses well. This module measures the share
before the run.
"""

from __future__ import annotations

from dataclasses import replace

from specbench_cli.engine.learning import Memory
from specbench_cli.engine.segments.rules import SegmentParams
from specbench_cli.engine.session import Session
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.manifest import method_entries
from specbench_cli.measure.method_code import describe_failure, enforce_time_limit, run_workers
from specbench_cli.measure.view import RunView
from specbench_cli.plan.method_run import MethodRun, get_acceptance_source
from specbench_cli.plan.plan import Plan
from specbench_cli.store.run_dir import RunDir

MAX_QUESTIONS = 48
"""Maximum number of questions that are decoded to measure a rate. They are evenly spaced over the
task, because similar questions are adjacent."""


def provide_rates(plan: Plan, bench: Bench, run_dir: RunDir, view: RunView) -> Plan:
    """Measure the acceptance rates that random controls need, and return the plan with these rates.

    A random control accepts draft tokens at random, as often as its lossy method accepts them. If
    its rate cannot be measured, the control is removed from the plan. The manifest stores the
    rates, so a resumed run uses the same rates.
    """
    sources = {
        method_run.label: source
        for method_run in plan.method_runs
        if (source := get_acceptance_source(method_run.method)) is not None
    }
    if not sources:
        return plan
    rates = dict(run_dir.manifest.get("rates") or {})
    by_label = {method_run.label: method_run for method_run in plan.method_runs}
    for label in dict.fromkeys(sources.values()):
        if label in by_label and label not in rates:
            view.stage(f"measuring the acceptance rate of {label}")
            try:
                rates[label] = _measure_rate(plan, bench, by_label[label])
            except Exception as failure:  # the method will fail in the run too, and report it
                view.note(
                    f"the random control of {label} is left out, because its acceptance rate"
                    f" cannot be measured: {describe_failure(failure)}"
                )
    rest = plan.drop_methods(
        {control for control, source in sources.items() if source not in rates}
    )
    rest = replace(
        rest, method_runs=tuple(_with_rate(method_run, rates) for method_run in rest.method_runs)
    )
    run_dir.update(rates=rates, rows=method_entries(rest))
    return rest


def _with_rate(method_run: MethodRun, rates: dict[str, float]) -> MethodRun:
    source = get_acceptance_source(method_run.method)
    if source is None:
        return method_run
    params = {**method_run.user_params, "rate": rates[source]}
    return replace(method_run, user_params=params)


def _measure_rate(plan: Plan, bench: Bench, method_run: MethodRun) -> float:
    """Return the acceptance rate of a lossy method, from 0 to 1.

    A method may accept single tokens. Then the rate is the share of accepted tokens among those
    that the lossless rule rejects. A method may accept whole reasoning steps. Then the rate is the
    share of accepted steps among all judged steps. The rate is 0 if nothing was judged.
    """
    workspace, memory = bench.workspace, Memory()
    by_step = isinstance(method_run.method.params, SegmentParams)
    accepted = judged = 0
    for question in plan.questions[:: -(-len(plan.questions) // MAX_QUESTIONS)]:
        ids, budget = bench.encode_prompt(question), plan.max_new_tokens(question)
        workspace.reserve(len(ids) + budget)
        request = bench.create_request(question.prompt_id, 1, ids, bench.stop_rule(budget))
        session = Session(workspace, request, plan.sampling, memory=memory)
        with (
            run_workers(session, workspace.transport, method_run.method.workers > 1),
            enforce_time_limit(plan.config.timeout_per_prompt),
        ):
            for step in method_run.method.generate(session):
                origin, counts = step.outcome.origin, step.extra
                if by_step:
                    accepted += counts.get("stood", 0)
                    judged += counts.get("spans", 0)
                else:
                    accepted += origin.count("relaxed")
                    judged += step.outcome.tested - origin.count("accepted")
    return round(accepted / judged, 4) if judged else 0.0
