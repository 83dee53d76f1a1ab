"""Timing gate: test of whether a method became slower or faster from BASE to NEW.

A row is a method on a task. Four ratios (figures) of a row are tested. Both times of a ratio come
from the same process, so that a slow phase of the machine affects both:

    decode          decode time per token / vanilla's, for the same prompt
    verify forward  time of a verify forward / vanilla's forward over one token, same prompt
    draft forward   time of a draft forward / verify forward of the same output
    host            host time per step / verify forward of the same output

Vanilla itself is tested by its time per token, divided by the time per token of hf:vanilla. Only
this ratio shows a slowdown of all methods.

The last three figures (components) are compared only for prompts with equal counters on both sides,
because only then both sides did the same work. Other prompts are reported by the deterministic
gate.

If the runs of BASE and NEW alternated in time, the machine was equally fast for both. Then the time
of a draft forward is not divided by another time. The fastest draft forwards of each output are
compared, because this is more stable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from specbench_cli.comparison.compared_output import ComparedOutput, PromptTurn, RowKey
from specbench_cli.comparison.outcome import ComparisonFinding, TimeChange
from specbench_cli.comparison.processes import ComparedProcesses
from specbench_cli.stats.bootstrap import MAX_INTERVAL_RATIO
from specbench_cli.stats.regression import (
    MIN_PAIRS,
    MIN_PROMPTS,
    RegressionSeries,
    estimate_slowdowns,
)
from specbench_cli.store.schema import BASELINE

if TYPE_CHECKING:
    from specbench_cli.comparison.scope import Scope

DECODE, VERIFY, DRAFT, HOST = "decode", "verify forward", "draft forward", "host"
HF_VANILLA = "hf:vanilla"
VANILLA = f"{BASELINE} / {HF_VANILLA}"


def estimate_changes(
    scope: Scope, processes: ComparedProcesses, tolerance: float
) -> dict[RowKey, tuple[TimeChange, ...]]:
    """Return, for each row of the comparison, how its time ratios changed between the two sides.

    A time ratio is the time of the method divided by the time of its reference. A ratio with too
    few measurements for a significance test is omitted.

    Args:
        processes: processes of the two sides.
        tolerance: allowed slowdown, 0.05 for 5%.
    """
    entries: list[tuple[RowKey, str, RegressionSeries]] = []
    for row, pairs in scope.pairs.items():
        prompt_turns = _prompt_turns(pairs)
        if _skip_reason(row, prompt_turns, processes) is None:
            labels = _reference_label(row.label), row.label
            entries += (
                (row, *entry)
                for entry in _build_series(
                    row, pairs, processes.drop_incomplete(labels, prompt_turns)
                )
            )
    estimates = estimate_slowdowns(
        [series for *_, series in entries], tolerance=math.log1p(tolerance)
    )
    result: dict[RowKey, tuple[TimeChange, ...]] = {}
    for (row, figure, series), estimate in zip(entries, estimates, strict=True):
        if estimate is not None:
            low, high = _interval_bounds(estimate.low, estimate.high)
            change = TimeChange(
                figure=figure,
                ratio=math.exp(estimate.log_ratio),
                low=low,
                high=high,
                significant=estimate.significant,
                detects=math.exp(estimate.detectable),
                relative=not series.one_sided_noise,
            )
            result[row] = (*result.get(row, ()), change)
    return result


def explain_unjudged(scope: Scope, processes: ComparedProcesses) -> Iterator[str]:
    """Yield a sentence for each row whose times are not compared, or not those of all processes."""
    for row, pairs in scope.pairs.items():
        prompt_turns = _prompt_turns(pairs)
        if reason := _skip_reason(row, prompt_turns, processes) or _describe_excluded(
            row, prompt_turns, processes
        ):
            yield f"times of {row.task} {row.label}: {reason}"


def find_significant_changes(
    changes: tuple[TimeChange, ...], tolerance: float
) -> tuple[ComparisonFinding, ...]:
    """Return findings for changes that are significant and exceed the tolerance.

    All slowdowns of a row are one finding: first the components, then the decode time. A component
    alone (draft forward, verify forward or host) is never reported as faster.
    """
    by_figure = {change.figure: change for change in changes}
    slower = [
        change
        for figure in (DRAFT, VERIFY, HOST, VANILLA, DECODE)
        if (change := by_figure.get(figure)) is not None
        and change.significant
        and change.ratio > 1 + tolerance
        and not _is_explained_by_verify(change, by_figure.get(VERIFY), tolerance)
    ]
    faster = [
        change
        for figure in (DECODE, VANILLA)
        if (change := by_figure.get(figure)) is not None
        and change.significant
        and change.ratio < 1 / (1 + tolerance)
    ]
    result = []
    if slower:
        result.append(
            ComparisonFinding(
                outcome="slower",
                message=f"{', '.join(map(str, slower))} (allowed {tolerance:+.0%})",
            )
        )
    if faster:
        result.append(ComparisonFinding(outcome="faster", message=", ".join(map(str, faster))))
    return tuple(result)


def _is_explained_by_verify(
    change: TimeChange, verify: TimeChange | None, tolerance: float
) -> bool:
    """Return True if a component only seems slower because verify forwards became faster.

    The component's ratio has the verify forward as its divisor. Multiplying the changes of both
    removes the divisor. The product must be below half of the tolerance.
    """
    if verify is None or change.figure not in (DRAFT, HOST) or not change.relative:
        return False
    return verify.ratio < 1 and change.ratio * verify.ratio < 1 + tolerance / 2


def _interval_bounds(low: float, high: float) -> tuple[float, float] | tuple[None, None]:
    """Convert the ends of an interval from logarithms to ratios. Return None if it is too wide."""
    if not high - low <= math.log(MAX_INTERVAL_RATIO):
        return None, None
    return math.exp(low), math.exp(high)


def _prompt_turns(pairs: Sequence[tuple[ComparedOutput, ComparedOutput]]) -> list[PromptTurn]:
    """Return the prompts and turns of a row, each once even if there are several repeats."""
    return list(dict.fromkeys(output.key.prompt_turn for output, _ in pairs))


def _skip_reason(
    row: RowKey, prompt_turns: Sequence[PromptTurn], processes: ComparedProcesses
) -> str | None:
    """Return why a row's times are not tested, or None if they are.

    hf:vanilla has no test of its own, because vanilla's test includes its times.
    """
    labels = _reference_label(row.label), row.label
    for label in labels:
        complete = processes.drop_incomplete((label,), prompt_turns)
        for side, which in ((False, "BASE"), (True, "NEW")):
            if next(processes.select_outputs(label, prompt_turns, of_new=side), None) is None:
                return f"{which} has no {label} to compare with"
            if side not in complete.new:
                outputs = list(processes.select_outputs(label, prompt_turns, of_new=side))
                untimed = sum(output.times is None for output in outputs)
                return (
                    f"{untimed} of {len(outputs)} outputs of {label} in {which} have no time (noisy"
                    " or failed)"
                )
    if len(prompt_turns) < MIN_PROMPTS:
        return f"fewer than {MIN_PROMPTS} prompts"
    remaining = processes.drop_incomplete(labels, prompt_turns)
    for side, which in ((False, "BASE"), (True, "NEW")):
        if side not in remaining.new:
            return f"every run of {which} lacks too many times (noisy or failed outputs)"
    if processes.pairs and remaining.pairs < MIN_PAIRS:
        return (
            f"only {remaining.pairs} of {processes.pairs} pairs of runs have enough times (noisy or"
            " failed outputs)"
        )
    return None


def _describe_excluded(
    row: RowKey, prompt_turns: Sequence[PromptTurn], processes: ComparedProcesses
) -> str | None:
    """Describe how many processes of a judged row are excluded, or return None."""
    total = len(processes.outputs)
    untimed = total - len(
        processes.drop_incomplete((_reference_label(row.label), row.label), prompt_turns).outputs
    )
    return f"{untimed} of {total} runs are left out (noisy or failed outputs)" if untimed else None


def _reference_label(label: str) -> str:
    """Return the label of the method whose times are the divisors of a method's times."""
    return HF_VANILLA if label == BASELINE else BASELINE


