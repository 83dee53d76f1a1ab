"""The deterministic gate: comparison of token ids, verdicts and counters, which noise cannot
change.

A row is a method on a task. A verdict is the result of comparing an output with vanilla's. The rule
of a row (see `comparison.scope`) decides what must be equal in BASE and NEW:

- `exact`: token ids and all counters.
- `verdict`: the counters, except at 1% of the prompts (or at one prompt). Another machine decides
  some near-ties differently.
- `ids only`: token ids, except in outputs with a near-tie. Counters may differ, because timing can
  change the steps. On another machine, only broken outputs are findings.

Under every rule, an output that is an error or a mismatch only in NEW is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from specbench_cli.comparison.compared_output import ComparedOutput, Counters, RowKey
from specbench_cli.comparison.outcome import ComparisonFinding, Rule

if TYPE_CHECKING:
    from specbench_cli.comparison.scope import Scope

Pair = tuple[ComparedOutput, ComparedOutput]
"""An output of BASE and the same output of NEW."""

MAX_STRAY_SHARE = 0.01
"""Maximum share of a row's prompts whose counters may differ on another machine. One always may."""

_WORDS = {
    "n_tokens": "tokens",
    "committed": "committed tokens",
    "steps": "steps",
    "levels": "drafted levels",
    "nodes": "nodes",
    "tested": "tested levels",
    "accepted": "accepted levels",
    "target_forwards": "target forwards",
    "draft_forwards": "draft forwards",
}
_DIGITS = range(2, 7)
"""Numbers of decimals of a MAT to try, until the two values look different."""


def compare_outputs(scope: Scope) -> Mapping[RowKey, tuple[ComparisonFinding, ...]]:
    """Return the findings of each row that both sides have.

    Rows without changes have no findings.
    """
    return {
        row: tuple(_find_differences(pairs, scope.rules[row][0], scope.rounding_difference is None))
        for row, pairs in scope.pairs.items()
    }


def make_broken_finding(outputs: Sequence[ComparedOutput], total: int) -> ComparisonFinding:
    """Return the finding for outputs of NEW that are errors or mismatches.

    Args:
        outputs: the broken outputs; at least one.
        total: number of compared outputs.
    """
    kinds = Counter(
        "mismatch" if output.error is None else f"error: {output.error}" for output in outputs
    )
    details = "; ".join(f"{count} {kind}" for kind, count in kinds.items())
    return ComparisonFinding(
        outcome="broken",
        message=f"{_format_share(len(outputs), total, 'output')} broken only in NEW: {details}",
        locations=_format_prompt_turns(outputs),
    )


def is_bad(output: ComparedOutput) -> bool:
    """Return True if an output is an error or a mismatch."""
    return output.error is not None or output.verdict == "mismatch"


def mean_accepted_tokens(pairs: Iterable[Pair]) -> tuple[float | None, float | None]:
    """Return the mean accepted tokens of BASE and NEW, over outputs that failed on neither side."""
    sums = _sum_counters([pair for pair in pairs if not _has_error(pair)])
    return (None, None) if sums is None else (sums[0].mat, sums[1].mat)


def _find_differences(
    pairs: Sequence[Pair], rule: Rule, same_machine: bool
) -> Iterable[ComparisonFinding]:
    broken = [new for base, new in pairs if is_bad(new) and not is_bad(base)]
    if broken:
        yield make_broken_finding(broken, len(pairs))
    rest = [(base, new) for base, new in pairs if not is_bad(new) or is_bad(base)]
    if rule == "exact" or (rule == "ids only" and same_machine):
        changed = [pair for pair in rest if not _same_output(pair)]
        if rule == "ids only":
            changed = [pair for pair in changed if not any(c.verdict == "near-tie" for c in pair)]
        if changed:
            yield _make_changed_output_finding(changed, len(pairs))
    complete = [pair for pair in rest if not _has_error(pair)]
    if rule == "exact":
        # If the token ids of an output changed, its counters changed, too. Do not report them
        # twice.
        same = [pair for pair in complete if _same_output(pair)]
        differing = [pair for pair in same if _counters_differ(pair)]
        if differing:
            share = _format_share(len(differing), len(pairs), "output")
            yield _make_mat_finding(f"counters of {share} differ", differing, same)
    elif rule == "verdict":
        differing = [pair for pair in complete if _counters_differ(pair)]
        prompts = len({base.key.prompt_id for base, _ in pairs})
        strays, allowed = (
            len({base.key.prompt_id for base, _ in differing}),
            MAX_STRAY_SHARE * prompts,
        )
        if strays > max(allowed, 1):
            share = _format_share(strays, prompts, "prompt")
            what = f"counters at {share} differ, {max(int(allowed), 1)} may"
            yield _make_mat_finding(what, differing, complete)


