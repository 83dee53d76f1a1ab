"""By which rule a row is judged: how much of it must be the same, and why not more.

`exact`: the same machine, versions and settings. `verdict`: elsewhere, where sums round otherwise
and near-ties fall the other way now and then. `ids only`: where timing or another draft may change
the steps. `nothing`: where the output too may differ without a change of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specbench_cli.comparison.cell import Cell
from specbench_cli.comparison.outcome import Rule
from specbench_cli.comparison.side import RowFacts, Side, changed
from specbench_cli.store.schema import LOSSLESS

_ROUNDING = ("machine", "torch", "transformers", "threads", "dtype", "device", "graphs")
"""What decides how sums are rounded, and so which way a near-tie falls."""


def elsewhere(base: Side, new: Side) -> str | None:
    """Why the same program may round otherwise; null where it may not."""
    if base.machine is None or new.machine is None:
        which = "BASE" if base.machine is None else "NEW"
        return f"{which} does not say what machine it was run on"
    return "; ".join(changed(_ROUNDING, base, new)) or None


def other_models(base: Side, new: Side, labels: Iterable[str]) -> dict[str, list[str]]:
    """By label, the drafts and heads that it uses and that are not the same ones: what changed."""
    found: dict[str, list[str]] = {}
    for label in sorted(labels):
        changes: list[str] = []
        for model in _models(base.rows[label], new.rows[label]):
            changes += changed([model], base, new)
            heads = [_heads(side, model) for side in (base, new)]
            if all(heads) and heads[0] != heads[1]:
                changes.append(f"head {model} {' -> '.join(heads)}")
        if changes:
            found[label] = changes
    return found


def rule(
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


def _models(base: RowFacts, new: RowFacts) -> list[str]:
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
