"""Which earlier outputs `suffix` should keep: policies of eviction over a recorded trace.

    python benchmarks/studies/eviction.py --task agentic --limit 48 \
        --sizes 2,4,8,16 --table FILE
    python benchmarks/studies/eviction.py --trace trace.json --sizes 2,4,8

Without `--trace` it decodes the task with the shipped pair's target, greedy, and the method
`suffix`, whose memory holds everything; every output is a page, which is asked for when it has
ended, and in each step in which a token drafted from it stands. Misses are counted as in paging: a
page that is asked for and not held comes in, for what it would have drafted is decoded again.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from methods.suffix.eviction import POLICIES, DiscardBit, EvictionPolicy, PhaseBit

NEVER = 1 << 62


def misses(trace: Sequence[int], k: int, policy: EvictionPolicy, bits: Sequence[bool] = ()) -> int:
    """Misses of a policy with room for k pages, which learns of requests one after another.

    Args:
        bits: what is predicted with each request; default: what the policy itself predicts.
    """
    missed = 0
    for at, page in enumerate(trace):
        if page not in policy.held:
            missed += 1
            if len(policy.held) == k:
                policy.evict()
        policy.request(page, bits[at] if bits else None)
    return missed


def offline(trace: Sequence[int], k: int) -> tuple[int, list[bool]]:
    """Belady's policy, which takes out the page that is asked for again last (1966).

    Returns:
        its misses, the fewest of all policies, and for each request whether the page is still held
        when it is asked for again: the true bits of `DiscardBit`.
    """
    following, seen = [NEVER] * len(trace), dict[int, int]()
    for at in range(len(trace) - 1, -1, -1):
        following[at] = seen.get(trace[at], NEVER)
        seen[trace[at]] = at
    missed, held, last, kept = 0, dict[int, int](), dict[int, int](), [False] * len(trace)
    for at, page in enumerate(trace):
        if page in held:
            kept[last[page]] = True
        else:
            missed += 1
            if len(held) == k:
                del held[max(held, key=held.__getitem__)]
        held[page], last[page] = following[at], at
    return missed, kept


def phases(trace: Sequence[int], k: int) -> list[int]:
    """The phase of each request: a phase ends before the k + 1st page that is asked for in it."""
    found, phase, pages = [], 0, set[int]()
    for page in trace:
        if page not in pages and len(pages) == k:
            phase, pages = phase + 1, set()
        pages.add(page)
        found.append(phase)
    return found


def true_phases(trace: Sequence[int], k: int) -> list[bool]:
    """For each request whether its page is asked for in the next phase: the bits of `PhaseBit`."""
    phase = phases(trace, k)
    pages = set(zip(phase, trace, strict=True))
    return [(at + 1, page) in pages for at, page in zip(phase, trace, strict=True)]


def clean(trace: Sequence[int], k: int) -> int:
    """Pages of phases that the phase before did not ask for: at most twice the fewest misses."""
    pages = set(zip(phases(trace, k), trace, strict=True))
    return sum((phase - 1, page) not in pages for phase, page in pages)


def table(trace: Sequence[int], sizes: Sequence[int]) -> str:
    """Misses by policy and size, as a Markdown table."""
    rows = {name: [misses(trace, k, kind()) for k in sizes] for name, kind in POLICIES.items()}
    rows["discard-bit, true bits"] = [
        misses(trace, k, DiscardBit(), offline(trace, k)[1]) for k in sizes
    ]
    rows["phase-bit, true bits"] = [
        misses(trace, k, PhaseBit(), true_phases(trace, k)) for k in sizes
    ]
    rows["offline optimum"] = [offline(trace, k)[0] for k in sizes]
    lines = [["policy", *map(str, sizes)], ["---"] * (len(sizes) + 1)]
    lines += [[name, *map(str, counts)] for name, counts in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def record(task: str, limit: int, budget: int) -> list[int]:
    """The trace of a run of `suffix` whose memory holds everything."""
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
    from specbench_cli.tasks.template import answer_text, conversation, render

    place = resolve("embedded-7m").path
    target, tokenizer = load_decoder(place, name="target"), AutoTokenizer.from_pretrained(place)
    trace, memory, outputs = list[int](), Memory(), 0
    stop = StopRule(frozenset({tokenizer.eos_token_id}), budget)
    for question in load_task(task).questions[:limit]:
        answers = list[str]()
        for turn in range(len(question.turns)):
            messages = conversation(question.turns, answers)
            ids = tuple(render(tokenizer, messages, raw=False))
            workspace = Workspace({"target": target}, capacity=len(ids) + budget + 32)
            request = Request(question.prompt_id, turn, ids, stop)
            session = Session(workspace, request, Sampling(), memory=memory)
            method = Suffix(SuffixParams(memory=1 << 40))
            for step in method.generate(session):
                if step.outcome.path and method.source is not None:
                    trace.append(method.source)
            trace.append(outputs)  # the tree numbers those that have ended
            outputs += 1
            answers.append(answer_text(tokenizer, list(session.output())))
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
    given = parser.parse_args()
    if given.trace:
        trace = json.loads(given.trace.read_text())
    else:
        trace = record(given.task, given.limit, given.budget)
    if given.keep:
        given.keep.write_text(json.dumps(trace))
    print(f"{len(trace)} requests of {len(set(trace))} pages\n")
    print(table(trace, [int(k) for k in given.sizes.split(",")]))


if __name__ == "__main__":
    main()
