"""What a run will do, worked out before any weight is read: rows, questions, checkpoints, order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, get_args

from specbench_cli import registry
from specbench_cli.config import plugin_file
from specbench_cli.config.arrivals import Arrivals
from specbench_cli.config.problems import did_you_mean, listed
from specbench_cli.config.run import RunConfig
from specbench_cli.engine.method import Method
from specbench_cli.engine.models.head import Trained
from specbench_cli.engine.types import Guarantee
from specbench_cli.engine.verify.accept import AcceptRule
from specbench_cli.engine.verify.contrast import Contrast
from specbench_cli.engine.verify.hooks import wrong_return
from specbench_cli.engine.verify.sampling import Rule, Sampling
from specbench_cli.errors import EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.models.heads import check_head, resolve_head
from specbench_cli.models.resolve import Checkpoint, resolve
from specbench_cli.plan.grammar import Grammar
from specbench_cli.plan.order import balanced
from specbench_cli.scoring.code import check_containment, compiles
from specbench_cli.store.schema import GUARANTEES, LOSSLESS, PASSES_APART, Key
from specbench_cli.tasks import Question, Task, load_task, sample, select

DEFAULT_MAX_NEW_TOKENS = 128
AUTO = "auto"  # the target's customary draft, said aloud
REFERENCE = "vanilla"  # the label that every other row is compared with
WAVES = 4  # questions that are dealt to a batch at once, as a multiple of its size


def wave(batch: int) -> int:
    """Questions that are measured as one where so many sequences take part in a step."""
    return batch * (WAVES if batch > 1 else 1)


@dataclass(frozen=True)
class Arm:
    """One row of the result: a method with its parameters.

    passed: the parameters as given; the method holds all of them as they take effect.
    tuned: among how many these were chosen; None where they were not.
    """

    name: str
    label: str
    method: Method
    passed: Mapping[str, Any]
    tuned: int | None = None

    @property
    def source(self) -> str:
        """Where its parameters come from: "paper", "default", "tuned(n)" or "set"."""
        if self.tuned is not None:
            return f"tuned({self.tuned})"
        method, params = type(self.method), self.method.params
        if method.paper and params == method.Params.model_validate(method.paper):
            return "paper"
        fields = method.Params.model_fields.items()
        plain = {name: field.get_default(call_default_factory=True) for name, field in fields}
        return "default" if dict(params) == plain else "set"

    @cached_property
    def guarantees(self) -> Mapping[Rule, Guarantee]:
        """What its method promises under each decoding rule: asked once, so that what is judged and
        what is written cannot differ.

        Raises:
            UsageError: it promises what nobody knows.
        """
        found = {rule: self.method.guarantee(rule) for rule in get_args(Rule)}
        for rule, word in found.items():
            if word not in GUARANTEES:
                raise UsageError(
                    f"{self.label}: its guarantee under {rule} is {word!r}, which is none of"
                    f" {', '.join(GUARANTEES)}",
                    hint="mend its `guarantee(sampling)`, or leave it out",
                )
        return found

    def check_hooks(self) -> None:
        """Raise UsageError if a declaration hook of the method returns a wrong type."""
        for hook, what, fits in _DECLARATION_HOOKS:
            said = getattr(self.method, hook)
            said = said() if callable(said) else said
            if not fits(said):
                fault = wrong_return(self.method, hook, said, what)
                raise UsageError(fault.message, "docs/methods.md describes what each hook returns")

    @property
    def file_sha256(self) -> str:
        """Checksum of the file that the method's class is defined in: what an audit is valid of."""
        return sha256(plugin_file.content(inspect.getfile(type(self.method)))).hexdigest()


def _is_list_of(kind: type, said: object) -> bool:
    return isinstance(said, tuple | list) and all(isinstance(each, kind) for each in said)