def _has_error(pair: Pair) -> bool:
    return any(output.error is not None for output in pair)


def _same_output(pair: Pair) -> bool:
    base, new = pair
    return (base.ids, base.finish) == (new.ids, new.finish)


def _counters_differ(pair: Pair) -> bool:
    base, new = pair
    return base.counters != new.counters


def _make_changed_output_finding(pairs: Sequence[Pair], total: int) -> ComparisonFinding:
    fixed = sum(is_bad(base) and not is_bad(new) for base, new in pairs)
    details = f", {fixed} of them errors or mismatches in BASE" if fixed else ""
    return ComparisonFinding(
        outcome="changed-output",
        message=f"{_format_share(len(pairs), total, 'output')} changed{details}",
        locations=_format_prompt_turns(new for _, new in pairs),
    )


def _make_mat_finding(
    what: str, differing: Sequence[Pair], outputs: Sequence[Pair]
) -> ComparisonFinding:
    """Return the finding for pairs of outputs whose counters differ.

    Args:
        differing: pairs with different counters.
        outputs: all pairs whose sums the message shows; they include `differing`.
    """
    figures = _describe_changes(outputs)
    if not figures:
        first = differing[0]
        figures = [
            f"their sums do not, at {_format_prompt_turn(first[1])}"
            f" {'; '.join(_describe_changes([first]))}"
        ]
    return ComparisonFinding(
        outcome="mat",
        message=f"{what}: {'; '.join(figures)}",
        locations=_format_prompt_turns(new for _, new in differing),
    )


def _describe_changes(pairs: Sequence[Pair]) -> list[str]:
    """Describe how the sums of counters changed from BASE to NEW. The MAT comes first."""
    sums = _sum_counters(pairs)
    if sums is None:
        return []
    base, new = sums
    changes = [f"MAT {_format_mats(base, new)}"] if base.mat != new.mat else []
    after = asdict(new)
    for name, was in asdict(base).items():
        if was != after[name]:
            changes.append(f"{_WORDS[name]} {_format_count(was)} -> {_format_count(after[name])}")
    return changes


def _sum_counters(pairs: Sequence[Pair]) -> tuple[Counters, Counters] | None:
    if not pairs:
        return None
    base, new = zip(*((base.counters, new.counters) for base, new in pairs), strict=True)
    return Counters.total(base), Counters.total(new)


def _format_mats(base: Counters, new: Counters) -> str:
    for digits in _DIGITS:
        texts = ["none" if mat is None else f"{mat:.{digits}f}" for mat in (base.mat, new.mat)]
        if texts[0] != texts[1]:
            break
    return " -> ".join(texts)


def _format_count(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _format_share(count: int, total: int, noun: str) -> str:
    return f"{count} of {total} {noun}{'' if total == 1 else 's'}"


def _format_prompt_turn(output: ComparedOutput) -> str:
    return f"{output.key.prompt_id} turn {output.key.turn}"


def _format_prompt_turns(outputs: Iterable[ComparedOutput]) -> tuple[str, ...]:
    """Return the prompts and turns of outputs as text, each once even if it has several repeats."""
    return tuple(dict.fromkeys(map(_format_prompt_turn, outputs)))
