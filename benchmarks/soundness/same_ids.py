"""Identity at several batch sizes: how many outputs are the ids of each prompt decoded alone.

    python benchmarks/soundness/same_ids.py [METHOD,...] [--task spec_bench] [--questions 96]
        [--tokens 32] [--sizes 1,2,4,8,16] [--verify greedy|coupled]

Prompts join as others leave. Every method is compared with plain decoding of one prompt at a time,
and its steps with its own at batch 1.
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

Decoded = tuple[list[int], tuple[tuple[int, int], ...]]


def main() -> int:
    """Decode and print a line a method and size; 1 where an output or a step differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="?", default="vanilla,sps,pld,eagle2,eqspec,exspec")
    parser.add_argument("--task", default="spec_bench")
    parser.add_argument("--questions", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--sizes", default="1,2,4,8,16")
    parser.add_argument("--verify", choices=("greedy", "coupled"), default="greedy")
    parser.add_argument("--longest", type=int, default=1024, help="longest prompt")
    args = parser.parse_args()
    names = args.methods.split(",")
    plan = make_plan(RunConfig(methods=list(dict.fromkeys(["vanilla", *names])), tasks=[args.task]))
    bench = Bench(plan)
    sampling = Sampling() if args.verify == "greedy" else Sampling("coupled", 0.8, seed=1)
    requests = []
    for question in plan.questions[:: max(1, len(plan.questions) // args.questions)]:
        ids = bench.prompt(question)[: args.longest]
        bench.workspace.reserve(len(ids) + args.tokens)
        requests.append(bench.request(question.prompt_id, 1, ids, bench.stop(args.tokens)))
    del requests[args.questions :]
    lengths = sorted(len(request.ids) for request in requests)
    say(f"{len(requests)} prompts of {lengths[0]} to {lengths[-1]} tokens, {args.verify}")
    sizes = [int(size) for size in args.sizes.split(",")]
    method_runs = {method_run.label: method_run.method for method_run in plan.method_runs}
    due = [ids for ids, _ in decoded(bench, method_runs["vanilla"], requests, sampling, 1)]
    wrong = 0
    for name in names:
        alone: list[Decoded] = []
        for size in sizes:
            found = decoded(bench, method_runs[name], requests, sampling, size)
            alone = alone or found
            ids = sum(own == ought for (own, _), ought in zip(found, due, strict=True))
            steps = sum(a == b for (_, a), (_, b) in zip(found, alone, strict=True))
            wrong += 2 * len(due) - ids - steps
            say(f"{name:8} batch {size:2}  {ids} of {len(due)} ids, {steps} of {len(due)} steps")
    return min(wrong, 1)


def decoded(
    bench: Bench, method: object, requests: Sequence[Request], sampling: Sampling, size: int
) -> list[Decoded]:
    """Outputs of all requests, `size` of them in a step, and what each step drafted and kept."""
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


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
