"""Measure throughput at several batch sizes, and check that the ids stay the same.

    python benchmarks/times/batches.py [METHOD,...] [--questions 16] \
        [--tokens 96] [--rounds 5]

Embedded pair, questions of `mini`, greedy. Outputs end at the budget (no EOS), so that every batch
stays full. Sizes alternate within a round. The script prints medians over rounds of the total time,
and of the decoding time, which excludes prefill.

    python benchmarks/times/batches.py --ids [METHOD,...] [--questions 96] [--tokens 96]

counts instead for how many prompts the ids equal those of vanilla at batch 1, at batch 1 to 16,
greedy and coupled (T 0.8). When an output ends at its EOS, a new prompt joins the batch. Its
prefill runs in chunks of at most --chunk tokens.

    python benchmarks/times/batches.py --best METHOD [--target T --draft D] [--to F.svg]

finds the best draft length K*(batch) of a method that drafts chains, at batch 1 to 16. It measures
decoding tokens/s for every fixed length, including 0 (vanilla), and for `synergy` and `smartspec`,
until the first sequence of a batch ends. In a round, all methods decode one full batch of prompts.
The table also shows predictions from measured step costs and from the acceptance rate of a separate
run. Ratios have 95% intervals by bootstrap over rounds.
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
    """Measure or count, and print a line per method and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="?", default="vanilla,sps,pld,eagle2")
    parser.add_argument("--ids", action="store_true", help="count equal ids instead of measuring")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--longest", type=int, default=512, help="maximum number of prompt tokens")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--chunk", type=int, default=64, help="maximum prefill tokens per step")
    parser.add_argument(
        "--best", metavar="METHOD", help="find the best draft length of this method"
    )
    parser.add_argument("--lengths", type=int, default=6, help="maximum draft length of --best")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=ID_SIZES, help="batch sizes of --best"
    )
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft")
    parser.add_argument(
        "--to", help="file of the figure of --best; a .json file next to it gets the times"
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
        ids = bench.encode_prompt(question)
        if len(ids) > args.longest:
            continue
        bench.workspace.reserve(len(ids) + args.tokens)
        stop = bench.stop_rule(args.tokens) if args.ids else StopRule(frozenset(), args.tokens)
        requests.append(Request(question.prompt_id, 1, tuple(ids), stop))
    if not args.ids:
        del requests[len(requests) // max(SIZES) * max(SIZES) :]
    lengths = [len(request.ids) for request in requests]
    sys.stdout.write(f"{len(requests)} prompts of {min(lengths)} to {max(lengths)} tokens\n")
    if args.ids:
        for method_run in plan.method_runs:
            count_equal_ids(bench, method_run, requests, args.chunk)
        return
    if args.best:
        DraftLengthSearch(bench, args.best, args.lengths, requests, args.sizes).run(
            args.rounds, args.to
        )
        return
    for method_run in plan.method_runs:
        measure_throughput(bench, method_run, requests, args.rounds)


def count_equal_ids(
    bench: Bench, method_run: MethodRun, requests: list[Request], chunk: int
) -> None:
    """Print the number of requests for which a method's ids equal those of vanilla at batch 1."""
    for sampling in RULES:
        due = [vanilla_ids(bench, request, sampling) for request in requests]
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
def vanilla_ids(bench: Bench, request: Request, sampling: Sampling) -> list[int]:
    """Return the ids of a request that vanilla decodes at batch 1."""
    session = Session(bench.workspace, request, sampling)
    for _ in registry.load("vanilla")().generate(session):
        pass
    return list(session.output())


def measure_throughput(
    bench: Bench, method_run: MethodRun, requests: list[Request], rounds: int
) -> None:
    """Print the throughput of a method at every batch size."""
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    decoding: dict[int, list[float]] = {size: [] for size in SIZES}
    outputs: dict[int, list[list[int]]] = {}
    for number in range(rounds + 1):
        for size in SIZES:
            gc.collect()
            start = time.perf_counter()
            outputs[size], spent = decode(bench, method_run.method, requests, size)
            if number:  # the first round warms up
                seconds[size].append(time.perf_counter() - start)
                decoding[size].append(spent)
    tokens = sum(map(len, outputs[1]))
    for size in SIZES:
        ratio, decode_ratio = (
            median(a / b for a, b in zip(each[1], each[size], strict=True))
            for each in (seconds, decoding)
        )
        same = "ids equal" if outputs[size] == outputs[1] else "OTHER IDS"
        rate = tokens / median(seconds[size])
        sys.stdout.write(
            f"{method_run.label:10} batch {size}  {rate:6.0f} tokens/s  {ratio:5.2f}x "
            f" decoding {decode_ratio:5.2f}x  {same}\n"
        )


class DraftLengthSearch:
    """Search for the best draft length of a method, fixed or by a policy, at several batch
    sizes."""

    def __init__(
        self, bench: Bench, name: str, longest: int, requests: list[Request], sizes: list[int]
    ) -> None:
        self.bench, self.requests, self.sizes = bench, requests, sizes
        kind, vanilla = registry.load(name), registry.load("vanilla")()
        self.longest = longest
        self.build_method = lambda **own: kind(kind.Params(**own))
        self.fixed = {0: vanilla} | {k: self.build_method(length=k) for k in range(1, longest + 1)}

    def acceptance_rate(self, size: int) -> float:
        """Return the acceptance rate at a batch size, from a separate run over all requests.

        Steps after the first end of a sequence do not count, because drafts are worse there.
        """
        groups = range(0, len(self.requests) - size + 1, size)
        found = [
            decode_full_batch(self.bench, self.fixed[3], self.requests[at : at + size])
            for at in groups
        ]
        return sum(each.n_accepted for each in found) / sum(each.tested for each in found)

    def measure_costs(self) -> StepCosts:
        """Return the costs of forwards, measured as in a run with a policy."""
        return measure_step_costs(
            self.bench.workspace,
            MeasurementWindows(NoiseMeter(), allow_noise=True),
            self.bench.context,
            most=max(self.sizes),
        )

    def run(self, rounds: int, to: str | None) -> None:
        """Predict and measure the best draft lengths, and print the table."""
        costs = self.measure_costs()
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
            acceptance_rate = self.acceptance_rate(size)
            own = {"acceptance": acceptance_rate, "max": self.longest}
            rows = {
                **{str(k): method for k, method in self.fixed.items()},
                **{
                    rule: self.build_method(length=rule, **own) for rule in ("synergy", "smartspec")
                },
            }
            spent = found[size] = self.measure_rounds(size, rows, rounds)
            each = {name: sum(times) for name, times in spent.items()}
            best = str(min(self.fixed, key=lambda k: each[str(k)]))
            predicted = str(best_length(acceptance_rate, size, self.longest, target, draft))
            top = self.cross_validated_best(spent)
            ratios = [
                format_ratio(top, spent[name]) for name in (predicted, "synergy", "smartspec")
            ]
            ratios.append(format_ratio(spent["0"], spent["smartspec"]))
            rates = [f"{1 / np.mean(times):.0f}" for times in spent.values()]
            line = [str(size), f"{acceptance_rate:.2f}", *rates, best, predicted, *ratios]
            sys.stdout.write(f"| {' | '.join(line)} |\n")
            sys.stdout.flush()
            due[size] = {
                k: expected_tokens(acceptance_rate, k)
                * size
                / (target(size, size * (k + 1)) + k * draft(size))
                for k in self.fixed
            }
        if to:
            self.draw_figure(found, due, costs, to)
            data = {
                size: {name: times.tolist() for name, times in spent.items()}
                for size, spent in found.items()
            }
            Path(to).with_suffix(".json").write_text(json.dumps(data))

    def measure_rounds(
        self, size: int, rows: dict[str, object], rounds: int
    ) -> dict[str, np.ndarray]:
        """Return the decoding seconds per token of every method, by round.

        All methods decode the same batch of requests in a round.
        """
        spent: dict[str, list[float]] = {name: [] for name in rows}
        for number in range(rounds + 1):
            first = number * size % len(self.requests)
            group, due = self.requests[first : first + size], None
            for name in rows if number % 2 else reversed(rows):
                gc.collect()
                found = decode_full_batch(self.bench, rows[name], group)
                due = due or found.outputs
                if found.outputs != due:
                    sys.exit(f"other ids: {name} at batch {size}")
                if number:  # the first round warms up
                    spent[name].append(found.per_token)
        return {name: np.array(times) for name, times in spent.items()}

    def cross_validated_best(self, spent: dict[str, np.ndarray]) -> np.ndarray:
        """Return for each round the time of the length that was best in the other half of the
        rounds.

        Even and odd rounds select for each other. Selecting and judging by the same noisy times
        would make the best length look better than it is.
        """
        found = np.empty(len(spent["0"]))
        for parity in (0, 1):
            others = {k: spent[str(k)][1 - parity :: 2].sum() for k in self.fixed}
            best = min(others, key=others.__getitem__)
            found[parity::2] = spent[str(best)][parity::2]
        return found

    def draw_figure(
        self,
        spent: dict[int, dict[str, np.ndarray]],
        due: dict[int, dict[int, float]],
        costs: StepCosts,
        to: str,
    ) -> None:
        """Draw throughput by draft length, a line per batch size; dashed lines are predictions."""
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


def format_ratio(one: np.ndarray, other: np.ndarray) -> str:
    """Return the ratio of two sums, with a 95% interval by bootstrap over rounds."""
    drawn = np.random.default_rng(0).integers(0, len(one), (2000, len(one)))
    low, high = np.quantile(one[drawn].sum(1) / other[drawn].sum(1), (0.025, 0.975))
    return f"{one.sum() / other.sum():.2f} [{low:.2f}, {high:.2f}]"


class FullBatchDecoding(NamedTuple):
    """Result of decoding a full batch. All fields but `outputs` end with the first ended sequence.

    Attributes:
        per_token: seconds per token.
        n_accepted, tested: numbers of draft tokens.
    """

    outputs: list[list[int]]
    per_token: float
    n_accepted: int
    tested: int


def decode_full_batch(bench: Bench, method: object, requests: list[Request]) -> FullBatchDecoding:
    """Decode requests in one batch."""
    batch = Batch(bench.workspace, requests, Sampling())
    texts = [session.harness.text for session in batch.sessions]
    ended: object = None
    ns = tokens = n_accepted = tested = 0
    for step in method.generate_batch(batch):  # type: ignore[attr-defined]
        if ended is None or ended is step.forwards:  # the sequences of a step share its forwards
            ns = batch.meter.clock.now_ns() - max(text.first_ns for text in texts)
            tokens = sum(
                text.position - 1 for text in texts
            )  # the first token of each sequence belongs to prefill
            n_accepted += len(step.outcome.path)
            tested += step.outcome.tested
            if any(text.finish for text in texts):
                ended = step.forwards
    outputs = [list(session.output()) for session in batch.sessions]
    return FullBatchDecoding(outputs, ns / tokens / 1e9, n_accepted, tested)


def decode(
    bench: Bench, method: object, requests: list[Request], size: int
) -> tuple[list[list[int]], float]:
    """Return the outputs of all requests in batches of a size, and the seconds after prefill."""
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
