"""Count the outputs that do not change with the batch size.

    python benchmarks/soundness/same_ids.py [METHOD,...] [--task spec_bench] [--questions 96]
        [--tokens 32] [--sizes 1,2,4,8,16] [--verify greedy|coupled]

A new prompt joins the batch when another ends. The ids of each method are compared with vanilla
decoding of one prompt at a time, and its steps with its own steps at batch 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from specbench_cli.config.run import RunConfig
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.request import Request
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.measure.bench import Bench
from specbench_cli.plan.plan import make_plan

IdsAndSteps = tuple[list[int], tuple[tuple[int, int], ...]]


def main() -> int:
    """Decode and print a line per method and size. Return 1 if an output or a step differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="?", default="vanilla,sps,pld,eagle2,eqspec,exspec")
    parser.add_argument("--task", default="spec_bench")
    parser.add_argument("--questions", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--sizes", default="1,2,4,8,16")
    parser.add_argument("--verify", choices=("greedy", "coupled"), default="greedy")
    parser.add_argument("--longest", type=int, default=1024, help="maximum number of prompt tokens")
    args = parser.parse_args()
    names = args.methods.split(",")
    plan = make_plan(RunConfig(methods=list(dict.fromkeys(["vanilla", *names])), tasks=[args.task]))
    bench = Bench(plan)
    sampling = Sampling() if args.verify == "greedy" else Sampling("coupled", 0.8, seed=1)
    requests = []
    for question in plan.questions[:: max(1, len(plan.questions) // args.questions)]:
        ids = bench.encode_prompt(question)[: args.longest]
        bench.workspace.reserve(len(ids) + args.tokens)
        requests.append(
            bench.create_request(question.prompt_id, 1, ids, bench.stop_rule(args.tokens))
        )
    del requests[args.questions :]
    lengths = sorted(len(request.ids) for request in requests)
    write_line(f"{len(requests)} prompts of {lengths[0]} to {lengths[-1]} tokens, {args.verify}")
    sizes = [int(size) for size in args.sizes.split(",")]
    method_runs = {method_run.label: method_run.method for method_run in plan.method_runs}
    expected = [ids for ids, _ in decode(bench, method_runs["vanilla"], requests, sampling, 1)]
    n, n_wrong = len(expected), 0
    for name in names:
        at_batch_1: list[IdsAndSteps] = []
        for size in sizes:
            actual = decode(bench, method_runs[name], requests, sampling, size)
            at_batch_1 = at_batch_1 or actual
            ids = sum(
                actual_ids == expected_ids
                for (actual_ids, _), expected_ids in zip(actual, expected, strict=True)
            )
            steps = sum(a == b for (_, a), (_, b) in zip(actual, at_batch_1, strict=True))
            n_wrong += 2 * n - ids - steps
            write_line(f"{name:8} batch {size:2}  {ids} of {n} ids, {steps} of {n} steps")
    return min(n_wrong, 1)


def decode(
    bench: Bench, method: object, requests: Sequence[Request], sampling: Sampling, size: int
) -> list[IdsAndSteps]:
    """Return for each request its ids, and the drafted and committed tokens of each step.

    Args:
        size: batch size.
    """
    batch = Batch(
        bench.workspace,
        requests,
        sampling,
        size=size,
        slots=method.max_sequences(size),  # type: ignore[attr-defined]
    )
    steps: list[list[tuple[int, int]]] = [[] for _ in requests]
    for step in method.generate_batch(batch):  # type: ignore[attr-defined]
        steps[step.seq].append((step.draft.nodes, len(step.outcome.committed)))
    outputs = (list(session.output()) for session in batch.sessions)
    return list(zip(outputs, map(tuple, steps), strict=True))


def write_line(line: str) -> None:
    """Print a line and flush."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
