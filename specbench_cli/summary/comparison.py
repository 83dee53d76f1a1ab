"""Comparison of a method's output with vanilla's for one prompt, with the method's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from specbench_cli.config.problems import did_you_mean
from specbench_cli.errors import UsageError
from specbench_cli.judge.broken import find_broken_methods
from specbench_cli.store.run_dir import Prompt, RunDir
from specbench_cli.store.schema import BASELINE, Record, Verdict

Decode = Callable[[Sequence[int]], str]
"""Function that converts token ids to text."""

_WORST_FIRST = ("mismatch", "failed", "near-tie")
_MAX_LISTED = 12
"""Maximum number of prompts that the error for an unknown prompt lists."""


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """Vanilla's output or the method's output, around the first token that differs.

    token: Token at the first difference. None if there is none, or if the output ended before.
    token_text: Text of this token. This and the next two are None if the tokenizer is not on this
        machine.
    before: Text before the token.
    after: Text after the token.
    """

    label: str
    n_tokens: int
    finish: str
    ids: list[int]
    text: str | None
    token: int | None
    before: str | None
    token_text: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Lane:
    """A decoding step of a method.

    at: Index in the output of the step's first token.
    drafted, tested, accepted: Number of draft levels.
    committed: Number of tokens that the step added to the output.
    relaxed: Indices of the step's tokens, from 0, that only a lossy accept rule accepted.
    """

    at: int
    drafted: int
    tested: int
    accepted: int
    committed: int
    text: str | None
    relaxed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputComparison:
    """Comparison of a method's output with vanilla's.

    position: Index of the first token that differs. None if the outputs are equal.
    tolerance: Largest gap that rounding can cause, in the unit of `verdict.gap`. None if unknown.
        broken: Reason why the method is broken. None if it is not.
    """

    prompt_id: str
    turn: int
    pass_: int
    question: str
    label: str
    method: str
    sampling: str
    guarantee: str
    verdict: Verdict | None
    tolerance: float | None
    broken: str | None
    error: str | None
    position: int | None
    vanilla: ComparedSide | None
    own: ComparedSide | None
    lanes: list[Lane]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, with the names that records use."""
        return {name.rstrip("_"): value for name, value in asdict(self).items()}


def compare_outputs(
    run: RunDir, prompt_id: str, labels: Sequence[str], decode: Decode | None
) -> list[OutputComparison]:
    """Compare the outputs of one prompt with vanilla's, for each turn, in the worst repeat.

    Args:
        prompt_id: Id of the prompt, as in the records.
        labels: Methods to compare. Empty for all except vanilla, or for vanilla if it is alone.
        decode: Converts token ids to text. None leaves the texts None.

    Raises:
        UsageError: The prompt or a label is unknown. The message lists the known ones.
    """
    records = list(run.records())
    own = [record for record in records if record.prompt_id == prompt_id]
    if not own:
        raise _unknown_prompt_error(
            prompt_id, list(dict.fromkeys(r.prompt_id for r in records)), run
        )
    known = list(dict.fromkeys(record.label for record in own))
    for label in labels:
        if label not in known:
            raise UsageError(
                f"no method {label!r} on {prompt_id}{did_you_mean(label, known)}",
                hint=f"--method {' or '.join(known)}",
            )
    wanted = labels or [label for label in known if label != BASELINE] or known
    prompts = {prompt.turn: prompt for prompt in run.prompts() if prompt.prompt_id == prompt_id}
    whys = find_broken_methods(records, run.manifest)
    reference = {(r.turn, r.pass_): r for r in own if r.label == BASELINE}
    comparisons = []
    for turn in sorted({record.turn for record in own}):
        for label in wanted:
            passes = [r for r in own if (r.label, r.turn) == (label, turn)]
            if passes:
                worst = min(passes, key=_rank)
                vanilla = reference.get((turn, worst.pass_))
                comparisons.append(
                    _make_comparison(
                        worst, vanilla, prompts.get(turn), run.manifest, whys.get(label), decode
                    )
                )
    return comparisons


