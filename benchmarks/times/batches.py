"""Throughput at several batch sizes: tokens a second of a method, and whether the ids stay.

    python benchmarks/times/batches.py [METHOD,...] [--questions 16] \
        [--tokens 96] [--rounds 5]

Embedded pair, questions of `mini`, greedy. Outputs end at the budget (no EOS), so that every batch
stays full; sizes take turns within a round, and what is printed is the median over rounds: of all
time, and of decoding, which leaves prefill out.

    python benchmarks/times/batches.py --ids [METHOD,...] [--questions 96] [--tokens 96]

counts instead: of how many prompts the ids are those of vanilla alone, at batch 1 to 16, greedy and
coupled (T 0.8). Outputs end at their EOS, and others join in their place, whose prompts are read
in parts of at most --chunk tokens beside them.

    python benchmarks/times/batches.py --best METHOD [--target T --draft D] [--to F.svg]

finds the best draft length K*(batch) of a method that drafts chains, at batch 1 to 16: tokens a
second of decoding for every fixed length, 0 (vanilla) among them, and for `synergy` and
`smartspec`, as long as all sequences are there: until the first one ends. A round is a group of as
many prompts as the batch has seats, which all decode in turn. Beside them what is predicted before
anything of it is measured: by what steps cost here, and by the share of tested tokens that stood in
a pass of its own. Ratios have 95% intervals by bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from specbench_cli import registry
from specbench_cli.config.run import RunConfig
from specbench_cli.engine.batch import Batch
from specbench_cli.engine.drafting.load_aware import expected_tokens
from specbench_cli.engine.drafting.synergy import best_length
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.measure.bench import Bench
from specbench_cli.measure.quiet import MeasurementWindows, NoiseMeter
from specbench_cli.measure.step_costs import StepCosts, measure_step_costs
from specbench_cli.plan.method_run import MethodRun
from specbench_cli.plan.plan import make_plan

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
    parser.add_argument("--rounds", type=int, default=5, help="of --best: groups of prompts")
    parser.add_argument("--chunk", type=int, default=64, help="most prompt tokens beside others")
    parser.add_argument("--best", metavar="METHOD", help="find its best draft length by batch")
    parser.add_argument("--lengths", type=int, default=6, help="longest draft of --best")
    parser.add_argument("--sizes", type=int, nargs="+", default=ID_SIZES, help="batches of --best")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft")
    parser.add_argument(
        "--to", help="file for the figure of --best; tokens a second of all rounds beside it"
    )
    args = parser.parse_args()
    names = ["vanilla"] if args.best else args.methods.split(",")
    config = RunConfig(
        methods=[*names, args.best] if args.best else names,
        tasks=["mini"],
        limit=args.questions,
        target=args.target,
        draft=args.draft,
    )
    plan = make_plan(config)
    bench = Bench(plan)
    requests = []
    for question in plan.questions:
        ids = bench.prompt(question)
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
        for method_run in plan.method_runs:
            count(bench, method_run, requests, args.chunk)
        return
    if args.best:
        Lengths(bench, args.best, args.lengths, requests, args.sizes).find(args.rounds, args.to)
        return
    for method_run in plan.method_runs:
        measure(bench, method_run, requests, args.rounds)


def count(bench: Bench, method_run: MethodRun, requests: list[Request], chunk: int) -> None:
    """Print of how many requests a row's ids are vanilla's own, which decodes them alone."""
    for sampling in RULES:
        due = [alone(bench, request, sampling) for request in requests]
        for size in ID_SIZES:
            held = method_run.method.max_sequences(size)
            batch = Batch(bench.workspace, requests, sampling, size=size, slots=held, chunk=chunk)
            for _ in method_run.method.generate_batch(batch):
                pass
            found = [list(session.output()) for session in batch.sessions]
            equal = sum(a == b for a, b in zip(found, due, strict=True))
            ended = sum(session.finish == "eos" for session in batch.sessions)
            sys.stdout.write(
                f"{method_run.label:10} {sampling.rule:8} batch {size:2}"
                f"  {equal} of {len(due)} equal, "
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


def measure(bench: Bench, method_run: MethodRun, requests: list[Request], rounds: int) -> None:
    """Print throughput of a row at every size."""
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    decoding: dict[int, list[float]] = {size: [] for size in SIZES}
    outputs: dict[int, list[list[int]]] = {}
    for number in range(rounds + 1):
        for size in SIZES:
            gc.collect()
            start = time.perf_counter()
            outputs[size], spent = decoded(bench, method_run.method, requests, size)
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
            f"{method_run.label:10} batch {size}  {rate:6.0f} tokens/s  {ratio:5.2f}x "
            f" decoding {decode:5.2f}x  {same}\n"
        )


class Lengths:
    """A method's draft lengths, fixed ones and policies', at some sizes of batches."""

    def __init__(
        self, bench: Bench, name: str, longest: int, requests: list[Request], sizes: list[int]
    ) -> None:
        self.bench, self.requests, self.sizes = bench, requests, sizes
        kind, vanilla = registry.load(name), registry.load("vanilla")()
        self.longest = longest
        self.of = lambda **own: kind(kind.Params(**own))
        self.fixed = {0: vanilla} | {k: self.of(length=k) for k in range(1, longest + 1)}

    def alpha(self, size: int) -> float:
        """The share of tested tokens that stood, of a pass of its own over groups of a size, as far
        as they are measured: behind an EOS, which ends nothing here, drafts fare worse."""
        groups = range(0, len(self.requests) - size + 1, size)
        found = [full(self.bench, self.fixed[3], self.requests[at : at + size]) for at in groups]
        return sum(each.stood for each in found) / sum(each.tested for each in found)

    def costs(self) -> StepCosts:
        """What forwards cost here, as a run of a policy measures it."""
        return measure_step_costs(
            self.bench.workspace,
            MeasurementWindows(NoiseMeter(), allow_noise=True),
            self.bench.context,
            most=max(self.sizes),
        )

    def find(self, rounds: int, to: str | None) -> None:
        """Predict, measure, compare, print."""
        costs = self.costs()
        self.bench.workspace.costs = cache(costs)

        def target(sequences: int, rows: int, even: bool = True) -> float:
            return costs("target", rows, sequences, even)

        def draft(sequences: int) -> float:
            return costs("draft", sequences, sequences)

        sys.stdout.write(
            f"a target forward over one row {costs.target_ns / 1e6:.2f} ms; of it a step of one"
            f" {target(1, 1):.3f}, its draft token {draft(1):.3f}; noisy: {costs.noisy}\n"
        )
        heads = ["batch", "acceptance", *(f"K={k}" for k in self.fixed), "synergy", "smartspec"]
        heads += ["K* measured", "predicted", "predicted / best", "synergy / best"]
        heads += ["smartspec / best", "smartspec / vanilla"]
        sys.stdout.write(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n")
        found, due = {}, {}
        for size in self.sizes:
            alpha = self.alpha(size)
            own = {"acceptance": alpha, "max": self.longest}
            rows = {
                **{str(k): method for k, method in self.fixed.items()},
                **{rule: self.of(length=rule, **own) for rule in ("synergy", "smartspec")},
            }
            spent = found[size] = self.measured(size, rows, rounds)
            each = {name: sum(times) for name, times in spent.items()}
            best = str(min(self.fixed, key=lambda k: each[str(k)]))
            said = str(best_length(alpha, size, self.longest, target, draft))
            top = self.best_of_others(spent)
            ratios = [ratio(top, spent[name]) for name in (said, "synergy", "smartspec")]
            ratios.append(ratio(spent["0"], spent["smartspec"]))
            rates = [f"{1 / np.mean(times):.0f}" for times in spent.values()]
            line = [str(size), f"{alpha:.2f}", *rates, best, said, *ratios]
            sys.stdout.write(f"| {' | '.join(line)} |\n")
            sys.stdout.flush()
            due[size] = {
                k: expected_tokens(alpha, k)
                * size
                / (target(size, size * (k + 1)) + k * draft(size))
                for k in self.fixed
            }
        if to:
            self.draw(found, due, costs, to)
            data = {
                size: {name: times.tolist() for name, times in spent.items()}
                for size, spent in found.items()
            }
            Path(to).with_suffix(".json").write_text(json.dumps(data))

    def measured(self, size: int, rows: dict[str, object], rounds: int) -> dict[str, np.ndarray]:
        """Seconds of decoding a token of every row, by rounds: of a group of requests each, which
        all rows decode one after the other."""
        spent: dict[str, list[float]] = {name: [] for name in rows}
        for number in range(rounds + 1):
            first = number * size % len(self.requests)
            group, due = self.requests[first : first + size], None
            for name in rows if number % 2 else reversed(rows):
                gc.collect()
                found = full(self.bench, rows[name], group)
                due = due or found.outputs
                if found.outputs != due:
                    sys.exit(f"other ids: {name} at batch {size}")
                if number:  # the first round warms up
                    spent[name].append(found.per_token)
        return {name: np.array(times) for name, times in spent.items()}

    def best_of_others(self, spent: dict[str, np.ndarray]) -> np.ndarray:
        """In each round the time of the length that was best in the rounds of the other parity: the
        best of noisy figures, judged by those that chose it, looks better than it is."""
        found = np.empty(len(spent["0"]))
        for parity in (0, 1):
            others = {k: spent[str(k)][1 - parity :: 2].sum() for k in self.fixed}
            best = min(others, key=others.__getitem__)
            found[parity::2] = spent[str(best)][parity::2]
        return found

    def draw(
        self,
        spent: dict[int, dict[str, np.ndarray]],
        due: dict[int, dict[int, float]],
        costs: StepCosts,
        to: str,
    ) -> None:
        """Throughput over the draft's length, a line a size; dashed: predicted."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for size in self.sizes:
            found = [1 / spent[size][str(k)].mean() for k in self.fixed]
            (line,) = axes.plot(list(self.fixed), found, marker="o", label=f"batch {size}")
            axes.plot(
                list(due[size]),
                [each * 1e9 / costs.target_ns for each in due[size].values()],
                linestyle="--",
                color=line.get_color(),
            )
        axes.set_xlabel("draft tokens a step (0: vanilla)")
        axes.set_ylabel("tokens / s of decoding (dashed: predicted)")
        axes.legend()
        figure.savefig(to)


