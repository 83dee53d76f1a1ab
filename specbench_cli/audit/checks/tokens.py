"""Checks that greedy and coupled outputs equal plain decoding, in any order and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from specbench_cli.audit.cases import (
    EXACT_RULES,
    LONG_OUTPUT,
    LONG_PROMPT,
    RULES,
    Case,
    add_eos,
    long_case,
    random_cases,
    reference_tokens,
    tied_logits_case,
    wide_case,
)
from specbench_cli.audit.finding import Finding, Problem
from specbench_cli.audit.models.observed_session import ObservedSession
from specbench_cli.audit.models.table import find_wrong_rows
from specbench_cli.audit.reference import truncate_output
from specbench_cli.audit.subject import AuditSubject, format_params, max_draft_levels
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.learning import Memory, learn
from specbench_cli.engine.method import Method
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Rule, Step
from specbench_cli.engine.workspace import Workspace

CASES = 120
"""Number of random tables for each rule, distributed over the variants."""

MIN_CASES = 12
"""Minimum number of random tables for each variant."""

CASES_PER_CHANGE = 6
"""Number of random tables for the defaults with one parameter changed."""

LONG_VARIANTS = 2
"""Number of variants that decode long requests and a large vocabulary."""

MIN_PROMPTS = 9
"""Minimum number of prompts of a pass; one of them is long."""

FULL_VARIANTS = 2
"""Number of variants that get `MIN_PROMPTS` prompts."""

FEW_PROMPTS = 4
"""Number of prompts for the other variants."""


def check_tokens(subject: AuditSubject) -> list[Finding]:
    """Check that every output equals plain decoding of the table.

    A method that learns is tested after it has learned.
    """
    compared, wrong = 0, 0
    problem: Problem | None = None
    for params, turn, endless in _cases(subject):
        longest_output = reference_tokens(endless, endless.budget)
        case = add_eos(endless, longest_output, turn)
        due = truncate_output(longest_output, case.eos, case.budget)
        method = subject.method(params)
        session = case.open(reference=due, **case.warm_up(method))
        for _ in method.generate(session):
            pass
        compared += 1
        what = _describe_difference(list(session.output()), due, session)
        if what is not None:
            wrong += 1
            problem = problem or Problem(
                what, f"{format_params(params)}; {case}", _suggest_cause(session, due)
            )
    if not compared:
        return []
    return [Finding("tokens", not wrong, {"outputs": compared, "wrong": wrong}, problem)]


def _cases(subject: AuditSubject) -> Iterator[tuple[MethodParams, int, Case]]:
    for rule in EXACT_RULES:
        variants = list(subject.lossless_params(rule))
        cases = max(MIN_CASES, CASES // max(1, len(variants)))
        for params in variants:
            for turn, case in enumerate(
                random_cases(rule, cases, max_draft_levels(params, default=5))
            ):
                yield params, turn, case
        for params in variants:
            yield params, 0, tied_logits_case(rule)
        for params in variants[:LONG_VARIANTS]:
            yield params, 0, long_case_for(subject, rule)
            wide = wide_case(rule, 64)
            yield params, 0, replace(wide, budget=20) if rule == "coupled" else wide
        for params in subject.lossless_params(rule, single_changes=True):
            if params not in variants:
                levels = max_draft_levels(params, default=5)
                for turn, case in enumerate(random_cases(rule, CASES_PER_CHANGE, levels)):
                    yield params, turn, case


def long_case_for(subject: AuditSubject, rule: Rule) -> Case:
    """Return a case with a long prompt and a long output.

    Both have more tokens than each integer constant in the method's code, such as a window size. So
    the case exceeds every limit that the method has.
    """
    prompt = subject.exceed_constants(LONG_PROMPT, 2_000)
    return long_case(rule, prompt, subject.exceed_constants(LONG_OUTPUT, 500))


def _describe_difference(
    output: Sequence[int], due: Sequence[int], session: ObservedSession
) -> str | None:
    if output == due and session.finish is not None:
        return None
    pairs = enumerate(zip(output, due, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(output), len(due)))
    if at == len(due) and len(output) > len(due):
        return (
            f"{len(output)} tokens, but the output ends after {len(due)}: {output} instead of {due}"
        )
    if at == len(output):
        return (
            f"the output stops after {len(output)} of {len(due)} tokens: {output} instead of {due}"
        )
    return f"output token {at + 1} is {output[at]}, but the target chooses {due[at]}"


def _suggest_cause(session: ObservedSession, due: Sequence[int]) -> str:
    output, origin = session.output(), session.harness.text.origin
    if len(output) < len(due):
        return "the condition that ends the method's loop: only `session.finish` may end it"
    pairs = enumerate(zip(output, due, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), len(due))
    if at >= len(due):
        return "the stop rule: the output ends at its first EOS and exactly at the budget"
    return (
        f"the origin of the wrong token is {origin[at]!r}. If the method has its own verification:"
        " the row of the target's logits that it compares. Otherwise: rows of rejected tokens that"
        " were not removed from a state"
    )


BATCHES_HINT = (
    "`propose_batch`: the i-th draft belongs to the i-th session, and needs its own state. Class"
    " attributes and module globals of the method are shared by all sequences"
)
"""Hint for an output that changes in a batch."""


JOINING_BATCH_SIZE = 2
"""Batch size in the test where sequences join when others end."""

PREFILL_CHUNK = 4
"""Maximum prefill tokens of joining sequences per step."""


def check_order(subject: AuditSubject) -> list[Finding]:
    """Check that outputs and steps do not depend on the order of prompts.

    A method that learns may take other steps, but the same ones in every pass. It must not change
    the models of the run.
    """
    compared = 0
    for rule in RULES:
        learns = subject.method.state_scope != "prompt"
        if learns and rule == "rejection":
            continue
        for number, params in enumerate(subject.lossless_params(rule)):
            prompts = (
                subject.exceed_constants(MIN_PROMPTS, 40) if number < FULL_VARIANTS else FEW_PROMPTS
            )
            cases = list(_prompt_cases(rule, max_draft_levels(params, default=5), prompts))
            if number < FULL_VARIANTS:
                cases[-2] = _replace_prompt(cases[0], long_case_for(subject, rule))
            alone = {
                i: _decode(subject.method(params), case, learns) for i, case in enumerate(cases)
            }
            for order in (range(len(cases)), range(len(cases) - 1, -1, -1)):
                largest = max(cases, key=lambda case: len(case.prompt))
                method, workspace = subject.method(params), largest.create_workspace()
                memory, weights = Memory(), _weights(workspace)
                for i in order:
                    rest = {"workspace": workspace, "memory": memory}
                    found = _decode(method, cases[i], learns, **rest)
                    compared += 1
                    if found != alone[i]:
                        return [_order_finding(params, cases[i], alone[i], found, compared)]
                    for name, table in _weights(workspace).items():
                        if not table.equal(weights[name]):
                            return [_changed_weights_finding(params, cases[i], name, compared)]
            if learns and number < FULL_VARIANTS:
                compared += len(cases)
                what = _compare_repeats(subject.method(params), cases)
                if what is not None:
                    problem = Problem(what, f"{format_params(params)}; {cases[0]}", REPEATS_HINT)
                    return [Finding("order", False, {"decodings": compared}, problem)]
    return [Finding("order", True, {"decodings": compared})] if compared else []


REPEATS_HINT = (
    "state that the method keeps between prompts. It must be in `session.memory`, which is empty at"
    " the start of every pass, not in attributes of the object or class, or in module globals"
)
"""Hint for a method object that decodes differently in a second pass."""


def _compare_repeats(method: Method, cases: Sequence[Case]) -> str | None:
    """Return the first difference between two passes of one method object, or None."""
    workspace = max(cases, key=lambda case: len(case.prompt)).create_workspace()
    first, second = (
        [_decode(method, case, False, workspace=workspace, memory=memory) for case in cases]
        for memory in (Memory(), Memory())
    )
    for number, (before, after) in enumerate(zip(first, second, strict=True), start=1):
        if before != after:
            return f"prompt {number} in the second pass: {_first_difference(before[1], after[1])}"
    return None


def check_batch(subject: AuditSubject) -> list[Finding]:
    """Check that outputs and states in a batch equal those of each sequence alone.

    Sequences have different lengths and drafts, and join and leave at different times. Steps must
    be equal too, unless the method learns from outputs, or adapts its draft to the batch size.
    """
    if not subject.method(subject.variants[0]).batches:
        return []
    learns = subject.method.state_scope != "prompt"
    compared, problem = 0, None
    for rule in EXACT_RULES if learns else RULES:
        for params in subject.lossless_params(rule):
            cases = list(_batch_cases(rule, max_draft_levels(params, default=5)))
            method = subject.method(params)
            outputs_only = learns or method.by_load
            due = [_decode(subject.method(params), case, outputs_only) for case in cases]
            for size in (len(cases), JOINING_BATCH_SIZE):
                difference = _compare_batch(method, cases, due, size, outputs_only)
                compared += len(cases)
                if difference is not None and problem is None:
                    problem = Problem(
                        difference[0], f"{format_params(params)}; {difference[1]}", BATCHES_HINT
                    )
    if not compared:
        return []
    return [Finding("batch", problem is None, {"outputs": compared}, problem)]


def _compare_batch(
    method: Method,
    cases: Sequence[Case],
    due: Sequence[OutputAndCounts],
    size: int,
    outputs_only: bool,
) -> tuple[str, str] | None:
    """Return (difference, case) of the first sequence that changes in a batch, or None.

    Args:
        size: batch size. Further sequences join when others end.
    """
    requests, first = [case.request for case in cases], cases[0]
    batch = Batch(
        first.create_workspace(),
        requests,
        first.sampling,
        size=size,
        slots=method.max_sequences(size),
        chunk=PREFILL_CHUNK,
        session_class=ObservedSession,
    )
    steps: list[list[tuple[int, ...]]] = [[] for _ in cases]
    where = f"{len(cases)} sequences, {size} at once, {first}"
    for step in method.generate_batch(batch):
        steps[step.seq].append(_step_counts(step))
        for at, each in enumerate(batch.sessions):
            # Check the sequence of this step. Also check finished sequences whose slot in the batch
            # is not used again yet.
            is_idle = each.finish is not None and batch.has_slot(each)
            wrong = (
                _find_state_error(cast(ObservedSession, each), at)
                if at == step.seq or is_idle
                else None
            )
            if wrong is not None:
                return wrong, where
    for at, (case, own) in enumerate(zip(cases, due, strict=True)):
        found = tuple(batch.sessions[at].output()), () if outputs_only else tuple(steps[at])
        if found[0] != own[0]:
            difference = f"gives {list(found[0])} in a batch, but {list(own[0])} alone"
            return f"sequence {at} {difference}", f"{where}; {case}"
        if found != own:
            return f"sequence {at}: {_first_difference(own[1], found[1])}", f"{where}; {case}"
    return None


def _find_state_error(session: ObservedSession, at: int) -> str | None:
    """Return a description of a wrong state of a sequence, or None."""
    for decoder, state, text in session.states():
        behind = decoder.name != "target"
        wrong = find_wrong_rows(state, text[:-1], decoder.first, behind=behind)
        if wrong is not None:
            return f"the {decoder.name}'s state of sequence {at}: {wrong}"
    return None


def _batch_cases(rule: Rule, levels: int) -> Iterator[Case]:
    """Yield requests to one pair of tables, with different lengths, budgets and EOS ids."""
    first, *_ = random_cases(rule, 1, levels)
    for number, (n, budget) in enumerate(((2, 14), (9, 1), (4, 5), (3, 12), (6, 8))):
        prompt = tuple((number + at) % 2 for at in range(n))
        own = replace(first, prompt=prompt, budget=budget, prompt_id=f"table/{number}")
        yield add_eos(own, reference_tokens(own, 12), number) if rule != "rejection" else own


def _prompt_cases(rule: Rule, levels: int, n: int) -> Iterator[Case]:
    """Yield n requests to one pair of tables. Some prompts have common suffixes."""
    first, *_ = random_cases(rule, 1, levels)
    prompts = ((0, 1, 2, 1, 0), (1, 0), (2, 1, 2, 1, 0), (0, 1))
    for number in range(n):
        prompt = prompts[number % len(prompts)]
        yield replace(first, prompt=prompt, budget=12, prompt_id=f"table/{number}")


def _replace_prompt(first: Case, long: Case) -> Case:
    """Return the case `first` with the long prompt of the case `long`."""
    vocab = first.tables[0].shape[-1]
    prompt = tuple(token % vocab for token in long.prompt)
    return replace(first, prompt=prompt, budget=12, prompt_id="table/long")


OutputAndCounts = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def _decode(method: Method, case: Case, learns: bool, **rest: Any) -> OutputAndCounts:
    session = case.open(**rest)
    steps = [_step_counts(step) for step in method.generate(session)]
    if method.learns and "memory" in rest:
        learn(method, session)
    return tuple(session.output()), () if learns else tuple(steps)


def _step_counts(step: Step) -> tuple[int, ...]:
    levels = step.draft.levels if step.draft else 0
    return levels, step.outcome.tested, len(step.outcome.path), len(step.outcome.committed)


def _order_finding(
    params: MethodParams, case: Case, alone: OutputAndCounts, after: OutputAndCounts, compared: int
) -> Finding:
    output, steps = zip(alone, after, strict=True)
    if output[0] != output[1]:
        what = f"the output is {list(output[0])} alone, but {list(output[1])} after other prompts"
    else:
        what = (
            "the output is equal, but the steps (levels, tested, accepted, committed) are not:"
            f" {_first_difference(*steps)}"
        )
    look = (
        "state that the method keeps after a prompt: attributes that `start` does not reset, module"
        " globals, a random generator. A method that learns needs `state_scope` and"
        " `session.memory`"
    )
    problem = Problem(what, f"{format_params(params)}; {case}", look)
    return Finding("order", False, {"decodings": compared}, problem)


def _weights(workspace: Workspace) -> dict[str, Tensor]:
    """Return copies of the weights of the run's models, which are tables of next-token logits."""
    tables = {name: getattr(each, "table", None) for name, each in workspace.decoders.items()}
    return {name: table.clone() for name, table in tables.items() if table is not None}


def _changed_weights_finding(params: MethodParams, case: Case, name: str, compared: int) -> Finding:
    what = f"the {name}'s weights, which all methods share, have changed"
    look = "`learn`, which may train only a copy of the weights: `session.trainable`"
    problem = Problem(what, f"{format_params(params)}; {case}", look)
    return Finding("order", False, {"decodings": compared}, problem)


def _first_difference(alone: Sequence[object], after: Sequence[object]) -> str:
    for number, (a, b) in enumerate(zip(alone, after, strict=False), start=1):
        if a != b:
            return f"step {number} is {a} alone, but {b} after other prompts"
    return f"{len(alone)} steps alone, but {len(after)} after other prompts"