def _make_comparison(
    own: Record,
    vanilla: Record | None,
    prompt: Prompt | None,
    manifest: Mapping[str, Any],
    why: str | None,
    decode: Decode | None,
) -> OutputComparison:
    ids, reference = own.output_ids, None if vanilla is None else vanilla.output_ids
    position = None if ids is None or reference is None else first_difference(ids, reference)
    return OutputComparison(
        prompt_id=own.prompt_id,
        turn=own.turn,
        pass_=own.pass_,
        question="" if prompt is None else prompt.text,
        label=own.label,
        method=own.method,
        sampling=own.sampling,
        guarantee=own.guarantee,
        verdict=own.verdict,
        tolerance=_tolerance(manifest),
        broken=why,
        error=own.error,
        position=position,
        vanilla=None if vanilla is None else _make_side(vanilla, position, decode),
        own=_make_side(own, position, decode),
        lanes=_make_lanes(own, decode),
    )


def first_difference(ids: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the first index at which two lists of token ids differ, or None if they are equal."""
    pairs = enumerate(zip_longest(ids, reference))
    return next((at for at, (a, b) in pairs if a != b), None)


def _make_side(record: Record, position: int | None, decode: Decode | None) -> ComparedSide | None:
    ids = record.output_ids
    if ids is None:
        return None
    at = len(ids) if position is None else position
    token = ids[at] if at < len(ids) else None
    return ComparedSide(
        label=record.label,
        n_tokens=len(ids),
        finish=record.finish,
        ids=ids,
        text=_decode_text(ids, decode),
        token=token,
        before=_decode_text(ids[:at], decode),
        token_text=_decode_text(ids[at : at + 1], decode),
        after=_decode_text(ids[at + 1 :], decode),
    )


def _make_lanes(record: Record, decode: Decode | None) -> list[Lane]:
    steps, ids = record.steps, record.output_ids
    if steps is None or ids is None:
        return []
    lanes, at = [], 1  # prefill commits the first token
    for drafted, tested, accepted, committed in zip(
        steps.levels, steps.tested, steps.accepted, steps.committed, strict=True
    ):
        text = _decode_text(ids[at : at + committed], decode)
        origins = (record.origin or [])[at : at + committed]
        relaxed = tuple(place for place, word in enumerate(origins) if word == "relaxed")
        lanes.append(Lane(at, drafted, tested, accepted, committed, text, relaxed))
        at += committed
    return lanes


def _decode_text(ids: Sequence[int], decode: Decode | None) -> str | None:
    return None if decode is None else decode(ids)


def _tolerance(manifest: Mapping[str, Any]) -> float | None:
    """Return the largest gap between two scores that rounding can cause.

    It is the measured tolerance in logits, divided by the temperature if one is set.
    """
    measured = manifest.get("tolerance")
    if not measured or "value" not in measured:
        return None
    effective = manifest.get("config", {}).get("effective", {})
    return float(measured["value"]) / (effective.get("temperature") or 1.0)


def _rank(record: Record) -> tuple[int, int]:
    kind = "failed" if record.verdict is None else record.verdict.kind
    worst = _WORST_FIRST.index(kind) if kind in _WORST_FIRST else len(_WORST_FIRST)
    return worst, record.pass_


def _unknown_prompt_error(prompt_id: str, known: Sequence[str], run: RunDir) -> UsageError:
    listed: Iterable[str] = known[:_MAX_LISTED]
    more = f" and {len(known) - _MAX_LISTED} more, in {run.path / 'prompts.jsonl'}"
    return UsageError(
        f"this run has no prompt {prompt_id!r}{did_you_mean(prompt_id, known)}",
        hint=f"one of {', '.join(listed)}{more if len(known) > _MAX_LISTED else ''}",
    )