_DECLARATION_HOOKS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("models", "a tuple of names of models", partial(_is_list_of, str)),
    ("artifacts", "a tuple of Trained modules", partial(_is_list_of, Trained)),
    ("accept", "an AcceptRule or None", lambda said: isinstance(said, AcceptRule | None)),
    ("needed", "a set of words", lambda said: isinstance(said, frozenset | set)),
    ("scope", "prompt, run or corpus", lambda said: said in ("prompt", "run", "corpus")),
)
"""Hooks that a method declares itself with: name, expected type in words, check of the value."""


@dataclass(frozen=True)
class Plan:
    """A run, planned. Building one reads task files but neither weights nor tokenizers."""

    config: RunConfig
    arms: tuple[Arm, ...]
    tasks: tuple[Task, ...]
    questions: tuple[Question, ...]
    target: Checkpoint
    draft: Checkpoint | None
    others: Mapping[str, Checkpoint] = field(default_factory=dict)  # by the name methods ask for
    # How requests arrive, as typed, and when the questions do, in seconds; none: all are there.
    loads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # what of the tasks is not asked, in words
    grammar: Grammar | None = None  # that all outputs are held to

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """All models by role: "target", "draft", and others by name."""
        pair = {"target": self.target} | ({"draft": self.draft} if self.draft else {})
        return {**pair, **self.others}

    @property
    def synthetic(self) -> str | None:
        """What of the models is made up, in words; None where nothing is."""
        drawn = [each.label for each in self.checkpoints.values() if each.shape]
        if not drawn:
            return None
        chance = self.config.acceptance
        imposed = "" if chance is None else f", acceptance {chance:g} imposed"
        return f"weights of {' and '.join(dict.fromkeys(drawn))} drawn at random{imposed}"

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        asked = self.config
        contrast = None if asked.contrast is None else Contrast(**asked.contrast)
        drawn = asked.temperature, asked.top_k, asked.top_p, asked.seed
        return Sampling(asked.rule, *drawn, contrast=contrast)

    @property
    def parallel(self) -> bool:
        """Whether a method has workers that compute at once."""
        return any(arm.method.workers > 1 for arm in self.arms)

    @property
    def apart(self) -> frozenset[str]:
        """The rows of plug-ins that are decoded in a process of the plug-in's own."""
        if self.config.isolation != "process":
            return frozenset()
        foreign = registry.entries().keys() - registry.ours().keys()
        return frozenset(arm.label for arm in self.arms if arm.name in foreign)

    @property
    def turns(self) -> int:
        """Prompts in a pass: the turns of all questions."""
        return sum(len(question.turns) for question in self.questions)

    @property
    def cells(self) -> int:
        """Outputs to be made: prompts x rows x passes."""
        return self.turns * len(self.arms) * self.config.repeats * len(self.passes())

    @property
    def most_tokens(self) -> int:
        """The tokens of all outputs, if each were as long as it may be."""
        rows = len(self.arms) * self.config.repeats * len(self.passes())
        return rows * sum(len(each.turns) * self.budget(each) for each in self.questions)

    def without(self, labels: Collection[str]) -> Plan:
        """The same of the other rows."""
        kept = [row for row in self.config.methods if row.label not in labels]
        return replace(
            self,
            arms=tuple(arm for arm in self.arms if arm.label not in labels),
            config=self.config.model_copy(update={"methods": kept}),
        )

    def is_over(self, given_up: Collection[str]) -> bool:
        """Return True if no method is left to compare with vanilla.

        The result is always False for a plan that contains only vanilla.

        Args:
            given_up: Labels of the methods that are no longer measured.
        """
        others = {arm.label for arm in self.arms if arm.name != REFERENCE}
        return bool(others) and others <= {*given_up}

    def budget(self, question: Question) -> int:
        """Most new tokens for a question."""
        own = next(task.max_new_tokens for task in self.tasks if task.name == question.task)
        asked = self.config.max_new_tokens or question.max_new_tokens
        return asked or own or DEFAULT_MAX_NEW_TOKENS

    def baseline(self, arm: Arm) -> str:
        """The label of the row that a row's speedups are over, whether that is run or not."""
        name = arm.method.baseline
        return next((other.label for other in self.arms if other.name == name), name)

    def passes(self, process: int = 1) -> list[int]:
        """The passes that a process makes, which is one, or one under each load."""
        return [process + PASSES_APART * at for at in range(len(self.loads) or 1)]

    def load(self, pass_: int) -> str | None:
        """How requests arrive in a pass; None where all are there."""
        return list(self.loads)[pass_ // PASSES_APART] if self.loads else None

    def visits(self, pass_: int) -> Iterator[tuple[Question, tuple[Arm, ...]]]:
        """The questions of a pass, each with its rows in that visit's order."""
        by_label = {arm.label: arm for arm in self.arms}
        orders = balanced(list(by_label), len(self.questions), self.config.seed + pass_)
        for question, order in zip(self.questions, orders, strict=True):
            yield question, tuple(by_label[label] for label in order)

    def keys(self) -> Iterator[Key]:
        """Return the keys of all outputs that the run may contain."""
        for process in range(1, self.config.repeats + 1):
            for pass_ in self.passes(process):
                for question in self.questions:
                    for turn in range(1, len(question.turns) + 1):
                        for arm in self.arms:
                            yield question.prompt_id, turn, arm.label, pass_

    def missing_from(
        self,
        answered: Mapping[Key, list[int] | None],
        manifest: Mapping[str, Any],
        wrote: Callable[[Key], bool] = lambda _: False,
    ) -> list[Key]:
        """Return the keys of outputs that a finished run should contain but does not.

        These outputs may be missing if the run did not write them: those of methods that were left
        out or dropped, those of prompts that --stop-after left out, and those of turns after one on
        which vanilla failed. If all methods except vanilla were dropped, any output may be missing.

        Args:
            answered: Outputs of the run by key, each with its token ids.
            manifest: Manifest of the run.
            wrote: Returns True if the run wrote the record with this key.
        """
        expected = set(self._expected(answered, manifest))
        keys = (key for key in self.keys() if key not in answered)
        return [key for key in keys if key in expected or wrote(key)]

    def _expected(
        self, answered: Mapping[Key, list[int] | None], manifest: Mapping[str, Any]
    ) -> Iterator[Key]:
        """Return the keys of outputs that a finished run contains; see `missing_from`."""
        dropped = manifest.get("dropped") or {}
        if self.is_over(dropped):
            return
        absent = {*(manifest.get("left_out") or {}), *dropped}
        labels = [arm.label for arm in self.arms if arm.label not in absent]
        begun = {(prompt_id, pass_) for prompt_id, _, _, pass_ in answered}
        processes = range(1, self.config.repeats + 1)
        for pass_ in (pass_ for process in processes for pass_ in self.passes(process)):
            for question in self.questions:
                own = question.prompt_id
                if self.config.stop_after is not None and (own, pass_) not in begun:
                    continue
                for turn in range(1, len(question.turns) + 1):
                    before = (own, turn - 1, REFERENCE, pass_)
                    if turn > 1 and answered.get(before) is None:
                        break
                    yield from ((own, turn, label, pass_) for label in labels)

    def facts(self) -> dict[str, Any]:
        """The plan for a person or a program to read."""
        return {
            "target": self.target.label,
            "draft": self.draft.label if self.draft else None,
            "methods": [
                {
                    "label": arm.label,
                    "method": arm.name,
                    "params": arm.method.params.model_dump(),
                    "source": arm.source,
                    "baseline": self.baseline(arm),
                }
                for arm in self.arms
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
            "cells": self.cells,
            "most_tokens": self.most_tokens,
            **({"not_asked": list(self.missing)} if self.missing else {}),
        }


def fitting(config: RunConfig, *, fetch: bool) -> tuple[RunConfig, dict[str, str]]:
    """A configuration without the rows that cannot run here, and by their labels why: the others
    are measured all the same. Where none of them would be left beside vanilla it stays as it is,
    for `make_plan` to refuse.

    Args:
        fetch: have heads that are not on this machine downloaded.
    """
    plug_in(config)
    target, draft = _pair(config)
    found: dict[str, str] = {}
    for row in config.methods:
        arm = Arm(row.name, row.label, registry.build(row.name, row.params), row.params)
        arm.check_hooks()
        fault = _unfit(arm, target, draft, fetch=fetch)
        if fault is not None and row.label != REFERENCE:
            found[row.label] = reason(fault)
    kept = [row for row in config.methods if row.label not in found]
    if all(row.label == REFERENCE for row in kept):
        return config, {}
    return config.model_copy(update={"methods": kept}), found


def reason(fault: SpecbenchError) -> str:
    """Why a row cannot run here, in a manifest and for a person."""
    return f"{fault.message} ({fault.hint})" if fault.hint else fault.message


def plug_in(config: RunConfig) -> None:
    """Import and register a configuration's plug-ins in this process.

    `measure.isolation.rooms.check_plugins` imports them in processes of their own first.
    """
    for path in config.plugins:
        registry.load_plugin(path)


def _pair(config: RunConfig) -> tuple[Checkpoint, str | None]:
    """The target, and the draft's name if there is one."""
    target = resolve(config.target)
    return target, target.draft if config.draft in (None, AUTO) else config.draft


def _unfit(
    arm: Arm, target: Checkpoint, draft: str | None, *, fetch: bool = False
) -> SpecbenchError | None:
    """Why a row cannot run here: it needs a draft model or a head, and the target has none, or
    none that can be had. Of `fetch` see `fitting`."""
    if "draft" in arm.method.needed and draft is None:
        return UsageError(
            f"{arm.label} needs a draft model, and {target.label} has no customary one",
            hint="add --draft MODEL with the target's tokenizer: a short name (specbench list"
            " models), a hub id (org/name), a folder or a .gguf file; specbench list methods says"
            " which need none",
        )
    try:
        arm.method.check()
        for wanted in arm.method.artifacts():
            find = resolve_head if fetch else check_head
            kind = wanted.kind
            find(wanted.source, kind.kind, target, inside=kind.inside, hint=kind.hint)
    except (UsageError, EnvironmentFault) as fault:
        return fault
    return None


def _check_tests(questions: Sequence[Question]) -> None:
    """See that tests can be run where the answer is not. Raises UsageError."""
    for question in questions:
        if question.program and not compiles(question.program[1]):
            raise UsageError(
                f"{question.prompt_id}: what follows {{answer}} in its program is none by itself:"
                f" {question.program[1][:60]!r}; it is run apart from the answer",
                hint="end the answer's part of the task's `program` with {answer}, or leave"
                " --run-code out",
            )


def make_plan(config: RunConfig) -> Plan:
    """Plan a run.

    Raises:
        UsageError: an unknown method, parameter, task or model; a method that needs a draft and has
        none. EnvironmentFault: data or weights that are not here and cannot be fetched; code that
        is to be run and cannot be contained.
    """
    if config.run_code and not config.uncontained:
        check_containment()
    plug_in(config)
    arms = tuple(
        Arm(row.name, row.label, registry.build(row.name, row.params), row.params)
        for row in config.methods
    )
    for arm in arms:
        arm.guarantees  # noqa: B018  what it promises is known before anything is loaded
        arm.check_hooks()
    grammar = None
    if config.contrast is not None:
        lets = "lets tokens stand that the contrasted target may not say"
        _check_held("--contrast", config.rule, arms, lets)
    if config.grammar is not None:
        option = f"--grammar {config.grammar}"
        _check_held(option, config.rule, arms, f"lets tokens stand that {option} may forbid")
        grammar = Grammar.read(config.grammar)
    bounds = [arm.label for arm in arms if arm.method.upper_bound]
    if bounds and config.verify in ("rejection", "block"):
        raise UsageError(
            f"{', '.join(bounds)} reads vanilla's output, which is its own only where both are the"
            f" same: not under {config.verify}",
            hint="--temperature 0, or --verify coupled",
        )
    _check_likes(config, arms)
    ruled = [arm.label for arm in arms if arm.method.accept and not arm.method.accept.off]
    if ruled and config.verify in ("block", "replay"):
        why = "judges whole blocks" if config.verify == "block" else "commits vanilla's tokens"
        raise UsageError(
            f"{', '.join(ruled)} has an accept rule, which decides on single tokens, and --verify"
            f" {config.verify} {why}",
            hint="--verify rejection or coupled, or --temperature 0",
        )
    if config.devices is not None and all(arm.method.workers == 1 for arm in arms):
        raise UsageError(
            "--devices is for methods that draft while the target computes, and none of them is run"
            f" ({', '.join(arm.label for arm in arms)})",
            hint="add --method pearl, or use --device and --threads, which are for all others",
        )
    learning = [arm.label for arm in arms if arm.method.scope != "prompt"]
    if config.executor != "local" and learning:
        raise UsageError(
            f"{', '.join(learning)} learns from prompt to prompt, and --executor {config.executor}"
            " deals prompts to several machines",
            hint="--executor local, or leave it out; specbench list methods says which learn",
        )
    alone = [arm.label for arm in arms if not arm.method.batches]
    if (config.batch > 1 or config.load) and alone:
        what = "--load" if config.load else f"--batch {config.batch}"
        raise UsageError(
            f"{', '.join(alone)} decodes one prompt at a time, and {what} decodes"
            f" {config.batch if config.batch > 1 else 'several'} together",
            hint=f"leave it out, or drop {what.split()[0]}; specbench list methods says which draft"
            " beside the target or are another program's",
        )
    tasks = tuple(load_task(name) for name in config.tasks)
    for task in tasks:
        if task.samples > 1 and config.temperature == 0:
            raise UsageError(
                f"{task.name} asks each question {task.samples} times, and at temperature 0 all"
                " answers to it are the same",
                hint="add --temperature 0.8, and --verify coupled for vanilla's very tokens",
            )
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two tasks have one name: {listed(names)}", hint="name each once, or rename a file"
        )
    asked = select([each for task in tasks for each in task.questions], config.category)
    asked = _named(asked, config.prompts)
    if config.load:  # a later turn would arrive when it is asked
        asked = [replace(question, turns=question.turns[:1]) for question in asked]
    target, draft = _pair(config)
    for arm in arms:
        if (fault := _unfit(arm, target, draft)) is not None:
            raise fault
    needy = any("draft" in arm.method.needed for arm in arms)
    by_task = ([each for each in asked if each.task == task.name] for task in tasks)
    chosen = tuple(
        question for own in by_task for question in sample(own, config.limit, config.seed)
    )
    if config.run_code:
        _check_tests(chosen)
    plan = Plan(
        config=config,
        arms=arms,
        tasks=tasks,
        questions=chosen,
        missing=_missing(config, tasks, asked, chosen),
        loads=_loads(config, len(chosen)),
        target=target,
        draft=resolve(draft) if needy and draft else None,
        others={name: resolve(name) for arm in arms for name in arm.method.models()},
        grammar=grammar,
    )
    _check_imposed(plan)
    return plan


def _check_imposed(plan: Plan) -> None:
    """See that acceptance is imposed on nothing but what can take it. Raises UsageError."""
    config = plan.config
    if config.acceptance is None:
        return
    if real := [each.label for each in plan.checkpoints.values() if not each.shape]:
        raise UsageError(
            f"--acceptance is imposed on shapes alone, and {' and '.join(real)} has weights that"
            " say what is accepted",
            hint="--target shape:llama-2-7b --draft shape:llama-68m (specbench list models says"
            " what has weights), or leave it out",
        )
    if config.temperature > 0:
        raise UsageError(
            "--acceptance is imposed at temperature 0: an imposed law has one token",
            hint="leave --temperature out",
        )
    peers = [arm.label for arm in plan.arms if arm.method.peer]
    if peers or plan.grammar is not None:
        why = f"{', '.join(peers)} decodes by" if peers else "a grammar holds outputs to"
        raise UsageError(
            f"--acceptance: {why} what the weights say, and these are drawn",
            hint="leave it out, or name methods: -m vanilla,sps",
        )


def _named(questions: Sequence[Question], ids: Sequence[str]) -> list[Question]:
    """The questions of these ids, all where none is given. Raises UsageError where one is none."""
    if not ids:
        return list(questions)
    known = {question.prompt_id for question in questions}
    for name in ids:
        if name not in known:
            guess = did_you_mean(name, known)
            raise UsageError(
                f"there is no question {name!r}{guess}",
                hint="an id is the task's name and the row's id, or its number from 0: mini/qa-003",
            )
    wanted = set(ids)
    return [question for question in questions if question.prompt_id in wanted]


def like_of(method: Method) -> str | None:
    """Of a control that lets pass at random: the row whose rate it takes; None where it names
    none."""
    like: str | None = getattr(method.params, "like", None)
    return like


def _check_likes(config: RunConfig, arms: Sequence[Arm]) -> None:
    """See that the rates can be measured that controls take. Raises UsageError."""
    ruled = {arm.label: arm for arm in arms if arm.method.accept is not None}
    for arm in arms:
        like = like_of(arm.method)
        if like is None:
            continue
        why = None
        if like not in ruled or like_of(ruled[like].method) is not None:
            why = f"no row of that name has an accept rule ({', '.join(ruled)})"
        elif config.executor != "local":
            why = f"with --executor {config.executor} it is not measured beforehand"
        elif config.isolation == "process" and ruled[like].name not in registry.ours():
            why = "it is a plug-in's, which decodes in a process of its own (--isolation none)"
        if why is not None:
            raise UsageError(
                f"{arm.label} is to let as many pass as {like!r} does: {why}",
                hint=f"--set {arm.name}.rate=0.3 in place of `like`, or --controls none",
            )


def _check_held(asked: str, rule: Rule, arms: Sequence[Arm], why: str) -> None:
    """See that every row can be held to a setting of the target's law. Raises UsageError.

    Args:
        asked: the option, as typed.
        why: lossy rows cannot; what they do.
    """
    option = asked.split()[0]
    leave = f"leave it out (-m sps,pld; specbench list methods), or drop {option}"
    peers = [arm.label for arm in arms if arm.method.peer]
    if peers:
        raise UsageError(
            f"{', '.join(peers)} is another program's, which decides its tokens itself: nothing"
            f" would hold it to {asked}",
            hint=leave,
        )
    lossy = [arm.label for arm in arms if arm.guarantees[rule] not in LOSSLESS]
    if lossy:
        raise UsageError(
            f"{', '.join(lossy)} is lossy, and {why}",
            hint=f"{leave}; an accept rule is off by accept=exact",
        )


def _missing(
    config: RunConfig, tasks: Sequence[Task], asked: Sequence[Question], chosen: Sequence[Question]
) -> tuple[str, ...]:
    """What a reader would not think of: tasks that `category` leaves nothing of, and families that
    `limit` does. A task's name stands for all of it, so the others are named."""
    found = []
    for task in tasks:
        there = dict.fromkeys(each.family for each in asked if each.task == task.name)
        kept = {each.family for each in chosen if each.task == task.name}
        gone = ", ".join(family for family in there if family not in kept)
        if not there:
            words = ", ".join(config.category)
            found.append(f"{task.name} is not asked: it has no question of {words}")
        elif gone:
            found.append(f"--limit {config.limit} asks nothing of {task.name}'s {gone}")
    return tuple(found)


def _loads(config: RunConfig, n: int) -> dict[str, tuple[float, ...]]:
    """When n questions arrive under each load, the same for all rows. Raises UsageError."""
    if config.load is None:
        return {}
    try:
        swept = Arrivals.sweep(config.load)
        return {each.typed: tuple(each.times(n, config.seed)) for each in swept}
    except ValueError as error:
        raise UsageError(f"--load: {error}", hint="specbench run --help") from error
