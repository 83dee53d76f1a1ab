"""Scope of a comparison of BASE and NEW: which outputs are compared, and by which rule.

Outputs are paired by prompt, turn, label, repeat and seed, if both sides had the same prompt and
settings. Outputs that cannot be compared are reported.

A row is a method on a task. The rule of a row decides what must be equal:

- `exact`: everything. Both sides have the same machine, versions and settings.
- `verdict`: results of the comparison with vanilla. The machine, versions or settings differ, so
  sums are rounded differently, and some near-ties are decided differently.
- `ids only`: token ids, not counters. Timing or another draft model may change the steps.
- `nothing`: the output may differ even if the program did not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specbench_cli.comparison.compared_output import ComparedOutput, PairKey, PromptTurn, RowKey
from specbench_cli.comparison.outcome import Rule
from specbench_cli.comparison.side import (
    RowFacts,
    Side,
    describe_changed_facts,
    describe_changed_params,
)
from specbench_cli.errors import UsageError
from specbench_cli.store.schema import LOSSLESS

_REQUIRED_FACTS = (
    *("target", "seed", "verify", "temperature", "top_p", "top_k", "grammar", "contrast"),
    *("acceptance", "max_new_tokens", "raw", "own_context"),
)
"""Facts that must be equal, because they change what is generated."""
_TIMING_FACTS = (
    "threads",
    "dtype",
    "device",
    "devices",
    "graphs",
    "batch",
    "prefill_chunk",
    "load",
)
"""Settings that change times. If they differ, the timing gate is skipped."""
_ROUNDING_FACTS = ("machine", "torch", "transformers", "threads", "dtype", "device", "graphs")
"""Facts that change how sums are rounded, and so how near-ties are decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Parts of BASE and NEW that can be compared. A row is a method on a task.

    pairs: outputs of BASE and NEW, by row.
    missing: rows that only BASE has, in tasks that both sides have.
    new: rows that only NEW has, in tasks that both sides have.
    rules: rule of each row of `pairs`, and the reason for the rule.
    timing: reason to skip the timing gate; None if the gate is applied.
    not_compared: sentences on what could not be compared.
    causes: label -> other differences between the sides, which are likely causes of findings.
    rounding_difference: reason why the same program may round differently on the two sides. None if
        it cannot.
    """

    pairs: Mapping[RowKey, tuple[tuple[ComparedOutput, ComparedOutput], ...]]
    missing: tuple[RowKey, ...]
    new: tuple[RowKey, ...]
    rules: Mapping[RowKey, tuple[Rule, str]]
    timing: str | None
    not_compared: tuple[str, ...]
    causes: Mapping[str, str]
    rounding_difference: str | None = None


def determine_scope(base: Side, new: Side) -> Scope:
    """Return the comparable parts of two sides.

    Raises:
        UsageError: nothing can be compared. The message names the reasons.
    """
    if differences := describe_changed_facts(_REQUIRED_FACTS, base, new):
        _raise_nothing_comparable(base, new, differences)
    notes = [*_describe_unfinished(base, new)]
    tasks = _shared_tasks(base, new, notes)
    prompt_turns = _shared_prompts(base, new, tasks, notes)
    repeats = _shared_passes(base, new, notes)
    in_base, in_new = (_group_by_row(side, tasks) for side in (base, new))
    pairs: dict[RowKey, tuple[tuple[ComparedOutput, ComparedOutput], ...]] = {}
    for row in (row for row in in_base if row in in_new):
        found, unpaired = _pair_outputs(in_base[row], in_new[row], prompt_turns, repeats)
        if found:
            pairs[row] = found
        notes += (f"{row.task} {row.label}: {sentence}" for sentence in unpaired)
    if not pairs:
        _raise_nothing_comparable(base, new, notes)
    rounding_difference = _rounding_difference(base, new)
    if rounding_difference is not None:
        notes.append(f"ids and counters are not compared one by one: {rounding_difference}")
    other_models = _find_other_models(base, new, {row.label for row in pairs})
    notes += _describe_other_models(other_models)
    return Scope(
        pairs=pairs,
        missing=tuple(row for row in in_base if row not in in_new),
        new=tuple(row for row in in_new if row not in in_base),
        rules={
            row: _choose_rule(
                own,
                base,
                new,
                other_models.get(row.label, ()),
                same_rounding=rounding_difference is None,
            )
            for row, own in pairs.items()
        },
        timing=_timing_skip_reason(base, new, rounding_difference),
        not_compared=tuple(notes),
        causes=dict(_likely_causes(base, new, pairs, other_models)),
        rounding_difference=rounding_difference,
    )


def _raise_nothing_comparable(base: Side, new: Side, reasons: Iterable[str]) -> None:
    lines = "".join(f"\n  {reason}" for reason in reasons) or "\n  they share no method"
    raise UsageError(
        f"nothing of {base.name} and {new.name} can be compared:{lines}",
        hint="specbench run with BASE's target, tasks, seed and settings, then compare once more",
    )


def _describe_unfinished(base: Side, new: Side) -> Iterator[str]:
    for which, side in (("BASE", base), ("NEW", new)):
        if side.status != "finished":
            yield f"{which} ({side.name}) is {side.status}: its missing outputs are not compared"


def _shared_tasks(base: Side, new: Side, notes: list[str]) -> set[str]:
    """Return the tasks that both sides have in the same version.

    For each other task, add a sentence to `notes`.
    """
    in_base, in_new = (
        dict.fromkeys(output.task for output in side.outputs.values()) for side in (base, new)
    )
    notes += (f"task {task}: only BASE has it" for task in in_base if task not in in_new)
    notes += (f"task {task}: only NEW has it" for task in in_new if task not in in_base)
    both = [task for task in in_base if task in in_new]
    changed = {task: describe_changed_facts([f"task {task}"], base, new) for task in both}
    for task in both:
        notes += changed[task]
    return {task for task in both if not changed[task]}


def _shared_prompts(base: Side, new: Side, tasks: set[str], notes: list[str]) -> set[PromptTurn]:
    """Return the prompts that are equal on both sides.

    Add sentences about the other prompts to `notes`, by task.
    """
    prompts: list[dict[PromptTurn, str]] = [
        {c.key.prompt_turn: c.task for c in side.outputs.values() if c.task in tasks}
        for side in (base, new)
    ]
    in_base, in_new = prompts
    changed = [
        prompt_turn
        for prompt_turn in in_base
        if prompt_turn in in_new
        and prompt_turn in base.prompts
        and prompt_turn in new.prompts
        and base.prompts[prompt_turn] != new.prompts[prompt_turn]
    ]
    for task in dict.fromkeys(in_base.values()):
        for prompt_turns, words in (
            ([p for p, of in in_base.items() if of == task and p not in in_new], "only BASE has"),
            ([p for p, of in in_new.items() if of == task and p not in in_base], "only NEW has"),
            ([p for p in changed if in_base[p] == task], "whose text or context changed"),
        ):
            if prompt_turns:
                prompts_found = _pluralize(len(prompt_turns), "prompt")
                notes.append(f"task {task}: {prompts_found} {words}{_first_location(prompt_turns)}")
    return (in_base.keys() & in_new.keys()) - set(changed)


def _shared_passes(base: Side, new: Side, notes: list[str]) -> set[int]:
    """Return the indices of the repeats that both sides have.

    Add sentences about the other repeats to `notes`. The timing gate still uses their times.
    """
    in_base, in_new = ({key.pass_ for key in side.outputs} for side in (base, new))
    for which, only_here in (("BASE", in_base - in_new), ("NEW", in_new - in_base)):
        if only_here:
            numbers = ", ".join(map(str, sorted(only_here)))
            notes.append(f"outputs of pass {numbers}: only {which} has them")
    return in_base & in_new


def _group_by_row(side: Side, tasks: set[str]) -> dict[RowKey, dict[PairKey, ComparedOutput]]:
    """Return a side's outputs by row (method on a task).

    Rows are in the order of tasks, and then of the run's methods.
    """
    order = dict.fromkeys(output.task for output in side.outputs.values() if output.task in tasks)
    rows = {
        RowKey(task, label): dict[PairKey, ComparedOutput]()
        for task in order
        for label in side.rows
    }
    for key, output in side.outputs.items():
        if output.task in tasks:
            rows[output.row][key] = output
    return {row: own for row, own in rows.items() if own}


def _pair_outputs(
    in_base: Mapping[PairKey, ComparedOutput],
    in_new: Mapping[PairKey, ComparedOutput],
    prompt_turns: set[PromptTurn],
    repeats: set[int],
) -> tuple[tuple[tuple[ComparedOutput, ComparedOutput], ...], list[str]]:
    """Return the pairs of outputs of a row, and sentences on outputs that one side lacks."""
    pairs = tuple(
        (output, in_new[key])
        for key, output in in_base.items()
        if key in in_new and key.prompt_turn in prompt_turns
    )
    unpaired = []
    for which, own, other in (("BASE", in_base, in_new), ("NEW", in_new, in_base)):
        only_here = [
            key.prompt_turn
            for key in own
            if key not in other and key.prompt_turn in prompt_turns and key.pass_ in repeats
        ]
        if only_here:
            outputs = _pluralize(len(only_here), "output")
            unpaired.append(f"{outputs} only {which} has{_first_location(only_here)}")
    return pairs, unpaired


def _describe_other_models(other_models: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a sentence for each changed draft model or head, with the methods that use it."""
    labels: dict[str, list[str]] = {}
    for label, models in other_models.items():
        for model in models:
            labels.setdefault(model, []).append(label)
    for model, affected in labels.items():
        yield f"counters of {', '.join(affected)}: {model}"


