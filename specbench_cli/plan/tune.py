"""Tuning: choose parameters of each method on development questions (`--tune`).

The maximum number of candidates is the same for every method. All candidates are measured on the
same development questions. The run then measures the chosen parameters on the other (held-out)
questions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbench_cli.errors import EnvironmentFault, UsageError
from specbench_cli.plan.grid import list_candidates
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import Plan
from specbench_cli.store.record_queries import drop_prompt_errors
from specbench_cli.store.schema import BASELINE, Record
from specbench_cli.tasks import Question

DEVELOPMENT = 1 / 3
"""Share of each family's clusters whose questions are used for tuning. A cluster is a group of
similar questions."""

FOLDER = "tuning"
"""Subfolder of a run with the records of its tuning, which is stored like a run."""


@dataclass(frozen=True)
class Tuning:
    """Candidates and questions of a tuning.

    Attributes:
        rows: Label of a method -> candidates of the method.
        development: Questions on which the candidates are compared.
    """

    rows: Mapping[str, tuple[MethodRun, ...]]
    development: tuple[Question, ...]


@dataclass(frozen=True)
class TuningChoice:
    """Result of tuning one method.

    Attributes:
        costs: Label of a candidate -> its cost per token. None if the cost was not measured.
        best: Label of the chosen candidate.
        n: Number of prompts on which all candidates were compared.
    """

    costs: Mapping[str, float | None]
    best: str
    n: int


def prepare(plan: Plan) -> tuple[Plan, Tuning]:
    """Return the plan of the final measurement on held-out questions, and the tuning.

    Raises:
        UsageError: There are too few questions, or a sweep has more combinations than the tuning
            budget.
    """
    config = plan.config
    assert config.tune is not None
    rows = {
        method_run.label: list_candidates(
            method_run, config.tune, config.rule, config.sweep.get(method_run.name)
        )
        for method_run in plan.method_runs
    }
    development, held_out = split(plan.questions, config.seed)
    return replace(plan, questions=held_out), Tuning(rows, development)


def split(
    questions: Sequence[Question], seed: int, share: float = DEVELOPMENT, who: str = "--tune"
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Split questions into development questions and held-out questions.

    A cluster is a group of similar questions. In each family with at least two clusters, a share of
    the clusters (at least one) is used for development. The selection depends only on the seed and
    the names of the clusters.

    Args:
        who: Option that needs the split. Error messages name it.

    Raises:
        UsageError: No family has at least two clusters.
    """
    family: dict[tuple[str, str], str] = {}
    for question in questions:
        family.setdefault((question.task, question.cluster), question.family)
    chosen: set[tuple[str, str]] = set()
    for name in sorted(set(family.values())):
        ranked = sorted((c for c in family if family[c] == name), key=lambda c: _rank(seed, c))
        if len(ranked) > 1:
            chosen.update(ranked[: max(1, round(share * len(ranked)))])
    if not chosen:
        raise UsageError(
            f"{who} needs development and held-out questions: {len(questions)} are too few, at"
            " least one family must have two",
            "--limit 24",
        )
    parts: tuple[list[Question], list[Question]] = [], []
    for question in questions:
        parts[(question.task, question.cluster) not in chosen].append(question)
    return tuple(parts[0]), tuple(parts[1])


def _rank(seed: int, cluster: tuple[str, str]) -> bytes:
    return hashlib.sha256("\n".join([f"tune {seed}", *cluster]).encode()).digest()


def tuning_plan(plan: Plan, tuning: Tuning) -> Plan:
    """Return a plan that measures each candidate once on all development questions."""
    return replace(
        plan,
        config=plan.config.model_copy(update={"repeats": 1, "tune": None}),
        method_runs=tuple(
            method_run for method_runs in tuning.rows.values() for method_run in method_runs
        ),
        questions=tuning.development,
    )


def choose(
    tuning: Tuning, records: Sequence[Record], by: str, weights: Mapping[str, int]
) -> dict[str, TuningChoice]:
    """Return the candidate with the lowest cost per token, for each method.

    A prompt is used only if all candidates of a method have a valid cost on it. Candidates that
    failed or generated wrong outputs are excluded.

    Args:
        by: Kind of cost. "time" is the decode time per token, including time for learning. For
            external engines (peers), "time" is the total time, because they do not report decode
            times. "forwards" is the cost in target forwards (`forwards_cost`).
        weights: Name of a model in traces -> bytes of its weights.

    Raises:
        EnvironmentFault: Because of noise, no prompt has valid times for all candidates.
    """
    costs: dict[str, dict[tuple[str, int], tuple[float, int]]] = {}
    wrong: set[str] = set()
    for record in drop_prompt_errors(records, (r for r in records if r.label == BASELINE)):
        if record.error or (record.verdict is not None and record.verdict.kind == "mismatch"):
            wrong.add(record.label)
            continue
        figure = _time_cost(record) if by == "time" else forwards_cost(record, weights)
        if figure is not None:
            costs.setdefault(record.label, {})[record.prompt_id, record.turn] = figure
    return {
        row: _choose_best(row, method_runs, costs, wrong)
        for row, method_runs in tuning.rows.items()
    }


