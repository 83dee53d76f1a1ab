"""Throughput at several batch sizes: tokens a second of a method, and whether the ids stay.

    python tests/benchmarks/batches.py [METHOD,...] [--questions 16] [--tokens 96] [--rounds 5]

Embedded pair, questions of `mini`, greedy. Outputs end at the budget (no EOS), so that every batch
stays full; sizes take turns within a round, and what is printed is the median over rounds: of all
time, and of decoding, which leaves prefill out.

    python tests/benchmarks/batches.py --ids [METHOD,...] [--questions 96] [--tokens 96]

counts instead: of how many prompts the ids are those of vanilla alone, at batch 1 to 16, greedy and
coupled (T 0.8). Outputs end at their EOS, and others join in their place, whose prompts are read
in parts of at most --chunk tokens beside them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from functools import cache
from statistics import median

from specbench_cli import registry
from specbench_cli.config.run import RunConfig
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Request, Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.execute.bench import Bench
from specbench_cli.execute.planning.plan import Arm, make_plan

SIZES = (1, 2, 4, 8)
ID_SIZES = (*SIZES, 16)
RULES = (Sampling(), Sampling("coupled", 0.8))


def main() -> None:
    """Measure, or count, and print a line a method and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="?", default="vanilla,sps,pld,eagle2")
    parser.add_argument("--ids", action="store_true", help="count equal ids, measure nothing")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--longest", type=int, default=512, help="longest prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=64, help="most prompt tokens beside others")
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
        stop = bench.stop(args.tokens) if args.ids else StopRule(frozenset(), args.tokens)
        requests.append(Request(question.prompt_id, 1, tuple(ids), stop))
    if not args.ids:
        del requests[len(requests) // max(SIZES) * max(SIZES) :]
    lengths = [len(request.ids) for request in requests]
    sys.stdout.write(f"{len(requests)} prompts of {min(lengths)} to {max(lengths)} tokens\n")
    if args.ids:
        for arm in plan.arms:
            count(bench, arm, requests, args.chunk)
        return
    for arm in plan.arms:
        measure(bench, arm, requests, args.rounds)


def count(bench: Bench, arm: Arm, requests: list[Request], chunk: int) -> None:
    """Print of how many requests a row's ids are vanilla's own, which decodes them alone."""
    for sampling in RULES:
        due = [alone(bench, request, sampling) for request in requests]
        for size in ID_SIZES:
            held = arm.method.held(size)
            batch = Batch(bench.workspace, requests, sampling, size=size, held=held, chunk=chunk)
            for _ in arm.method.generate_batch(batch):
                pass
            found = [list(session.output()) for session in batch.sessions]
            equal = sum(a == b for a, b in zip(found, due, strict=True))
            ended = sum(session.finish == "eos" for session in batch.sessions)
            sys.stdout.write(
                f"{arm.label:10} {sampling.rule:8} batch {size:2}  {equal} of {len(due)} equal, "
                f"{sum(map(len, found))} tokens, {ended} ended by EOS\n"
            )
            sys.stdout.flush()


@cache
def alone(bench: Bench, request: Request, sampling: Sampling) -> list[int]:
    """What vanilla says of a request that it decodes alone."""
    session = Session(bench.workspace, request, sampling)
    for _ in registry.load("vanilla")().generate(session):
        pass
    return list(session.output())


def measure(bench: Bench, arm: Arm, requests: list[Request], rounds: int) -> None:
    """Print throughput of a row at every size."""
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    decoding: dict[int, list[float]] = {size: [] for size in SIZES}
    outputs: dict[int, list[list[int]]] = {}
    for number in range(rounds + 1):
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