FigureFunction = Callable[[ComparedOutput, ComparedOutput], float | None]
"""Computes a figure from an output and its reference output; None if a time is missing."""


def _build_series(
    row: RowKey,
    pairs: Sequence[tuple[ComparedOutput, ComparedOutput]],
    processes: ComparedProcesses,
) -> Iterator[tuple[str, RegressionSeries]]:
    """Yield the name and the series of each tested ratio of a row."""
    prompt_turns = _prompt_turns(pairs)
    if row.label == BASELINE:
        slowdown = _machine_slowdown(HF_VANILLA, prompt_turns, processes)
        yield (
            VANILLA,
            _figure_series(VANILLA, row, prompt_turns, processes, _relative_time, slowdown),
        )
        return
    if row.label == HF_VANILLA:
        return
    slowdown = _machine_slowdown(BASELINE, prompt_turns, processes)
    yield (
        DECODE,
        _figure_series(DECODE, row, prompt_turns, processes, _relative_decode_time, slowdown),
    )
    changed = {was.key.prompt_turn for was, now in pairs if was.counters != now.counters}
    unchanged = [prompt_turn for prompt_turn in prompt_turns if prompt_turn not in changed]
    for figure, compute in COMPONENTS.items():
        if figure == DRAFT and processes.pair is not None:
            series = _figure_series(
                figure, row, unchanged, processes, _fastest_draft_time, slowdown
            )
            yield figure, replace(series, one_sided_noise=True)
        else:
            yield figure, _figure_series(figure, row, unchanged, processes, compute, slowdown)


