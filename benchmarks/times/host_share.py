"""How much of a decoding step is the host's: all that is done between the models' forwards.

    python benchmarks/times/host_share.py --nodes 16 --threads 2

Trees of so many nodes by every method that drafts them, on the embedded models, greedy. Where no
head ships with the target, or with --random-heads, one with random weights takes its place: it
makes the host do the same work, and is accepted less. On every prompt all methods run one after
another, in an order that rotates, with garbage collection off while the timer runs. A step's host
time is its time less its forwards'; steps whose tree is smaller, as at an output's end, are left
out. Needs a quiet machine; nothing here checks for one.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import gc
import json
import os
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from specbench_cli import registry
from specbench_cli.api import ArtifactSpec, Method, Session
from specbench_cli.engine.models.checkpoint import config_facts
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.models.heads import resolve_head
from specbench_cli.models.resolve import resolve
from specbench_cli.tasks import conversation, load_task, render, sample

WARM_UP_TOKENS = 16
WARM_UP_ROUNDS = 2


def contestants(nodes: int) -> dict[str, Method]:
    """Every method with trees of so many nodes, by what its row is called."""
    rows = {
        "eagle": {},
        "eagle2": {},
        "eagle3": {},
        "sps-tree": {"shape": "dynamic", "width": 4},
        "staged": {},
    }
    made = {name: registry.build(name, {"nodes": nodes, **rest}) for name, rest in rows.items()}
    if nodes % 4 == 0:
        widths = (nodes // 4, 1, 1, 1)
        made["sps-tree, static"] = registry.build("sps-tree", {"widths": widths})
    return made


@dataclass
class Score:
    """Times in ns of the steps whose trees had their full size."""

    steps: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    committed: int = 0
    all_steps: int = 0

    def run(self, method: Method, workspace: Workspace, request: Request, nodes: int) -> None:
        """Decode one prompt against the clock."""
        gc.collect()
        session = Session(workspace, request, Sampling())
        gc.disable()
        session.harness.begin()
        ends, steps = [], []
        for step in method.generate(session):
            ends.append(session.harness.text.last_ns)
            steps.append(step)
        gc.enable()
        session.harness.meter.resolve()
        begins = [session.harness.text.first_ns, *ends]
        for begin, end, step in zip(begins, ends, steps, strict=False):
            self.all_steps += 1
            self.committed += len(step.outcome.committed)
            if step.draft is not None and step.draft.nodes == nodes:
                self.steps.append(end - begin)
                self.forwards.append(sum(each.t1_ns - each.t0_ns for each in step.forwards))

    def facts(self) -> dict[str, Any]:
        """Medians over steps, in us; the share is that of all these steps together."""
        host = [step - busy for step, busy in zip(self.steps, self.forwards, strict=True)]
        return {
            "steps": len(host),
            "step_us": median(self.steps) / 1e3,
            "forwards_us": median(self.forwards) / 1e3,
            "host_us": median(host) / 1e3,
            "host_share": sum(host) / sum(self.steps),
            "median_share": median(
                part / step for part, step in zip(host, self.steps, strict=True)
            ),
            "mat": self.committed / self.all_steps,
        }


def load(target: str, random_heads: bool) -> tuple[Workspace, Any, frozenset[int], set[str]]:
    """The models as `specbench run` loads them, the tokenizer, the ids that end an output, and the
    kinds of heads that are random."""
    checkpoint = resolve(target)
    names = {"target": target, "draft": checkpoint.draft or target}
    cpu = torch.device("cpu")
    decoders = {
        role: load_decoder(resolve(name).path, name=role, device=cpu, dtype=torch.float32)
        for role, name in names.items()
    }
    at_random: set[str] = set()

    def make(wanted: ArtifactSpec) -> Any:
        kind = wanted.kind
        if random_heads or kind.kind not in checkpoint.shipped_heads:
            at_random.add(kind.kind)
            return kind.random(decoders)
        files = resolve_head(wanted.source, kind.kind, checkpoint, inside=kind.inside)
        return kind.load(files.path, decoders)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    workspace = Workspace(decoders, 0, tokenizer=tokenizer, load_artifact=make)
    return workspace, tokenizer, frozenset(config_facts(checkpoint.path).eos), at_random


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everybody on every prompt."""
    workspace, tokenizer, eos, at_random = load(args.target, args.random_heads)
    methods = contestants(args.nodes)
    for wanted in (each for method in methods.values() for each in method.artifacts()):
        workspace.artifact(wanted)
    questions = sample(load_task("mini").questions, args.limit, seed=0)
    prompts = {
        question.prompt_id: tuple(
            render(tokenizer, conversation(question.turns[:1], ()), raw=False)
        )
        for question in questions
    }
    workspace.reserve(max(map(len, prompts.values())) + args.max_new_tokens)
    warm_up = Request("warm-up", 1, next(iter(prompts.values())), StopRule(eos, WARM_UP_TOKENS))
    for method in [*methods.values()] * WARM_UP_ROUNDS:
        Score().run(method, workspace, warm_up, args.nodes)
    scores = {name: Score() for name in methods}
    order = list(methods)
    stop = StopRule(eos, args.max_new_tokens)
    for turn, (prompt_id, ids) in enumerate(prompts.items()):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            request = Request(prompt_id, 1, ids, stop)
            scores[name].run(methods[name], workspace, request, args.nodes)
    rows = {name: score.facts() for name, score in scores.items() if score.steps}
    return {"random_heads": sorted(at_random), "rows": rows}


def show(found: dict[str, Any]) -> None:
    """A table."""
    if found["random_heads"]:
        print(f"random weights: {', '.join(found['random_heads'])}\n")
    print(
        f"{'':18}{'steps':>7}{'step us':>10}{'forwards us':>13}{'host us':>9}{'host':>7}{'MAT':>7}"
    )
    for name, row in found["rows"].items():
        print(
            f"{name:18}{row['steps']:7}{row['step_us']:10.0f}{row['forwards_us']:13.0f}"
            f"{row['host_us']:9.0f}{row['host_share']:7.1%}{row['mat']:7.2f}"
        )


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--limit", type=int, default=12, help="prompts of mini")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--random-heads", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = measure(args)
    facts = {"torch": torch.__version__, "load_average": os.getloadavg()[0]} | vars(args)
    if args.json:
        print(json.dumps(facts | found, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
        show(found)


if __name__ == "__main__":
    main()