def ratio(one: np.ndarray, other: np.ndarray) -> str:
    """One sum over the other's, and a 95% interval by bootstrap over rounds."""
    drawn = np.random.default_rng(0).integers(0, len(one), (2000, len(one)))
    low, high = np.quantile(one[drawn].sum(1) / other[drawn].sum(1), (0.025, 0.975))
    return f"{one.sum() / other.sum():.2f} [{low:.2f}, {high:.2f}]"


class Full(NamedTuple):
    """Requests that were decoded together; all but the outputs until the first of them ended.

    per_token: seconds. stood, tested: draft tokens.
    """

    outputs: list[list[int]]
    per_token: float
    stood: int
    tested: int


def full(bench: Bench, method: object, requests: list[Request]) -> Full:
    """Decode requests together."""
    batch = Batch(bench.workspace, requests, Sampling())
    texts = [session.harness.text for session in batch.sessions]
    ended: object = None
    ns = tokens = stood = tested = 0
    for step in method.generate_batch(batch):  # type: ignore[attr-defined]
        if ended is None or ended is step.forwards:  # of one step all have the same
            ns = batch.meter.clock.now() - max(text.first_ns for text in texts)
            tokens = sum(text.position - 1 for text in texts)  # each one's first is prefill's
            stood += len(step.outcome.path)
            tested += step.outcome.tested
            if any(text.finish for text in texts):
                ended = step.forwards
    outputs = [list(session.output()) for session in batch.sessions]
    return Full(outputs, ns / tokens / 1e9, stood, tested)


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
