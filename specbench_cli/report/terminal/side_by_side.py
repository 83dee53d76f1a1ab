"""Comparison of a method's output with vanilla's, side by side: texts, difference and steps."""

from __future__ import annotations

import textwrap
from itertools import zip_longest

from specbench_cli import output
from specbench_cli.report.terminal.table import WIDTH
from specbench_cli.summary.comparison import ComparedSide, Lane, OutputComparison

_COLUMN = (WIDTH - 3) // 2
_OPEN, _CLOSE = ">>", "<<"
"""Marks around the first token that differs."""
LEGEND = "lanes: = accepted, x rejected, . not tested, + the token that verification adds"
RELAXED = "       ~ relaxed: accepted only by a lossy accept rule"


def page(found: OutputComparison) -> str:
    """Return the whole comparison, in lines of at most `table.WIDTH` columns."""
    lines = [
        f"{found.prompt_id}  turn {found.turn}  pass {found.pass_}  {found.label}  {found.sampling}"
        f"  {found.guarantee}",
        *textwrap.wrap(found.question, WIDTH - 2, initial_indent="  ", subsequent_indent="  "),
        *(line for said in _verdict(found) for line in textwrap.wrap(said, WIDTH)),
        "",
        *_columns(found),
        "",
        *_steps(found),
    ]
    return "\n".join(line.rstrip() for line in lines).rstrip()


def _verdict(found: OutputComparison) -> list[str]:
    lines = [] if found.broken is None else [f"BROKEN: {found.label}: {found.broken}"]
    if found.error is not None:
        lines.append(f"failed: {found.error}")
    if found.verdict is not None:
        lines.append(f"verdict: {' '.join(_verdict_words(found))}")
    if found.position is not None and found.own is not None and found.vanilla is not None:
        lines.append(
            f"first difference at token {found.position}:"
            f" vanilla {_token(found.vanilla)}, {found.label} {_token(found.own)}"
        )
    elif found.own is not None and found.vanilla is not None:
        lines.append(f"the same {found.own.n_tokens} tokens")
    return lines


def _verdict_words(found: OutputComparison) -> list[str]:
    verdict = found.verdict
    assert verdict is not None
    words = [verdict.kind]
    if verdict.gap is not None:
        words.append(f"(the score of the worst token is {verdict.gap:.3g} below the best one")
        if found.tolerance is not None:
            words[-1] += f", rounding explains up to {found.tolerance:.3g}"
        words[-1] += ")"
    elif verdict.kind == "mismatch" and found.own is not None:
        words.append(f"(wrong end: {found.own.n_tokens} tokens, finish reason {found.own.finish})")
    if verdict.rounding is not None:
        explains = "explains it" if verdict.rounding else "does not explain it"
        words.append(f"the width of verification {explains}")
    return words


def _token(side: ComparedSide) -> str:
    if side.token is None:
        return f"had ended ({side.finish})"
    return f"{side.token}" if side.token_text is None else f"{side.token} {side.token_text!r}"


def _columns(found: OutputComparison) -> list[str]:
    left = _wrap_side(found.vanilla, found)
    right = _wrap_side(found.own, found)
    names = ("vanilla", output.escape_hidden(found.label))
    rows = [names, ("-" * _COLUMN, "-" * _COLUMN), *zip_longest(left, right, fillvalue="")]
    return [f"{a:{_COLUMN}} | {b}" for a, b in rows]


def _wrap_side(side: ComparedSide | None, found: OutputComparison) -> list[str]:
    if side is None:
        return ["(no output)"]
    marked = output.escape_hidden(_mark_difference(side, found.position))
    lines = [
        line
        for paragraph in marked.splitlines()
        for line in textwrap.wrap(paragraph, _COLUMN, drop_whitespace=False) or [""]
    ]
    return [*lines, f"({side.n_tokens} tokens, {side.finish})"]


def _mark_difference(side: ComparedSide, position: int | None) -> str:
    """Return the text with marks around the first token that differs. Without a text, the ids."""
    if side.text is None:
        words = [str(token) for token in side.ids]
        if position is not None and position < len(words):
            words[position] = f"{_OPEN}{words[position]}{_CLOSE}"
        return " ".join(words)
    if position is None:
        return side.text
    return f"{side.before}{_OPEN}{side.token_text or ''}{_CLOSE}{side.after}"


def _steps(found: OutputComparison) -> list[str]:
    if not found.lanes:
        return ["steps: not reported" if found.own is not None else ""]
    longest = max(lane.drafted for lane in found.lanes) + 1
    lines = [
        LEGEND,
        *[RELAXED] * any(lane.relaxed for lane in found.lanes),
        f"{'step':>4} {'at':>5}  {'lane':{longest}}  tokens",
    ]
    for number, lane in enumerate(found.lanes, start=1):
        head = f"{number:>4} {lane.at:>5}  {_lane(lane):{longest}}  "
        text = f"{lane.committed}" if lane.text is None else repr(lane.text)
        here = found.position is not None and lane.at <= found.position < lane.at + lane.committed
        mark = "  <- first difference" if here else ""
        room = max(8, WIDTH - len(head) - len(mark))
        if len(text) > room:
            text = text[: room - 3] + "..."
        lines.append(f"{head}{text}{mark}")
    return lines


def _lane(lane: Lane) -> str:
    n_kept = lane.accepted + len(lane.relaxed)
    marks = "".join("~" if level in lane.relaxed else "=" for level in range(n_kept))
    rejected, untested = lane.tested - n_kept, lane.drafted - lane.tested
    return marks + "x" * rejected + "." * untested + "+" * (lane.committed - n_kept)
