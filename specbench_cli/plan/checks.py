"""Checks of a plan. Each function rejects one kind of run that cannot give valid results."""

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
    """Check that the methods of a run support its options.

    Raises:
        UsageError: A method and an option cannot be combined.
        EnvironmentFault: This machine has no sandbox for generated code.
    """
    for check in METHOD_CHECKS:
        check(config, method_runs)


def _check_containment(config: RunConfig, method_runs: MethodRuns) -> None:
    """If the run executes generated code, check that this machine has a sandbox for it."""
    if config.run_code and not config.uncontained:
        check_containment()


def _check_declarations(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that methods declare valid guarantees, and that hooks return the right types."""
    for method_run in method_runs:
        method_run.guarantees  # noqa: B018  raises UsageError
        if not method_run.is_built_in:
            method_run.check_hooks()


def _check_contrast(config: RunConfig, method_runs: MethodRuns) -> None:
    """If the run uses contrastive decoding, check that all methods support it."""
    if config.contrast is not None:
        why = "may accept tokens that the contrasted target would not emit"
        _check_combination("--contrast", config, method_runs, why)


def _check_grammar(config: RunConfig, method_runs: MethodRuns) -> None:
    """If the run has a grammar, check that all methods support grammars."""
    if config.grammar is not None:
        option = f"--grammar {config.grammar}"
        _check_combination(option, config, method_runs, f"may accept tokens that {option} forbids")


def _check_combination(typed: str, config: RunConfig, method_runs: MethodRuns, why: str) -> None:
    """Check that every method supports an option that changes the target's distribution.

    Args:
        typed: The option as the user typed it.
        why: End of the error message, with the reason why lossy methods do not support the
            option.
    """
    option = typed.split()[0]
    leave = f"omit the method (-m sps,pld; specbench list methods), or omit {option}"
    peers = [method_run.label for method_run in method_runs if method_run.declared.peer]
    if peers:
        raise UsageError(
            f"{', '.join(peers)} is a method of another program, which does not support {typed}",
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
            hint=f"{leave}; accept=exact disables an accept rule",
        )


def _check_upper_bounds(config: RunConfig, method_runs: MethodRuns) -> None:
    """Reject upper-bound methods if outputs of the run may differ from vanilla's output.

    An upper-bound method reads vanilla's output before it decodes.
    """
    if config.verify not in ("rejection", "block"):
        return
    bounds = [method_run.label for method_run in method_runs if method_run.declared.upper_bound]
    if bounds:
        raise UsageError(
            f"{', '.join(bounds)} drafts vanilla's output, so its own output must be the same,"
            f" which --verify {config.verify} does not guarantee",
            hint="--temperature 0, or --verify coupled",
        )


def _check_acceptance_sources(config: RunConfig, method_runs: MethodRuns) -> None:
    """Check that the run can measure the acceptance rates that random controls copy.

    A random control copies the acceptance rate of a lossy method.
    """
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
            why = f"no method with this label has an accept rule ({', '.join(with_rule)})"
        elif config.executor != "local":
            why = f"--executor {config.executor} does not measure the rate before the run"
        elif config.isolation == "process" and not with_rule[like].is_built_in:
            why = "plug-ins decode in a separate process (see --isolation none)"
        if why is not None:
            raise UsageError(
                f"{method_run.label} cannot copy the acceptance rate of {like!r}: {why}",
                hint=f"--set {method_run.name}.rate=0.3 instead of `like`, or --controls none",
            )


def _check_accept_rules(config: RunConfig, method_runs: MethodRuns) -> None:
    """Reject lossy accept rules for single tokens if the run uses block verification or replay."""
    if config.verify not in ("block", "replay"):
        return
    with_rule = [
        method_run.label
        for method_run in method_runs
        if method_run.declared.accept and not method_run.declared.accept.is_exact
    ]
    if with_rule:
        why = "verifies whole blocks" if config.verify == "block" else "emits vanilla's tokens"
        raise UsageError(
            f"{', '.join(with_rule)} has an accept rule for single tokens, but"
            f" --verify {config.verify} {why}",
            hint="--verify rejection or coupled, or --temperature 0",
        )


def _check_devices(config: RunConfig, method_runs: MethodRuns) -> None:
    """If `devices` is set, check that at least one method drafts in parallel."""
    if config.devices is not None and all(
        method_run.declared.workers == 1 for method_run in method_runs
    ):
        raise UsageError(
            "--devices needs a method that drafts in parallel with the target, and the run has none"
            f" ({', '.join(method_run.label for method_run in method_runs)})",
            hint="add --method pearl, or use --device and --threads",
        )


def _check_cluster(config: RunConfig, method_runs: MethodRuns) -> None:
    """If several machines measure the prompts, check that no method learns from earlier prompts."""
    if config.executor == "local":
        return
    learning = [
        method_run.label for method_run in method_runs if method_run.declared.scope != "prompt"
    ]
    if learning:
        raise UsageError(
            f"{', '.join(learning)} learns from earlier prompts, but --executor {config.executor}"
            " distributes prompts over several machines",
            hint="use --executor local, or omit the method (see specbench list methods)",
        )


def _check_batches(config: RunConfig, method_runs: MethodRuns) -> None:
    """If the run decodes prompts in batches, check that all methods support batches."""
    if config.batch <= 1 and not config.load:
        return
    unbatched = [method_run.label for method_run in method_runs if not method_run.declared.batches]
    if unbatched:
        what = "--load" if config.load else f"--batch {config.batch}"
        raise UsageError(
            f"{', '.join(unbatched)} decodes one prompt at a time, and {what} needs batches",
            hint=f"omit the method, or omit {what.split()[0]}; methods of other programs, and those"
            " that draft in parallel with the target, have no batches",
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
"""Checks of the methods, in the order in which they run."""


def check_tasks(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Check that all tasks have different names.

    Also check that repeated samples of a question can differ.
    """
    for task in tasks:
        if task.samples > 1 and config.temperature == 0:
            raise UsageError(
                f"{task.name} samples {task.samples} answers per question, which are all equal at"
                " temperature 0",
                hint="add --temperature 0.8, and --verify coupled to compare tokens with vanilla's",
            )
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two tasks have the same name: {join_names(names)}",
            hint="give each task once, or rename a file",
        )


