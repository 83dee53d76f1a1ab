"""How many of the rejected tokens, or of the steps, rules let pass, measured before their controls
begin."""

from __future__ import annotations

from dataclasses import replace

from specbench_cli.engine.learning import Memory
from specbench_cli.engine.session import Session
from specbench_cli.engine.spans.judge import SegmentParams
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.manifest import rows
from specbench_cli.measure.method_code import limited, one_line, staffed
from specbench_cli.measure.view import RunView
from specbench_cli.plan.method_run import MethodRun, like_of
from specbench_cli.plan.plan import Plan
from specbench_cli.store.run_dir import RunDir

QUESTIONS = 48
"""That a rate is measured on, at most: first turns, evenly spaced, as a task's families lie
together."""


def provide_rates(plan: Plan, bench: Bench, run_dir: RunDir, view: RunView) -> Plan:
    """The plan with each control at the rate of the row that it is `like`, without those whose
    rates cannot be measured. The manifest keeps the rates, so that they are the same to the run's
    end."""
    likes = {
        method_run.label: like
        for method_run in plan.method_runs
        if (like := like_of(method_run.method)) is not None
    }
    if not likes:
        return plan
    rates = dict(run_dir.manifest.get("rates") or {})
    ruled = {method_run.label: method_run for method_run in plan.method_runs}
    for label in dict.fromkeys(likes.values()):
        if label in ruled and label not in rates:
            view.stage(f"measuring how many {label} lets pass")
            try:
                rates[label] = _rate(plan, bench, ruled[label])
            except Exception as failure:  # the row itself will fail, and say so
                view.note(f"no random control of {label}: {one_line(failure)}")
    rest = plan.without({control for control, like in likes.items() if like not in rates})
    rest = replace(
        rest, method_runs=tuple(_at(method_run, rates) for method_run in rest.method_runs)
    )
    run_dir.update(rates=rates, rows=rows(rest))
    return rest


def _at(method_run: MethodRun, rates: dict[str, float]) -> MethodRun:
    like = like_of(method_run.method)
    if like is None:
        return method_run
    passed = {**method_run.passed, "rate": rates[like]}
    return replace(method_run, passed=passed)


def _rate(plan: Plan, bench: Bench, method_run: MethodRun) -> float:
    """Of the levels that the lossless rule rejected, the share that a row's accept rule let pass;
    of a rule over steps, of those that it judged. 0 where there was none."""
    workspace, memory = bench.workspace, Memory()
    by_step = isinstance(method_run.method.params, SegmentParams)
    passed = asked = 0
    for question in plan.questions[:: -(-len(plan.questions) // QUESTIONS)]:
        ids, budget = bench.prompt(question), plan.budget(question)
        workspace.reserve(len(ids) + budget)
        request = bench.request(question.prompt_id, 1, ids, bench.stop(budget))
        session = Session(workspace, request, plan.sampling, memory=memory)
        with (
            staffed(session, workspace.transport, method_run.method.workers > 1),
            limited(plan.config.timeout_per_prompt),
        ):
            for step in method_run.method.generate(session):
                words, counts = step.outcome.origin, step.extra
                if by_step:
                    passed += counts.get("stood", 0)
                    asked += counts.get("spans", 0)
                else:
                    passed += words.count("relaxed")
                    asked += step.outcome.tested - words.count("accepted")
    return round(passed / asked, 4) if asked else 0.0
