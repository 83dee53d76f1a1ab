"""Measure the overhead of a parallel method's step over the slower of its two workers.

    python benchmarks/times/parallel_overhead.py --window 5 --transport process

PEARL runs on the embedded models and prompts of `mini`, the target on one half of the CPU cores and
the draft on the other. All times come from the trace: a step from commit to commit, the forwards of
each worker, and the messages between workers. The overhead is the time of a step minus the longer
of the two workers' forwards. The other columns show where it is spent, and overlap. The script
needs a quiet machine and does not check for one.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles

import torch
from transformers import AutoTokenizer

from methods.pearl import Pearl, PearlParams
from specbench_cli.engine.models.checkpoint import read_checkpoint_facts
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Forward, Step
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workers.core_placement import split_cores
from specbench_cli.engine.workers.process import ProcessTransport
from specbench_cli.engine.workers.thread import ThreadTransport
from specbench_cli.engine.workers.transport import Transport
from specbench_cli.engine.workspace import Workspace
from specbench_cli.models.resolve import resolve
from specbench_cli.tasks import build_messages, load_task, render_prompt, sample_questions

WARM_UPS = 3
COLUMNS = ("step", "target", "draft", "overhead", "order", "drafter", "answer", "target host")


@dataclass
class StepTimeline:
    """Times of steps with a full draft window, in ns.

    Columns: the step; the target's forwards; the draft's forwards; the overhead; the transfer of
    the draft order; the drafter's time between order and answer without its forwards; the transfer
    of the answer; the target's side from the answer to the next order.
    """

    rows: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self, session: Session, steps: Sequence[Step], ends: Sequence[int], window: int
    ) -> None:
        """Add the steps of an output whose draft windows have their full size."""
        orders, answers = session.harness.meter.messages[::2], session.harness.meter.messages[1::2]
        pairs = list(zip(orders, answers, strict=True))
        begins = [session.harness.text.first_ns, *ends]
        for number, step in enumerate(steps[:-1]):
            order, answer = pairs[number]
            drafts = [f for f in step.forwards if f.worker == 1 and f.role == "draft"]
            if len(drafts) != window or number == 0:
                continue
            target = sum_forward_ns([f for f in step.forwards if f.worker == 0])
            draft, wall = sum_forward_ns(drafts), ends[number] - begins[number]
            self.rows.append(
                (
                    wall,
                    target,
                    draft,
                    wall - max(target, draft),
                    order.t1_ns - order.t0_ns,
                    answer.t0_ns - order.t1_ns - draft,
                    answer.t1_ns - answer.t0_ns,
                    pairs[number + 1][0].t0_ns - answer.t1_ns,
                )
            )

    def summarise(self) -> dict[str, dict[str, float]]:
        """Return the median and quartiles of each column in us."""
        found = {}
        for name, column in zip(COLUMNS, zip(*self.rows, strict=True), strict=True):
            low, _, high = quantiles(column, n=4)
            found[name] = {
                "median_us": median(column) / 1e3,
                "quartile_1_us": low / 1e3,
                "quartile_3_us": high / 1e3,
            }
        return found


def sum_forward_ns(forwards: Sequence[Forward]) -> int:
    """Return the total time of forwards in ns."""
    return sum(f.t1_ns - f.t0_ns for f in forwards)


def measure(args: argparse.Namespace) -> StepTimeline:
    """Decode every prompt and return the times of its steps."""
    checkpoint = resolve(args.target)
    assert checkpoint.draft is not None
    device, draft_device = torch.device(args.device), torch.device(args.draft_device or args.device)
    dtype = getattr(torch, args.dtype)
    path = resolve(checkpoint.draft).path
    recipe = partial(load_decoder, path, name="draft", device=draft_device, dtype=dtype)
    decoders = {
        "target": load_decoder(checkpoint.path, name="target", device=device, dtype=dtype),
        "draft": recipe(),
    }
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    eos = frozenset(read_checkpoint_facts(checkpoint.path).eos)
    transport: Transport = (
        ThreadTransport()
        if args.transport == "thread"
        else ProcessTransport(*(split_cores() if device.type == "cpu" else ()))
    )
    workspace = Workspace(decoders, 0, decoder_factories={"draft": recipe}, transport=transport)
    sampling = Sampling(args.rule, 0.0 if args.rule == "greedy" else 0.8)
    texts = [
        tuple(render_prompt(tokenizer, build_messages(question.turns[:1], ()), raw=False))
        for question in sample_questions(load_task("mini").questions, args.limit, seed=0)
    ]
    workspace.reserve(max(map(len, texts)) + args.max_new_tokens)
    timeline = StepTimeline()
    try:
        with transport.pin_target(), torch.inference_mode():
            for number, ids in enumerate(texts[:WARM_UPS] + texts):
                request = Request(f"mini/{number}", 1, ids, StopRule(eos, args.max_new_tokens))
                session = Session(workspace, request, sampling)
                gc.collect()
                gc.disable()
                session.harness.begin()
                steps, ends = [], []
                for step in Pearl(PearlParams(window=args.window)).generate(session):
                    ends.append(session.harness.text.last_ns)
                    steps.append(step)
                gc.enable()
                session.harness.meter.resolve()
                if number >= WARM_UPS:
                    timeline.add(session, steps, ends, args.window)
    finally:
        workspace.close()
    return timeline


def main() -> None:
    """Parse the arguments, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--limit", type=int, default=12, help="number of prompts of mini")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--transport", choices=("process", "thread"), default="process")
    parser.add_argument("--rule", choices=("greedy", "rejection", "coupled"), default="greedy")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draft-device", help="default: the target's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    timeline = measure(args)
    facts = {
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "steps": len(timeline.rows),
        **vars(args),
    }
    if args.json:
        print(json.dumps(facts | {"columns": timeline.summarise()}, indent=1))
        return
    print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
    print(f"{'us':12}{'median':>9}{'quartiles':>16}")
    for name, row in timeline.summarise().items():
        low, mid, high = (row[f"{key}_us"] for key in ("quartile_1", "median", "quartile_3"))
        print(f"{name:12}{mid:9.0f}{low:8.0f}{high:8.0f}")


if __name__ == "__main__":
    main()