def find_obstacle(
    method_run: MethodRun, target: Checkpoint, draft: str | None, *, fetch: bool = False
) -> SpecbenchError | None:
    """Return the error that prevents a method from running on this machine, or None.

    For example, a method may need a draft model, a draft head, or other software.

    Args:
        draft: Name of the draft model. None if the run has no draft model.
        fetch: True downloads missing draft heads. False only checks that they can be downloaded.
    """
    if method_run.needs_draft and draft is None:
        return UsageError(
            f"{method_run.label} needs a draft model, and {target.label} has no default one",
            hint="add --draft MODEL with the target's tokenizer: a short name (specbench list"
            " models), a hub id (org/name), a folder or a .gguf file; specbench list methods shows"
            " which methods need none",
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
    """If the run executes generated code, check that the tests of each question compile."""
    if not config.run_code:
        return
    for question in questions:
        if question.program and not compiles(question.program[1]):
            raise UsageError(
                f"{question.prompt_id}: the code after {{answer}} in its program does not compile"
                f" alone: {question.program[1][:60]!r}; it runs separately from the answer",
                hint="change the task's `program` so that {answer} ends a statement, or omit"
                " --run-code",
            )


def check_imposed_acceptance(
    config: RunConfig,
    method_runs: Sequence[MethodRun],
    checkpoints: Iterable[Checkpoint],
    grammar: Grammar | None,
) -> None:
    """Check that models and methods support a simulated acceptance rate (`--acceptance`)."""
    if config.acceptance is None:
        return
    if real := [each.label for each in checkpoints if not each.shape]:
        raise UsageError(
            "--acceptance needs models with random weights (shapes), not the trained weights of"
            f" {' and '.join(real)}",
            hint="--target shape:llama-2-7b --draft shape:llama-68m (see specbench list shapes), or"
            " omit --acceptance",
        )
    if config.temperature > 0:
        raise UsageError(
            "--acceptance needs temperature 0",
            hint="omit --temperature",
        )
    peers = [method_run.label for method_run in method_runs if method_run.declared.peer]
    if peers or grammar is not None:
        what = f"methods of other programs ({', '.join(peers)})" if peers else "--grammar"
        raise UsageError(
            f"--acceptance cannot be combined with {what}, which need trained weights",
            hint="omit it, or choose methods: -m vanilla,sps",
        )
