"""What of two sides can be compared: pairs of outputs, the rule for each row, and why no more.

Outputs are pairs by prompt, turn, label, pass and seed, where both sides asked the same under the
same settings. What is left out is named, never passed over.

The rule of a row says how much of it must be the same. `exact`: the same machine, versions and
settings. `verdict`: elsewhere, where sums round otherwise and near-ties fall the other way now and
then. `ids only`: where timing or another draft may change the steps. `nothing`: where the output
too may differ without a change of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specbench_cli.comparison.cell import Cell, Key, Place, RowKey
from specbench_cli.comparison.outcome import Rule
from specbench_cli.comparison.side import RowFacts, Side, changed, changed_params
from specbench_cli.errors import UsageError
from specbench_cli.store.schema import LOSSLESS

_ASKED = (
    *("target", "seed", "verify", "temperature", "top_p", "top_k", "grammar", "contrast"),
    *("acceptance", "max_new_tokens", "raw", "own_context"),
)
"""What every output depends on by its meaning: another value is another question."""
_TIMING = ("threads", "dtype", "device", "devices", "graphs", "batch", "prefill_chunk", "load")
"""What times depend on by intention."""
_ROUNDING = ("machine", "torch", "transformers", "threads", "dtype", "device", "graphs")
"""What decides how sums are rounded, and so which way a near-tie falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What can be compared of BASE and NEW.

    pairs: BASE's output and NEW's, by row. missing, new: rows that only BASE, only NEW has, of the
    tasks that both have. rules: by which rule each row of `pairs` is judged, and why by that one.
    timing: why the timing gate is skipped; null where it applies. not_compared: what could not be,
    a sentence each. causes: by label, what else differs between the sides: the likely cause of what
    is found of it. elsewhere: why the same program may round otherwise; null where it may not.
    """

    pairs: Mapping[RowKey, tuple[tuple[Cell, Cell], ...]]
    missing: tuple[RowKey, ...]
    new: tuple[RowKey, ...]
    rules: Mapping[RowKey, tuple[Rule, str]]
    timing: str | None
    not_compared: tuple[str, ...]
    causes: Mapping[str, str]
    elsewhere: str | None = None


def scope(base: Side, new: Side) -> Scope:
    """What can be compared.

    Raises:
        UsageError: nothing can; names why.
    """
    if asked := changed(_ASKED, base, new):
        _refuse(base, new, asked)
    said = [*_unfinished(base, new)]
    tasks = _tasks(base, new, said)
    places = _places(base, new, tasks, said)
    passes = _passes(base, new, said)
    ours, theirs = (_rows(side, tasks) for side in (base, new))
    pairs: dict[RowKey, tuple[tuple[Cell, Cell], ...]] = {}
    for row in (row for row in ours if row in theirs):
        found, lonely = _pair(ours[row], theirs[row], places, passes)
        if found:
            pairs[row] = found
        said += (f"{row.task} {row.label}: {words}" for words in lonely)
    if not pairs:
        _refuse(base, new, said)
    elsewhere = _elsewhere(base, new)
    if elsewhere is not None:
        said.append(f"ids and counters are not compared one by one: {elsewhere}")
    others = _other_models(base, new, {row.label for row in pairs})
    said += _unlike_drafts(others)
    return Scope(
        pairs=pairs,
        missing=tuple(row for row in ours if row not in theirs),
        new=tuple(row for row in theirs if row not in ours),
        rules={
            row: _rule(own, base, new, others.get(row.label, ()), here=elsewhere is None)
            for row, own in pairs.items()
        },
        timing=_no_timing(base, new, elsewhere),
        not_compared=tuple(said),
        causes=dict(_causes(base, new, pairs, others)),
        elsewhere=elsewhere,
    )


def _refuse(base: Side, new: Side, why: Iterable[str]) -> None:
    lines = "".join(f"\n  {reason}" for reason in why) or "\n  they share no method"
    raise UsageError(
        f"nothing of {base.name} and {new.name} can be compared:{lines}",
        hint="specbench run with BASE's target, tasks, seed and settings, then compare once more",
    )


def _unfinished(base: Side, new: Side) -> Iterator[str]:
    for which, side in (("BASE", base), ("NEW", new)):
        if side.status != "finished":
            yield f"{which} ({side.name}) is {side.status}: what it lacks is not compared"


def _tasks(base: Side, new: Side, said: list[str]) -> set[str]:
    """The tasks that both have, the same version of; `said` gets the others."""
    ours, theirs = (
        dict.fromkeys(cell.task for cell in side.cells.values()) for side in (base, new)
    )
    said += (f"task {task}: only BASE has it" for task in ours if task not in theirs)
    said += (f"task {task}: only NEW has it" for task in theirs if task not in ours)
    both = [task for task in ours if task in theirs]
    altered = {task: changed([f"task {task}"], base, new) for task in both}
    for task in both:
        said += altered[task]
    return {task for task in both if not altered[task]}


def _places(base: Side, new: Side, tasks: set[str], said: list[str]) -> set[Place]:
    """The prompts that both were asked, alike; `said` gets the others, by task."""
    asked: list[dict[Place, str]] = [
        {c.key.place: c.task for c in side.cells.values() if c.task in tasks}
        for side in (base, new)
    ]
    ours, theirs = asked
    unlike = [
        place
        for place in ours
        if place in theirs
        and place in base.prompts
        and place in new.prompts
        and base.prompts[place] != new.prompts[place]
    ]
    for task in dict.fromkeys(ours.values()):
        for places, words in (
            ([p for p, of in ours.items() if of == task and p not in theirs], "only BASE has"),
            ([p for p, of in theirs.items() if of == task and p not in ours], "only NEW has"),
            ([p for p in unlike if ours[p] == task], "whose text or context changed"),
        ):
            if places:
                said.append(f"task {task}: {_counted(len(places), 'prompt')} {words}{_at(places)}")
    return (ours.keys() & theirs.keys()) - set(unlike)


def _passes(base: Side, new: Side, said: list[str]) -> set[int]:
    """The passes that both made; `said` gets the others. Their times are processes all the same."""
    ours, theirs = ({key.pass_ for key in side.cells} for side in (base, new))
    for which, alone in (("BASE", ours - theirs), ("NEW", theirs - ours)):
        if alone:
            numbers = ", ".join(map(str, sorted(alone)))
            said.append(f"outputs of pass {numbers}: only {which} has them")
    return ours & theirs


def _rows(side: Side, tasks: set[str]) -> dict[RowKey, dict[Key, Cell]]:
    """A side's outputs by row, in the order of tasks and of the run's rows."""
    order = dict.fromkeys(cell.task for cell in side.cells.values() if cell.task in tasks)
    rows = {RowKey(task, label): dict[Key, Cell]() for task in order for label in side.rows}
    for key, cell in side.cells.items():
        if cell.task in tasks:
            rows[cell.row][key] = cell
    return {row: own for row, own in rows.items() if own}


def _pair(
    ours: Mapping[Key, Cell], theirs: Mapping[Key, Cell], places: set[Place], passes: set[int]
) -> tuple[tuple[tuple[Cell, Cell], ...], list[str]]:
    """A row's pairs; and what one side lacks of prompts and passes that both have."""
    pairs = tuple(
        (cell, theirs[key]) for key, cell in ours.items() if key in theirs and key.place in places
    )
    lonely = []
    for which, own, other in (("BASE", ours, theirs), ("NEW", theirs, ours)):
        alone = [
            key.place
            for key in own
            if key not in other and key.place in places and key.pass_ in passes
        ]
        if alone:
            lonely.append(f"{_counted(len(alone), 'output')} only {which} has{_at(alone)}")
    return pairs, lonely


