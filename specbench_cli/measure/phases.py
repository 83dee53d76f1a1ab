"""Division of a decoding time into the phases prefill, draft, verify and host work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specbench_cli.engine.types import Forward
from specbench_cli.store.schema import Ns

Interval = tuple[int, int]
"""Start and end in ns."""


def split_time(
    forwards: Sequence[Forward],
    total: int,
    prefill: int,
    learn: int | None = None,
    *,
    decode_start: int | None = None,
) -> Ns:
    """Divide the time of a decoding into phases.

    A forward of a batch may verify drafts and prefill prompts together. Its time is divided in
    proportion to the numbers of tokens.

    If the method runs on one worker, the phases add up to the total. Drafting before the first
    committed token counts as `prefill`.

    If the method has parallel workers, `draft` and `verify` may overlap. Then `host` is the time in
    which no worker computes. A prefill of the draft model after the first token counts as `draft`.
    If a draft forward is unfinished at the end of decoding, only its time until then counts.

    Args:
        forwards: Forwards, with times in ns since the start of the clock.
        total: Time in ns until the end of the method.
        prefill: Time in ns until the first committed token.
        learn: Learning delay in ns, which is added to the total. None if the method does not learn.
        decode_start: Time in ns at which decoding starts. Default: `prefill`. For a batch it is 0,
            because prompts join one by one.
    """
    decode_start = prefill if decode_start is None else decode_start
    prefill += (prompt_time := _prompt_time(forwards))
    decode, total, end = total - prefill, total + (learn or 0), total
    if all(forward.worker == 0 for forward in forwards):
        decoding = [f for f in forwards if f.t0_ns >= decode_start]
        verify = sum(f.t1_ns - f.t0_ns for f in decoding if f.role == "verify")
        verify -= prompt_time
        draft = sum(f.t1_ns - f.t0_ns for f in decoding if f.role in ("draft", "aux"))
        return Ns(total, prefill, decode, draft, verify, decode - draft - verify, learn)
    spans = [(f.role, max(f.t0_ns, prefill), min(f.t1_ns, end)) for f in forwards]
    verifying = union_length((t0, t1) for role, t0, t1 in spans if role == "verify")
    drafting = union_length((t0, t1) for role, t0, t1 in spans if role != "verify")
    either = union_length((t0, t1) for _, t0, t1 in spans)
    return Ns(total, prefill, decode, drafting, verifying, decode - either, learn)


def _prompt_time(forwards: Sequence[Forward]) -> int:
    """Return the time in ns that the forwards of a batch spent on prompts.

    Only forwards that also verified drafts are counted. The time of such a forward is divided in
    proportion to the numbers of tokens.
    """
    return sum(
        (f.t1_ns - f.t0_ns)
        * sum(n for place, n in f.rows.items() if place in f.prompt_places)
        // f.n_tokens
        for f in forwards
        if f.rows is not None and f.prompt_places
    )


def union_length(spans: Iterable[Interval]) -> int:
    """Return the total length that intervals cover. Overlaps count once.

    An interval that ends before its start counts as empty.
    """
    length, end = 0, 0
    for t0, t1 in sorted(span for span in spans if span[0] < span[1]):
        length += max(0, t1 - max(t0, end))
        end = max(end, t1)
    return length
