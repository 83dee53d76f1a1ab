"""Acceptance rates of lossy methods, which their random controls use.

A rate is measured before the run: the share of rejected tokens, or of reasoning steps, that the
method's rule accepts.
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
"""Maximum number of questions for a rate. They are evenly spaced, because questions of a family are
adjacent in a task."""


def provide_rates(plan: Plan, bench: Bench, run_dir: RunDir, view: RunView) -> Plan:
    """Return the plan with the acceptance rate of each random control.

    Controls whose rate cannot be measured are removed. The manifest stores the rates, so a resumed
    run uses the same ones.
    """
    sources = {
        method_run.label: like
        for method_run in plan.method_runs
        if (like := get_acceptance_source(method_run.method)) is not None
    }
    if not sources:
        return plan
    rates = dict(run_dir.manifest.get("rates") or {})
    by_label = {method_run.label: method_run for method_run in plan.method_runs}
    for label in dict.fromkeys(sources.values()):
        if label in by_label and label not in rates:
            view.stage(f"measuring how many {label} lets pass")
            try:
                rates[label] = _measure_rate(plan, bench, by_label[label])
            except Exception as failure:  # the method will fail in the run too, and report it
                view.note(f"no random control of {label}: {describe_failure(failure)}")
    rest = plan.without({control for control, like in sources.items() if like not in rates})
    rest = replace(
        rest, method_runs=tuple(_with_rate(method_run, rates) for method_run in rest.method_runs)
    )
    run_dir.update(rates=rates, rows=method_entries(rest))
    return rest


def _with_rate(method_run: MethodRun, rates: dict[str, float]) -> MethodRun:
    like = get_acceptance_source(method_run.method)
    if like is None:
        return method_run
    passed = {**method_run.passed, "rate": rates[like]}
    return replace(method_run, passed=passed)


def _measure_rate(plan: Plan, bench: Bench, method_run: MethodRun) -> float:
    """Return the share of levels rejected by the lossless rule that the method's accept rule
    accepts.

    For a rule over reasoning steps, return the share of judged steps. 0 if there was none.
    """
    workspace, memory = bench.workspace, Memory()
    by_step = isinstance(method_run.method.params, SegmentParams)
    passed = judged = 0
    for question in plan.questions[:: -(-len(plan.questions) // MAX_QUESTIONS)]:
        ids, budget = bench.encode_prompt(question), plan.budget(question)
        workspace.reserve(len(ids) + budget)
        request = bench.create_request(question.prompt_id, 1, ids, bench.stop_rule(budget))
        session = Session(workspace, request, plan.sampling, memory=memory)
        with (
            run_workers(session, workspace.transport, method_run.method.workers > 1),
            enforce_time_limit(plan.config.timeout_per_prompt),
        ):
            for step in method_run.method.generate(session):
                words, counts = step.outcome.origin, step.extra
                if by_step:
                    passed += counts.get("stood", 0)
                    judged += counts.get("spans", 0)
                else:
                    passed += words.count("relaxed")
                    judged += step.outcome.tested - words.count("accepted")
    return round(passed / judged, 4) if judged else 0.0
