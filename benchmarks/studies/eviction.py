"""Compare eviction policies for the earlier outputs that `suffix` keeps, on a recorded trace.

    python benchmarks/studies/eviction.py --task agentic --limit 48 \
        --sizes 2,4,8,16 --table FILE
    python benchmarks/studies/eviction.py --trace trace.json --sizes 2,4,8

Without `--trace` the script decodes the task with the embedded target, greedy, and the method
`suffix` with unlimited memory. Each output is a page. It is requested when the output ends, and in
each step that accepts a token drafted from it. Misses are counted as in paging: a requested page
that is not in memory is loaded, because its text would be decoded again.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from methods.suffix.eviction import POLICIES, DiscardBit, EvictionPolicy, PhaseBit

NEVER = 1 << 62


def count_misses(
    trace: Sequence[int], k: int, policy: EvictionPolicy, bits: Sequence[bool] = ()
) -> int:
    """Return the number of misses of an online policy with memory for k pages.

    Args:
        bits: prediction for each request; default: the policy's own predictions.
    """
    n_misses = 0
    for at, page in enumerate(trace):
        if page not in policy.predictions:
            n_misses += 1
            if len(policy.predictions) == k:
                policy.evict()
        policy.request(page, bits[at] if bits else None)
    return n_misses


def optimal_eviction(trace: Sequence[int], k: int) -> tuple[int, list[bool]]:
    """Apply Belady's policy (1966), which evicts the page whose next request is the latest.

    Returns:
        (number of misses, which is the minimum; for each request, True if the page is still in
        memory at its next request, which are the true bits of `DiscardBit`).
    """
    following, seen = [NEVER] * len(trace), dict[int, int]()
    for at in range(len(trace) - 1, -1, -1):
        following[at] = seen.get(trace[at], NEVER)
        seen[trace[at]] = at
    n_misses, held, last, requested_again = (
        0,
        dict[int, int](),
        dict[int, int](),
        [False] * len(trace),
    )
    for at, page in enumerate(trace):
        if page in held:
            requested_again[last[page]] = True
        else:
            n_misses += 1
            if len(held) == k:
                del held[max(held, key=held.__getitem__)]
        held[page], last[page] = following[at], at
    return n_misses, requested_again


def split_phases(trace: Sequence[int], k: int) -> list[int]:
    """Return the phase number of each request. A phase ends before its (k + 1)st distinct page."""
    found, phase, pages = [], 0, set[int]()
    for page in trace:
        if page not in pages and len(pages) == k:
            phase, pages = phase + 1, set()
        pages.add(page)
        found.append(phase)
    return found


def true_phase_bits(trace: Sequence[int], k: int) -> list[bool]:
    """Return for each request whether the next phase requests its page: the bits of `PhaseBit`."""
    phase = split_phases(trace, k)
    pages = set(zip(phase, trace, strict=True))
    return [(at + 1, page) in pages for at, page in zip(phase, trace, strict=True)]


def count_clean_pages(trace: Sequence[int], k: int) -> int:
    """Return the number of pages that the previous phase did not request.

    It is at most twice the minimum number of misses.
    """
    pages = set(zip(split_phases(trace, k), trace, strict=True))
    return sum((phase - 1, page) not in pages for phase, page in pages)


def format_table(trace: Sequence[int], sizes: Sequence[int]) -> str:
    """Return a Markdown table of misses by policy and memory size."""
    rows = {
        name: [count_misses(trace, k, kind()) for k in sizes] for name, kind in POLICIES.items()
    }
    rows["discard-bit, true bits"] = [
        count_misses(trace, k, DiscardBit(), optimal_eviction(trace, k)[1]) for k in sizes
    ]
    rows["phase-bit, true bits"] = [
        count_misses(trace, k, PhaseBit(), true_phase_bits(trace, k)) for k in sizes
    ]
    rows["offline optimum"] = [optimal_eviction(trace, k)[0] for k in sizes]
    lines = [["policy", *map(str, sizes)], ["---"] * (len(sizes) + 1)]
    lines += [[name, *map(str, counts)] for name, counts in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def record_trace(task: str, limit: int, budget: int) -> list[int]:
    """Return the trace of a run of `suffix` with unlimited memory."""
    from transformers import AutoTokenizer

    from methods.suffix.method import Suffix, SuffixParams
    from specbench_cli.engine.learning import Memory
    from specbench_cli.engine.models.load import load_decoder
    from specbench_cli.engine.request import Request
    from specbench_cli.engine.sequence import StopRule
    from specbench_cli.engine.session import Session
    from specbench_cli.engine.verify.sampling import Sampling
    from specbench_cli.engine.workspace import Workspace
    from specbench_cli.models.resolve import resolve
    from specbench_cli.tasks.load import load_task
    from specbench_cli.tasks.template import build_messages, decode_answer, render_prompt

    place = resolve("embedded-7m").path
    target, tokenizer = load_decoder(place, name="target"), AutoTokenizer.from_pretrained(place)
    trace, memory, outputs = list[int](), Memory(), 0
    stop = StopRule(frozenset({tokenizer.eos_token_id}), budget)
    for question in load_task(task).questions[:limit]:
        answers = list[str]()
        for turn in range(len(question.turns)):
            messages = build_messages(question.turns, answers)
            ids = tuple(render_prompt(tokenizer, messages, raw=False))
            workspace = Workspace({"target": target}, capacity=len(ids) + budget + 32)
            request = Request(question.prompt_id, turn, ids, stop)
            session = Session(workspace, request, Sampling(), memory=memory)
            method = Suffix(SuffixParams(memory=1 << 40))
            for step in method.generate(session):
                if step.outcome.path and method.source is not None:
                    trace.append(method.source)
            trace.append(outputs)  # the suffix tree numbers finished outputs from 0
            outputs += 1
            answers.append(decode_answer(tokenizer, list(session.output())))
    return trace


def main() -> None:
    """Record or read a trace, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", default="agentic")
    parser.add_argument("--limit", type=int, default=48, help="questions of the task")
    parser.add_argument("--budget", type=int, default=64, help="tokens of an output at most")
    parser.add_argument("--sizes", default="2,4,8,16,32,64", help="pages held")
    parser.add_argument("--trace", type=Path, help="a trace to read instead: a JSON list of pages")
    parser.add_argument("--keep", type=Path, help="where to write the trace")
    args = parser.parse_args()
    if args.trace:
        trace = json.loads(args.trace.read_text())
    else:
        trace = record_trace(args.task, args.limit, args.budget)
    if args.keep:
        args.keep.write_text(json.dumps(trace))
    print(f"{len(trace)} requests of {len(set(trace))} pages\n")
    print(format_table(trace, [int(k) for k in args.sizes.split(",")]))


if __name__ == "__main__":
    main()
