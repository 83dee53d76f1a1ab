"""How the time of a decoding divides: prefill, draft, verify, and what the host took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specbench_cli.engine.types import Forward
from specbench_cli.store.schema import Ns

Span = tuple[int, int]


def divided(
    forwards: Sequence[Forward],
    total: int,
    prefill: int,
    learn: int | None = None,
    *,
    since: int | None = None,
) -> Ns:
    """The times of a decoding, with what learning delayed it by. What prompts had of forwards
    beside others' rows is added to `prefill`, a row as long as another.

    Where one worker computed they add up; what it drafted before the first token stood is in
    `prefill` (masks that go through the target behind the prompt). Where several did, `draft` and
    `verify` are busy times within decode (what a drafter's prefill took of it is `draft`, and what
    was still being drafted at the end is cut), and `host` is what none of them covers.

    Args:
        forwards: in nanoseconds since the timer's start.
        total, prefill: nanoseconds until the method's end and until the first committed token.
        learn: nanoseconds, added to the total; None where nothing is learnt.
        since: when decoding begins, if not after `prefill`: several prompts join one by one.
    """
    since = prefill if since is None else since
    prefill += (beside := _beside(forwards))
    decode, total, end = total - prefill, total + (learn or 0), total
    if all(forward.worker == 0 for forward in forwards):
        decoding = [f for f in forwards if f.t0_ns >= since]
        verify = sum(f.t1_ns - f.t0_ns for f in decoding if f.role == "verify")
        verify -= beside
        draft = sum(f.t1_ns - f.t0_ns for f in decoding if f.role in ("draft", "aux"))
        return Ns(total, prefill, decode, draft, verify, decode - draft - verify, learn)
    spans = [(f.role, max(f.t0_ns, prefill), min(f.t1_ns, end)) for f in forwards]
    verifying = covered((t0, t1) for role, t0, t1 in spans if role == "verify")
    drafting = covered((t0, t1) for role, t0, t1 in spans if role != "verify")
    either = covered((t0, t1) for _, t0, t1 in spans)
    return Ns(total, prefill, decode, drafting, verifying, decode - either, learn)


def _beside(forwards: Sequence[Forward]) -> int:
    """Nanoseconds that prompts had of forwards beside others' rows."""
    return sum(
        (f.t1_ns - f.t0_ns)
        * sum(n for place, n in f.rows.items() if place in f.prompt_places)
        // f.n_tokens
        for f in forwards
        if f.rows is not None and f.prompt_places
    )


def covered(spans: Iterable[Span]) -> int:
    """Length of the union of intervals; those that end before they begin hold nothing."""
    length, end = 0, 0
    for t0, t1 in sorted(span for span in spans if span[0] < span[1]):
        length += max(0, t1 - max(t0, end))
        end = max(end, t1)
    return length
