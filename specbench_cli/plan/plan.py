"""Plan of a run: methods, questions, models and their order. Making a plan loads no weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specbench_cli import registry
from specbench_cli.config.arrivals import Arrivals
from specbench_cli.config.problems import did_you_mean
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import SpecbenchError, UsageError
from specbench_cli.models.resolve import Checkpoint, resolve
from specbench_cli.plan.checks import (
    check_imposed_acceptance,
    check_methods,
    check_tasks,
    check_test_programs,
    find_obstacle,
)
from specbench_cli.plan.grammar import Grammar
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.order import balanced_orders
from specbench_cli.store.schema import BASELINE, LOAD_PASS_OFFSET, RecordKey
from specbench_cli.tasks import Question, Task, load_task, sample_questions, select_questions

if TYPE_CHECKING:
    from specbench_cli.engine.verify.sampling import Sampling

DEFAULT_MAX_NEW_TOKENS = 128
AUTO = "auto"  # value of --draft for the target's default draft model
PROMPTS_PER_SLOT = 4  # questions measured together, per sequence of a batch


def prompts_per_batch(batch: int) -> int:
    """Return the number of questions that are measured together.

    Args:
        batch: Number of sequences in a step.
    """
    return batch * (PROMPTS_PER_SLOT if batch > 1 else 1)


@dataclass(frozen=True)
class Plan:
    """Plan of a run: its methods, tasks, questions and models."""

    config: RunConfig
    method_runs: tuple[MethodRun, ...]
    tasks: tuple[Task, ...]
    questions: tuple[Question, ...]
    target: Checkpoint
    draft: Checkpoint | None
    others: Mapping[str, Checkpoint] = field(
        default_factory=dict
    )  # models other than target and draft, by name
    # Value of --load -> arrival times of the questions in seconds. Empty without --load.
    loads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    unused_notes: tuple[str, ...] = ()  # notes for the user on tasks and families that are not used
    grammar: Grammar | None = None  # constrains all outputs

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """All models by role: "target", "draft", and others by name."""
        pair = {"target": self.target} | ({"draft": self.draft} if self.draft else {})
        return {**pair, **self.others}

    @property
    def synthetic(self) -> str | None:
        """Note for the user that some models have random weights.

        None if all weights are trained.
        """
        drawn = [each.label for each in self.checkpoints.values() if each.shape]
        if not drawn:
            return None
        chance = self.config.acceptance
        imposed = "" if chance is None else f", acceptance {chance:g} imposed"
        return f"weights of {' and '.join(dict.fromkeys(drawn))} drawn at random{imposed}"

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the run."""
        from specbench_cli.engine.verify.sampling import Sampling
        from specbench_cli.engine.verify.uscd import Contrast

        config = self.config
        contrast = None if config.contrast is None else Contrast(**config.contrast)
        drawn = config.temperature, config.top_k, config.top_p, config.seed
        return Sampling(config.rule, *drawn, contrast=contrast)

    @property
    def parallel(self) -> bool:
        """True if a method drafts in parallel with the target."""
        return any(method_run.declared.workers > 1 for method_run in self.method_runs)

    @property
    def isolated(self) -> frozenset[str]:
        """Labels of the methods that run in a plug-in process."""
        if self.config.isolation != "process":
            return frozenset()
        plugins = registry.entries().keys() - registry.built_in_methods().keys()
        return frozenset(run.label for run in self.method_runs if run.name in plugins)

    @property
    def n_prompts(self) -> int:
        """Number of prompts in a repeat: the turns of all questions."""
        return sum(len(question.turns) for question in self.questions)

    @property
    def n_outputs(self) -> int:
        """Number of outputs: prompts x methods x repeats."""
        return self.n_prompts * len(self.method_runs) * self.config.repeats * len(self.passes())

    @property
    def max_tokens(self) -> int:
        """Upper bound of the number of new tokens in all outputs."""
        rows = len(self.method_runs) * self.config.repeats * len(self.passes())
        return rows * sum(len(each.turns) * self.max_new_tokens(each) for each in self.questions)

    def drop_methods(self, labels: Collection[str]) -> Plan:
        """Return the plan without some methods."""
        kept = [row for row in self.config.methods if row.label not in labels]
        return replace(
            self,
            method_runs=tuple(
                method_run for method_run in self.method_runs if method_run.label not in labels
            ),
            config=self.config.model_copy(update={"methods": kept}),
        )

    def is_over(self, given_up: Collection[str]) -> bool:
        """Return True if all methods other than vanilla have been given up.

        Return False if the plan never had a method other than vanilla.

        Args:
            given_up: Labels of the methods that are no longer measured.
        """
        others = {
            method_run.label for method_run in self.method_runs if method_run.name != BASELINE
        }
        return bool(others) and others <= {*given_up}

    def max_new_tokens(self, question: Question) -> int:
        """Return the maximum number of new tokens for a question."""
        own = next(task.max_new_tokens for task in self.tasks if task.name == question.task)
        asked = self.config.max_new_tokens or question.max_new_tokens
        return asked or own or DEFAULT_MAX_NEW_TOKENS

    def baseline(self, method_run: MethodRun) -> str:
        """Return the label of the baseline, to which a method's speedups are relative.

        If the plan does not contain the baseline, return the name of the baseline.
        """
        name = method_run.declared.baseline
        return next((other.label for other in self.method_runs if other.name == name), name)

    def passes(self, process: int = 1) -> list[int]:
        """Return the numbers of the repeats that a process measures.

        With --load, each load is a separate repeat with its own number. Otherwise there is one
        number.

        Args:
            process: Number of the process, from 1.
        """
        return [process + LOAD_PASS_OFFSET * at for at in range(len(self.loads) or 1)]

    def load(self, pass_: int) -> str | None:
        """Return the load in a repeat, as a value of --load. Return None without --load.

        Args:
            pass_: Number of the repeat, from `passes`.
        """
        return list(self.loads)[pass_ // LOAD_PASS_OFFSET] if self.loads else None

    def schedule(self, pass_: int) -> Iterator[tuple[Question, tuple[MethodRun, ...]]]:
        """Yield each question of a repeat, with the methods in the order in which they decode it.

        Args:
            pass_: Number of the repeat, from `passes`.
        """
        by_label = {method_run.label: method_run for method_run in self.method_runs}
        orders = balanced_orders(list(by_label), len(self.questions), self.config.seed + pass_)
        for question, order in zip(self.questions, orders, strict=True):
            yield question, tuple(by_label[label] for label in order)

    def record_keys(self) -> Iterator[RecordKey]:
        """Yield the record keys of all outputs that the run plans."""
        for process in range(1, self.config.repeats + 1):
            for pass_ in self.passes(process):
                for question in self.questions:
                    for turn in range(1, len(question.turns) + 1):
                        for method_run in self.method_runs:
                            yield question.prompt_id, turn, method_run.label, pass_

    def find_missing(
        self,
        answered: Mapping[RecordKey, list[int] | None],
        manifest: Mapping[str, Any],
        has_written: Callable[[RecordKey], bool] = lambda _: False,
    ) -> list[RecordKey]:
        """Return the keys of the outputs that are missing in a finished run.

        An output that the run wrote and that was removed is missing. An output that the run skipped
        is not missing, if one of these statements is true:
        - its method was left out before the run or dropped during the run, or all methods except
          vanilla were dropped;
        - its prompt was not started before the limit of --stop-after;
        - vanilla failed on an earlier turn of the conversation.

        Args:
            answered: Token ids of the stored outputs, by key.
            manifest: Manifest of the run.
            has_written: Function that takes a key. It returns True if the run wrote the record with
                this key.
        """
        expected = set(self._expected(answered, manifest))
        keys = (key for key in self.record_keys() if key not in answered)
        return [key for key in keys if key in expected or has_written(key)]

    def _expected(
        self, answered: Mapping[RecordKey, list[int] | None], manifest: Mapping[str, Any]
    ) -> Iterator[RecordKey]:
        """Yield the keys of the outputs that a finished run must contain, see `find_missing`."""
        dropped = manifest.get("dropped") or {}
        if self.is_over(dropped):
            return
        absent = {*(manifest.get("left_out") or {}), *dropped}
        labels = [
            method_run.label for method_run in self.method_runs if method_run.label not in absent
        ]
        begun = {(prompt_id, pass_) for prompt_id, _, _, pass_ in answered}
        processes = range(1, self.config.repeats + 1)
        for pass_ in (pass_ for process in processes for pass_ in self.passes(process)):
            for question in self.questions:
                own = question.prompt_id
                if self.config.stop_after is not None and (own, pass_) not in begun:
                    continue
                for turn in range(1, len(question.turns) + 1):
                    before = (own, turn - 1, BASELINE, pass_)
                    if turn > 1 and answered.get(before) is None:
                        break
                    yield from ((own, turn, label, pass_) for label in labels)

    def facts(self) -> dict[str, Any]:
        """Return the plan as data, for --dry-run and for the JSON event "plan"."""
        return {
            "target": self.target.label,
            "draft": self.draft.label if self.draft else None,
            "methods": [
                {
                    "label": method_run.label,
                    "method": method_run.name,
                    "params": method_run.declared.params.model_dump(),
                    "source": method_run.source,
                    "baseline": self.baseline(method_run),
                }
                for method_run in self.method_runs
            ],
            "tasks": [
                {
                    "name": task.name,
                    "questions": sum(q.task == task.name for q in self.questions),
                    "prompts": sum(len(q.turns) for q in self.questions if q.task == task.name),
                }
                for task in self.tasks
            ],
            "passes": self.config.repeats * len(self.passes()),
            "cells": self.n_outputs,
            "most_tokens": self.max_tokens,
            **({"not_asked": list(self.unused_notes)} if self.unused_notes else {}),
        }


def drop_unavailable(config: RunConfig, *, fetch: bool) -> tuple[RunConfig, dict[str, str]]:
    """Return settings without the methods that cannot run on this machine.

    Also return the reason for each removed method, by label. If only vanilla would be left, return
    the settings unchanged. `make_plan` then raises the error.

    Args:
        fetch: True downloads draft heads that are not on this machine.
    """
    load_plugins(config)
    target, draft = _resolve_models(config)
    found: dict[str, str] = {}
    for row in config.methods:
        method_run = MethodRun(row.name, row.label, row.params)
        if not method_run.is_built_in:
            method_run.check_hooks()
        fault = find_obstacle(method_run, target, draft, fetch=fetch)
        if fault is not None and row.label != BASELINE:
            found[row.label] = format_reason(fault)
    kept = [row for row in config.methods if row.label not in found]
    if all(row.label == BASELINE for row in kept):
        return config, {}
    return config.model_copy(update={"methods": kept}), found


def format_reason(fault: SpecbenchError) -> str:
    """Return an error with its hint as one text, for the manifest and the user."""
    return f"{fault.message} ({fault.hint})" if fault.hint else fault.message


def load_plugins(config: RunConfig) -> None:
    """Import the plug-ins of a run in this process and register their methods.

    Before that, `measure.isolation.plugin_process.check_plugins` must import each plug-in in a
    separate process.
    """
    for path in config.plugins:
        registry.load_plugin(path)


def _resolve_models(config: RunConfig) -> tuple[Checkpoint, str | None]:
    """Return the target, and the name of the draft model.

    The name is None without a draft model.
    """
    target = resolve(config.target)
    return target, target.draft if config.draft in (None, AUTO) else config.draft


def make_plan(config: RunConfig) -> Plan:
    """Return the plan of a run. This reads task files, but neither weights nor tokenizers.

    Raises:
        UsageError: A method, parameter, task or model is unknown. Or a method needs a draft model,
            and the run has none.
        EnvironmentFault: Data or weights are missing and cannot be downloaded, or this machine has
            no sandbox for generated code.
    """
    load_plugins(config)
    method_runs = tuple(MethodRun(row.name, row.label, row.params) for row in config.methods)
    check_methods(config, method_runs)
    grammar = None if config.grammar is None else Grammar.read(config.grammar)
    tasks = tuple(load_task(name) for name in config.tasks)
    check_tasks(config, tasks)
    questions = select_questions(
        [each for task in tasks for each in task.questions], config.category
    )
    questions = _select_prompts(questions, config.prompts)
    if config.load:  # only first turns have an arrival time
        questions = [replace(question, turns=question.turns[:1]) for question in questions]
    target, draft = _resolve_models(config)
    for method_run in method_runs:
        if (fault := find_obstacle(method_run, target, draft)) is not None:
            raise fault
    needs_draft = any(method_run.needs_draft for method_run in method_runs)
    by_task = ([each for each in questions if each.task == task.name] for task in tasks)
    selected = tuple(
        question for own in by_task for question in sample_questions(own, config.limit, config.seed)
    )
    check_test_programs(config, selected)
    plan = Plan(
        config=config,
        method_runs=method_runs,
        tasks=tasks,
        questions=selected,
        unused_notes=_unused_notes(config, tasks, questions, selected),
        loads=_arrival_times(config, len(selected)),
        target=target,
        draft=resolve(draft) if needs_draft and draft else None,
        others={
            name: resolve(name)
            for method_run in method_runs
            for name in method_run.declared.models()
        },
        grammar=grammar,
    )
    check_imposed_acceptance(config, method_runs, plan.checkpoints.values(), grammar)
    return plan


def _select_prompts(questions: Sequence[Question], ids: Sequence[str]) -> list[Question]:
    """Return the questions with the given ids. If no ids are given, return all questions.

    Raise UsageError for an unknown id.
    """
    if not ids:
        return list(questions)
    known = {question.prompt_id for question in questions}
    for name in ids:
        if name not in known:
            guess = did_you_mean(name, known)
            raise UsageError(
                f"unknown question {name!r}{guess}",
                hint="an id is the task and the question's id, or its number from 0: mini/qa-003",
            )
    wanted = set(ids)
    return [question for question in questions if question.prompt_id in wanted]


def _unused_notes(
    config: RunConfig,
    tasks: Sequence[Task],
    questions: Sequence[Question],
    selected: Sequence[Question],
) -> tuple[str, ...]:
    """Return notes about tasks and families that are not used.

    The options `category` or `limit` removed every question of these tasks and families.
    """
    found = []
    for task in tasks:
        there = dict.fromkeys(each.family for each in questions if each.task == task.name)
        kept = {each.family for each in selected if each.task == task.name}
        gone = ", ".join(family for family in there if family not in kept)
        if not there:
            words = ", ".join(config.category)
            found.append(f"{task.name} is not used: it has no question of {words}")
        elif gone:
            found.append(f"--limit {config.limit} leaves no question of {task.name}'s {gone}")
    return tuple(found)


def _arrival_times(config: RunConfig, n: int) -> dict[str, tuple[float, ...]]:
    """Return the arrival times of n questions for each value of --load."""
    if config.load is None:
        return {}
    try:
        swept = Arrivals.parse_sweep(config.load)
        return {each.text: tuple(each.times(n, config.seed)) for each in swept}
    except ValueError as error:
        raise UsageError(f"--load: {error}", hint="specbench run --help") from error