def _timing_skip_reason(base: Side, new: Side, rounding_difference: str | None) -> str | None:
    """Return why times of the two sides cannot be compared, or None if they can."""
    if base.machine is None or base.machine != new.machine:
        return "; ".join(describe_changed_facts(["machine"], base, new)) or rounding_difference
    for which, side in (("BASE", base), ("NEW", new)):
        if side.noisy:
            return f"{which} ({side.name}) is labelled noisy"
    return "; ".join(describe_changed_facts(_TIMING_FACTS, base, new)) or None


def _likely_causes(
    base: Side,
    new: Side,
    pairs: Mapping[RowKey, Sequence[tuple[ComparedOutput, ComparedOutput]]],
    other_models: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, str]]:
    """Yield (label, differences between the method of that label in BASE and in NEW)."""
    for label, (was, now) in {row.label: own[0] for row, own in pairs.items()}.items():
        found = []
        if was.method != now.method:
            found.append(f"method differs: {was.method} -> {now.method}")
        if was.guarantee != now.guarantee:
            found.append(f"guarantee differs: {was.guarantee} -> {now.guarantee}")
        if params := describe_changed_params(base.rows[label].params, new.rows[label].params):
            found.append(f"parameters differ: {', '.join(params)}")
        if label in other_models:
            found.append(f"models differ: {', '.join(other_models[label])}")
        if found:
            yield label, "; ".join(found)


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _first_location(prompt_turns: Sequence[PromptTurn]) -> str:
    prompt_id, turn = prompt_turns[0]
    return f" (first: {prompt_id} turn {turn})"