def _unlike_drafts(others: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Which rows another draft or head concerns."""
    labels: dict[str, list[str]] = {}
    for label, models in others.items():
        for model in models:
            labels.setdefault(model, []).append(label)
    for model, concerned in labels.items():
        yield f"counters of {', '.join(concerned)}: {model}"


def _no_timing(base: Side, new: Side, elsewhere: str | None) -> str | None:
    """Why times cannot be compared."""
    if base.machine is None or base.machine != new.machine:
        return "; ".join(changed(["machine"], base, new)) or elsewhere
    for which, side in (("BASE", base), ("NEW", new)):
        if side.noisy:
            return f"{which} ({side.name}) is labelled noisy"
    return "; ".join(changed(_TIMING, base, new)) or None


def _causes(
    base: Side,
    new: Side,
    pairs: Mapping[RowKey, Sequence[tuple[Cell, Cell]]],
    others: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, str]]:
    """What differs for a label though it is called the same."""
    for label, (was, now) in {row.label: own[0] for row, own in pairs.items()}.items():
        found = []
        if was.method != now.method:
            found.append(f"method differs: {was.method} -> {now.method}")
        if was.guarantee != now.guarantee:
            found.append(f"guarantee differs: {was.guarantee} -> {now.guarantee}")
        if params := changed_params(base.rows[label].params, new.rows[label].params):
            found.append(f"parameters differ: {', '.join(params)}")
        if label in others:
            found.append(f"models differ: {', '.join(others[label])}")
        if found:
            yield label, "; ".join(found)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _at(places: Sequence[Place]) -> str:
    prompt_id, turn = places[0]
    return f" (first: {prompt_id} turn {turn})"


def _elsewhere(base: Side, new: Side) -> str | None:
    """Why the same program may round otherwise; null where it may not."""
    if base.machine is None or new.machine is None:
        which = "BASE" if base.machine is None else "NEW"
        return f"{which} does not say what machine it was run on"
    return "; ".join(changed(_ROUNDING, base, new)) or None


def _other_models(base: Side, new: Side, labels: Iterable[str]) -> dict[str, list[str]]:
    """By label, the drafts and heads that it uses and that are not the same ones: what changed."""
    found: dict[str, list[str]] = {}
    for label in sorted(labels):
        changes: list[str] = []
        for model in _drafting_models(base.rows[label], new.rows[label]):
            changes += changed([model], base, new)
            heads = [_heads(side, model) for side in (base, new)]
            if all(heads) and heads[0] != heads[1]:
                changes.append(f"head {model} {' -> '.join(heads)}")
        if changes:
            found[label] = changes
    return found


def _rule(
    pairs: Sequence[tuple[Cell, Cell]],
    base: Side,
    new: Side,
    others: Sequence[str],
    *,
    here: bool,
) -> tuple[Rule, str]:
    """How much of a row must be the same, and why not more.

    Args:
        pairs: at least one.
        others: what changed of the models that it drafts with.
        here: whether both sides round alike.
    """
    label, sampling = pairs[0][1].key.label, pairs[0][1].sampling
    loose = f"another model drafts: {'; '.join(others)}" if others else _by_timing(base, new, label)
    apart = None if here else "another machine, other versions or other settings"
    why = "; ".join(reason for reason in (loose, apart) if reason)
    if not why:
        return "exact", "same machine, versions and settings; its steps do not depend on timing"
    if not _same_tokens(sampling, new):
        return "nothing", f"its tokens are drawn ({sampling}), and {why}"
    if any(cell.guarantee not in LOSSLESS for pair in pairs for cell in pair):
        return "nothing", f"it may change the output ({pairs[0][1].guarantee}), and {why}"
    return ("verdict" if loose is None else "ids only"), why


def _drafting_models(base: RowFacts, new: RowFacts) -> list[str]:
    """What a row drafts with. One that does not say may use the run's draft."""
    known = {*(base.models or ()), *(new.models or ())}
    unsaid = base.models is None and new.models is None
    return sorted(known | {"draft"} if unsaid else known)


def _heads(side: Side, kind: str) -> str:
    """A side's heads of a kind."""
    start = f"head {kind} "
    return ", ".join(
        f"{fact.removeprefix(start)} {value}"
        for fact, value in side.facts.items()
        if fact.startswith(start)
    )


def _by_timing(base: Side, new: Side, label: str) -> str | None:
    """Why a row's steps may differ on the same machine."""
    free = [side.rows[label].timing_free for side in (base, new)]
    if False in free:
        return "its steps depend on timing"
    for which, says in zip(("BASE", "NEW"), free, strict=True):
        if says is None:
            return f"{which} is of an older version and does not say if its steps depend on timing"
    return None


def _same_tokens(sampling: str, side: Side) -> bool:
    """Whether a decoding rule gives vanilla's tokens, which are the same whatever was drafted."""
    if sampling == "replay":
        return side.facts.get("temperature") == "0.0"
    return sampling in ("greedy", "coupled")