def _figure_series(
    figure: str,
    row: RowKey,
    prompt_turns: Sequence[PromptTurn],
    processes: ComparedProcesses,
    compute: FigureFunction,
    slowdown: float,
) -> RegressionSeries:
    """Return a series: the logarithm of a ratio for every prompt and process.

    Args:
        slowdown: logarithm of the machine's slowdown between the sides (`_machine_slowdown`).
    """
    values = np.full((len(prompt_turns), len(processes.outputs)), np.nan)
    for p, process in enumerate(processes.outputs):
        ours, theirs = (
            process.get(label, {}) for label in (row.label, _reference_label(row.label))
        )
        for i, prompt_turn in enumerate(prompt_turns):
            own, other = ours.get(prompt_turn), theirs.get(prompt_turn)
            value = compute(own, other) if own is not None and other is not None else None
            if value:
                values[i, p] = math.log(value)
    return RegressionSeries(
        figure, values, np.array(processes.new, dtype=bool), slowdown, processes.pair
    )


def _machine_slowdown(
    label: str, prompt_turns: Sequence[PromptTurn], processes: ComparedProcesses
) -> float:
    """Return the logarithm of the slowdown of a reference method (vanilla or hf:vanilla) in NEW."""
    found = []
    for prompt_turn in prompt_turns:
        sides: tuple[list[float], list[float]] = ([], [])
        for process, is_new in zip(processes.outputs, processes.new, strict=True):
            output = process.get(label, {}).get(prompt_turn)
            if output is not None and (value := _time_per_token(output)):
                sides[is_new].append(value)
        if all(sides):
            found.append(math.log(median(sides[1]) / median(sides[0])))
    return median(found) if found else 0.0


def _divide(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _time(output: ComparedOutput, name: str) -> float | None:
    found: float | None = None if output.times is None else getattr(output.times, name)
    return found


def _time_per_token(output: ComparedOutput) -> float | None:
    """Return the total time per token, prefill included.

    Other engines report only this time.
    """
    return _divide(_time(output, "total"), output.counters.n_tokens)


def _decode_time_per_token(output: ComparedOutput) -> float | None:
    """Return the time per token after the first."""
    n = output.counters.n_tokens
    return _divide(_time(output, "decode"), n and n - 1)


def _relative_time(own: ComparedOutput, other: ComparedOutput) -> float | None:
    return _divide(_time_per_token(own), _time_per_token(other))


def _relative_decode_time(own: ComparedOutput, other: ComparedOutput) -> float | None:
    """Return the ratio of decode times per token.

    If a method does not report its decode time, return the ratio of total times per token.
    """
    relative = _divide(_decode_time_per_token(own), _decode_time_per_token(other))
    return _relative_time(own, other) if relative is None else relative


def _relative_verify_time(own: ComparedOutput, other: ComparedOutput) -> float | None:
    return _divide(_time(own, "verify_forward"), _time(other, "verify_forward"))


def _relative_draft_time(own: ComparedOutput, _: ComparedOutput) -> float | None:
    return _divide(_time(own, "draft_forward"), _time(own, "verify_forward"))


def _fastest_draft_time(own: ComparedOutput, _: ComparedOutput) -> float | None:
    return _time(own, "draft_fastest")


def _relative_host_time(own: ComparedOutput, _: ComparedOutput) -> float | None:
    step = _divide(_time(own, "host"), own.counters.steps)
    return _divide(step, _time(own, "verify_forward"))


COMPONENTS: dict[str, FigureFunction] = {
    VERIFY: _relative_verify_time,
    DRAFT: _relative_draft_time,
    HOST: _relative_host_time,
}