def _choose_best(
    row: str,
    method_runs: Sequence[MethodRun],
    figures: Mapping[str, Mapping[tuple[str, int], tuple[float, int]]],
    wrong: set[str],
) -> TuningChoice:
    labels = [method_run.label for method_run in method_runs]
    sound = [label for label in labels if label not in wrong]
    if len(labels) == 1 or not sound:
        return TuningChoice(dict.fromkeys(labels), labels[0], 0)
    shared = set.intersection(*(set(figures.get(label, ())) for label in sound))
    if not shared:
        raise EnvironmentFault(
            f"{row} cannot be tuned: no development prompt has times of all its candidates without"
            " noise",
            "start a new run on a quiet machine (specbench doctor), or with --tune-by forwards",
        )
    costs: dict[str, float | None] = dict.fromkeys(labels)
    for label in sound:
        pairs = [figures[label][at] for at in shared]
        costs[label] = sum(cost for cost, _ in pairs) / sum(tokens for _, tokens in pairs)
    return TuningChoice(costs, min(sound, key=lambda label: costs[label] or 0.0), len(shared))


def _time_cost(record: Record) -> tuple[float, int] | None:
    """Return the decode time of an output in ms, and the number of tokens generated in this time.

    Return None if the record has no time.
    """
    if record.void or not record.n_tokens:
        return None
    if record.peer or record.ns.decode is None:
        return None if record.ns.total is None else (record.ns.total / 1e6, record.n_tokens)
    spent = record.ns.decode + (record.ns.learn or 0)
    return (spent / 1e6, record.n_tokens - 1) if record.n_tokens > 1 else None


def forwards_cost(record: Record, weights: Mapping[str, int]) -> tuple[float, int] | None:
    """Return the cost of decoding in target forwards, and the number of generated tokens.

    A forward of another model, or of some layers, costs less. Its cost is the size of the weights
    that it reads, divided by the size of the target's weights. External engines (peers) report no
    forwards. For them, one target forward per step and one draft forward per level are assumed.
    """
    if not record.n_tokens or record.steps is None:
        return None
    share = {name: held / weights["target"] for name, held in weights.items()}
    if record.forwards is None:
        drafted = sum(record.steps.levels) * share.get("draft", 0.0)
        return 1 + len(record.steps.levels) + drafted, record.n_tokens
    kinds = record.forwards.kinds
    depth: dict[str, int] = {}
    for kind in kinds:
        depth[kind.model] = max(depth.get(kind.model, 1), kind.layers[1])
    cost = 0.0
    for index, times in Counter(record.forwards.kind).items():
        kind = kinds[index]
        cost += times * kind.share_of(depth[kind.model]) * share.get(kind.model, 0.0)
    return cost, record.n_tokens


def facts(plan: Plan, tuning: Tuning, choices: Mapping[str, TuningChoice]) -> dict[str, Any]:
    """Return the manifest entry of a tuning."""
    return {
        "budget": plan.config.tune,
        "by": plan.config.tune_by,
        "development": _counts(tuning.development),
        "held_out": _counts(plan.questions),
        "rows": {
            row: {
                "tried": len(method_runs),
                "prompts": choices[row].n,
                "candidates": [
                    {
                        "params": method_run.declared.params.model_dump(mode="json"),
                        "cost": choices[row].costs[method_run.label],
                        "chosen": method_run.label == choices[row].best,
                    }
                    for method_run in method_runs
                ],
                "passed": next(
                    dict(a.user_params) for a in method_runs if a.label == choices[row].best
                ),
            }
            for row, method_runs in tuning.rows.items()
        },
    }


def apply_tuning(plan: Plan, manifest: Mapping[str, Any]) -> Plan:
    """Return the plan with the parameters that the tuning chose.

    The manifest stores these parameters.
    """
    rows = (manifest.get("tuning") or {}).get("rows", {})

    def apply_choice(method_run: MethodRun) -> MethodRun:
        found = rows.get(method_run.label, {"tried": 1})
        if found["tried"] == 1:
            return method_run
        return MethodRun(method_run.name, method_run.label, found["passed"], found["tried"])

    return replace(plan, method_runs=tuple(map(apply_choice, plan.method_runs)))


def _counts(questions: Sequence[Question]) -> dict[str, int]:
    return dict(sorted(Counter(question.family for question in questions).items()))