def _rounding_difference(base: Side, new: Side) -> str | None:
    """Return why the same program may round sums differently on the two sides.

    None if it cannot.
    """
    if base.machine is None or new.machine is None:
        which = "BASE" if base.machine is None else "NEW"
        return f"the machine of {which} is unknown"
    return "; ".join(describe_changed_facts(_ROUNDING_FACTS, base, new)) or None


def _find_other_models(base: Side, new: Side, labels: Iterable[str]) -> dict[str, list[str]]:
    """Return, by method label, how the draft models and heads that the method uses changed."""
    found: dict[str, list[str]] = {}
    for label in sorted(labels):
        changes: list[str] = []
        for model in _draft_models(base.rows[label], new.rows[label]):
            changes += describe_changed_facts([model], base, new)
            heads = [_head_facts(side, model) for side in (base, new)]
            if all(heads) and heads[0] != heads[1]:
                changes.append(f"head {model} {' -> '.join(heads)}")
        if changes:
            found[label] = changes
    return found


def _choose_rule(
    pairs: Sequence[tuple[ComparedOutput, ComparedOutput]],
    base: Side,
    new: Side,
    other_models: Sequence[str],
    *,
    same_rounding: bool,
) -> tuple[Rule, str]:
    """Return the rule of a row, and the reason why no stricter rule applies.

    Args:
        pairs: pairs of outputs of the row; at least one.
        other_models: changes of the method's draft models and heads.
        same_rounding: True if the same program rounds sums equally on both sides.
    """
    label, sampling = pairs[0][1].key.label, pairs[0][1].sampling
    step_difference = (
        f"another model drafts: {'; '.join(other_models)}"
        if other_models
        else _timing_dependence(base, new, label)
    )
    elsewhere = None if same_rounding else "another machine, other versions or other settings"
    why = "; ".join(reason for reason in (step_difference, elsewhere) if reason)
    if not why:
        return "exact", "same machine, versions and settings; its steps do not depend on timing"
    if not _gives_vanilla_tokens(sampling, new):
        return "nothing", f"its tokens are drawn at random ({sampling}), and {why}"
    if any(output.guarantee not in LOSSLESS for pair in pairs for output in pair):
        return "nothing", f"it may change the output ({pairs[0][1].guarantee}), and {why}"
    return ("verdict" if step_difference is None else "ids only"), why


def _draft_models(base: RowFacts, new: RowFacts) -> list[str]:
    """Return the models that a method drafts with.

    If the method's models are unknown on both sides, assume the run's draft model.
    """
    known = {*(base.models or ()), *(new.models or ())}
    unknown = base.models is None and new.models is None
    return sorted(known | {"draft"} if unknown else known)


def _head_facts(side: Side, kind: str) -> str:
    """Return the facts of a side's heads of a kind."""
    start = f"head {kind} "
    return ", ".join(
        f"{fact.removeprefix(start)} {value}"
        for fact, value in side.facts.items()
        if fact.startswith(start)
    )


def _timing_dependence(base: Side, new: Side, label: str) -> str | None:
    """Return why a method's steps may differ between two runs on one machine.

    None if they cannot.
    """
    free = [side.rows[label].timing_free for side in (base, new)]
    if False in free:
        return "its steps depend on timing"
    for which, says in zip(("BASE", "NEW"), free, strict=True):
        if says is None:
            return f"{which} is of an older version, and may have steps that depend on timing"
    return None


def _gives_vanilla_tokens(sampling: str, side: Side) -> bool:
    """Return True if the decoding rule generates vanilla's tokens for any draft."""
    if sampling == "replay":
        return side.facts.get("temperature") == "0.0"
    return sampling in ("greedy", "coupled")
