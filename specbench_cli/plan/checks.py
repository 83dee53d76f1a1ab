"""Checks that reject plans that cannot run or have no meaningful result, one function each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specbench_cli.config.problems import join_names
from specbench_cli.config.run import RunConfig
from specbench_cli.errors import EnvironmentFault, SpecbenchError, UsageError
from specbench_cli.models.heads import check_head, resolve_head
from specbench_cli.models.resolve import Checkpoint
from specbench_cli.plan.grammar import Grammar
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.scoring.code import check_containment, compiles
from specbench_cli.store.schema import LOSSLESS
from specbench_cli.tasks import Question, Task

MethodRuns = Sequence[MethodRun]


def check_methods(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check the methods of a run against its options. Raises UsageError, EnvironmentFault."""
    for check in METHOD_CHECKS:
        check(config, method_runs)


def _check_containment(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that this machine can contain generated code, if the run executes it."""
    if config.run_code and not config.uncontained:
        check_containment()


def _check_declarations(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check what each method declares: its guarantee is known, and hooks return the right types."""
    for method_run in method_runs:
        method_run.guarantees  # noqa: B018  raises UsageError
        if not method_run.is_built_in:
            method_run.check_hooks()


def _check_contrast(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that each method can follow the contrasted distribution."""
    if config.contrast is not None:
        why = "lets tokens stand that the contrasted target may not say"
        _check_combination("--contrast", config, method_runs, why)


def _check_grammar(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that each method can follow the grammar."""
    if config.grammar is not None:
        option = f"--grammar {config.grammar}"
        _check_combination(
            option, config, method_runs, f"lets tokens stand that {option} may forbid"
        )


def _check_combination(typed: str, config: RunConfig, method_runs: MethodRuns, why: str) -> None:
    """Check that every method can follow an option that changes the target's distribution.

    Args:
        asked: The option, as typed.
        why: End of the error message: how lossy methods break the option.
    """
    option = typed.split()[0]
    leave = f"leave it out (-m sps,pld; specbench list methods), or drop {option}"
    peers = [method_run.label for method_run in method_runs if method_run.declared.peer]
    if peers:
        raise UsageError(
            f"{', '.join(peers)} is another program's, which decides its tokens itself: nothing"
            f" would hold it to {typed}",
            hint=leave,
        )
    lossy = [
        method_run.label
        for method_run in method_runs
        if method_run.guarantees[config.rule] not in LOSSLESS
    ]
    if lossy:
        raise UsageError(
            f"{', '.join(lossy)} is lossy, and {why}",
            hint=f"{leave}; an accept rule is off by accept=exact",
        )


def _check_upper_bounds(config: RunConfig, method_runs: MethodRuns) -> None:
    """Reject methods that read vanilla's output if their own output can differ from it."""
    if config.verify not in ("rejection", "block"):
        return
    bounds = [method_run.label for method_run in method_runs if method_run.declared.upper_bound]
    if bounds:
        raise UsageError(
            f"{', '.join(bounds)} reads vanilla's output, which is its own only where both are the"
            f" same: not under {config.verify}",
            hint="--temperature 0, or --verify coupled",
        )


def _check_acceptance_sources(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that the run can measure the acceptance rates that random controls use."""
    if all(method_run.acceptance_source is None for method_run in method_runs):
        return
    with_rule = {
        method_run.label: method_run
        for method_run in method_runs
        if method_run.declared.accept is not None
    }
    for method_run in method_runs:
        like = method_run.acceptance_source
        if like is None:
            continue
        why = None
        if like not in with_rule or with_rule[like].acceptance_source is not None:
            why = f"no row of that name has an accept rule ({', '.join(with_rule)})"
        elif config.executor != "local":
            why = f"with --executor {config.executor} it is not measured beforehand"
        elif config.isolation == "process" and not with_rule[like].is_built_in:
            why = "it is a plug-in's, which decodes in a process of its own (--isolation none)"
        if why is not None:
            raise UsageError(
                f"{method_run.label} is to let as many pass as {like!r} does: {why}",
                hint=f"--set {method_run.name}.rate=0.3 in place of `like`, or --controls none",
            )


def _check_accept_rules(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that no accept rule of single tokens is combined with another kind of verification."""
    if config.verify not in ("block", "replay"):
        return
    with_rule = [
        method_run.label
        for method_run in method_runs
        if method_run.declared.accept and not method_run.declared.accept.is_exact
    ]
    if with_rule:
        why = "judges whole blocks" if config.verify == "block" else "commits vanilla's tokens"
        raise UsageError(
            f"{', '.join(with_rule)} has an accept rule, which decides on single tokens, and"
            f" --verify {config.verify} {why}",
            hint="--verify rejection or coupled, or --temperature 0",
        )


def _check_devices(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that a method drafts while the target computes, if devices are given for both."""
    if config.devices is not None and all(
        method_run.declared.workers == 1 for method_run in method_runs
    ):
        raise UsageError(
            "--devices is for methods that draft while the target computes, and none of them is run"
            f" ({', '.join(method_run.label for method_run in method_runs)})",
            hint="add --method pearl, or use --device and --threads, which are for all others",
        )


def _check_cluster(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that no method learns from prompt to prompt, if prompts go to several machines."""
    if config.executor == "local":
        return
    learning = [
        method_run.label for method_run in method_runs if method_run.declared.scope != "prompt"
    ]
    if learning:
        raise UsageError(
            f"{', '.join(learning)} learns from prompt to prompt, and --executor {config.executor}"
            " deals prompts to several machines",
            hint="--executor local, or leave it out; specbench list methods says which learn",
        )


def _check_batches(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that each method can decode several prompts together, if the run does."""
    if config.batch <= 1 and not config.load:
        return
    unbatched = [method_run.label for method_run in method_runs if not method_run.declared.batches]
    if unbatched:
        what = "--load" if config.load else f"--batch {config.batch}"
        raise UsageError(
            f"{', '.join(unbatched)} decodes one prompt at a time, and {what} decodes"
            f" {config.batch if config.batch > 1 else 'several'} together",
            hint=f"leave it out, or drop {what.split()[0]}; specbench list methods says which draft"
            " beside the target or are another program's",
        )


METHOD_CHECKS: tuple[Callable[[RunConfig, MethodRuns], None], ...] = (
    *(
        _check_containment,
        _check_declarations,
        _check_contrast,
        _check_grammar,
        _check_upper_bounds,
        _check_acceptance_sources,
    ),
    *(_check_accept_rules, _check_devices, _check_cluster, _check_batches),
)
"""Checks of the methods, in the order in which their errors are reported."""


def check_tasks(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Check the names of the tasks, and that their samples can differ."""
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
            f"two tasks have one name: {join_names(names)}", hint="name each once, or rename a file"
        )


def find_obstacle(
    method_run: MethodRun, target: Checkpoint, draft: str | None, *, fetch: bool = False
) -> SpecbenchError | None:
    """Return the reason why a method cannot run on this machine, or None if it can.

    The target may have no draft model or head for it, or none that can be downloaded.

    Args:
        fetch: Download heads that are not on this machine.
    """
    if method_run.needs_draft and draft is None:
        return UsageError(
            f"{method_run.label} needs a draft model, and {target.label} has no default one",
            hint="add --draft MODEL with the target's tokenizer: a short name (specbench list"
            " models), a hub id (org/name), a folder or a .gguf file; specbench list methods says"
            " which need none",
        )
    try:
        method_run.declared.check()
        for wanted in method_run.declared.artifacts():
            find = resolve_head if fetch else check_head
            kind = wanted.kind
            find(wanted.source, kind.kind, target, in_target=kind.inside, hint=kind.hint)
    except (UsageError, EnvironmentFault) as fault:
        return fault
    return None


def check_test_programs(config: RunConfig, questions: Sequence[Question]) -> None:
    """Check that the tests of each question are a valid program, if the run executes code."""
    if not config.run_code:
        return
    for question in questions:
        if question.program and not compiles(question.program[1]):
            raise UsageError(
                f"{question.prompt_id}: what follows {{answer}} in its program is none by itself:"
                f" {question.program[1][:60]!r}; it is run apart from the answer",
                hint="end the answer's part of the task's `program` with {answer}, or leave"
                " --run-code out",
            )


def check_imposed_acceptance(
    config: RunConfig,
    method_runs: Sequence[MethodRun],
    checkpoints: Iterable[Checkpoint],
    grammar: Grammar | None,
) -> None:
    """Check that all models and methods support an imposed acceptance rate."""
    if config.acceptance is None:
        return
    if real := [each.label for each in checkpoints if not each.shape]:
        raise UsageError(
            f"--acceptance is imposed on shapes alone, and {' and '.join(real)} has weights that"
            " say what is accepted",
            hint="--target shape:llama-2-7b --draft shape:llama-68m (specbench list models says"
            " what has weights), or leave it out",
        )
    if config.temperature > 0:
        raise UsageError(
            "--acceptance is imposed at temperature 0: an imposed distribution has one token",
            hint="leave --temperature out",
        )
    peers = [method_run.label for method_run in method_runs if method_run.declared.peer]
    if peers or grammar is not None:
        why = f"{', '.join(peers)} decodes by" if peers else "a grammar holds outputs to"
        raise UsageError(
            f"--acceptance: {why} what the weights say, and these are drawn",
            hint="leave it out, or name methods: -m vanilla,sps",
        )
