"""Throughput at several batch sizes: tokens a second of a method, and whether the ids stay.

    python tests/benchmarks/batches.py [METHOD,...] [--questions 16] [--tokens 96] [--rounds 5]

Embedded pair, questions of `mini`, greedy. Outputs end at the budget (no EOS), so that every batch
stays full; sizes take turns within a round, and what is printed is the median over rounds: of all
time, and of decoding, which leaves prefill out.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from statistics import median

from specbench_cli.config.run import RunConfig
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Request
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.execute.bench import Bench
from specbench_cli.execute.planning.plan import make_plan

SIZES = (1, 2, 4, 8)


def main() -> None:
    """Measure and print a line a method and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="?", default="vanilla,sps,pld,eagle2")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--longest", type=int, default=512, help="longest prompt")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    names = args.methods.split(",")
    config = RunConfig(methods=names, tasks=["mini"], limit=args.questions)
    plan = make_plan(config)
    bench = Bench(plan)
    requests = []
    for question in plan.questions:
        ids = bench.prompt(question.turns[:1], ())
        if len(ids) > args.longest:
            continue
        bench.workspace.reserve(len(ids) + args.tokens)
        stop = StopRule(frozenset(), args.tokens)
        requests.append(Request(question.prompt_id, 1, tuple(ids), stop))
    del requests[len(requests) // max(SIZES) * max(SIZES) :]
    lengths = [len(request.ids) for request in requests]
    sys.stdout.write(f"{len(requests)} prompts of {min(lengths)} to {max(lengths)} tokens\n")
    for arm in plan.arms:
        seconds: dict[int, list[float]] = {size: [] for size in SIZES}
        decoding: dict[int, list[float]] = {size: [] for size in SIZES}
        outputs: dict[int, list[list[int]]] = {}
        for number in range(args.rounds + 1):
            for size in SIZES:
                gc.collect()
                start = time.perf_counter()
                outputs[size], spent = decoded(bench, arm.method, requests, size)
                if number:  # the first round warms up
                    seconds[size].append(time.perf_counter() - start)
                    decoding[size].append(spent)
        tokens = sum(map(len, outputs[1]))
        for size in SIZES:
            ratio, decode = (
                median(a / b for a, b in zip(each[1], each[size], strict=True))
                for each in (seconds, decoding)
            )
            same = "ids equal" if outputs[size] == outputs[1] else "OTHER IDS"
            rate = tokens / median(seconds[size])
            sys.stdout.write(
                f"{arm.label:10} batch {size}  {rate:6.0f} tokens/s  {ratio:5.2f}x "
                f" decoding {decode:5.2f}x  {same}\n"
            )


def decoded(
    bench: Bench, method: object, requests: list[Request], size: int
) -> tuple[list[list[int]], float]:
    """Outputs of all requests, `size` of them at a time, and the seconds after prefill."""
    found, spent = [], 0
    for first in range(0, len(requests), size):
        batch = Batch(bench.workspace, requests[first : first + size], Sampling())
        for _ in method.generate_batch(batch):  # type: ignore[attr-defined]
            pass
        found += [list(session.output()) for session in batch.sessions]
        texts = [session.harness.text for session in batch.sessions]
        spent += max(text.last_ns for text in texts) - max(text.first_ns for text in texts)
    return found, spent / 1e9


if __name__ == "__main__":
    main()
