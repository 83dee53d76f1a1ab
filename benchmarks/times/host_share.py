"""Measure the host time of a decoding step: all work between the models' forwards.

    python benchmarks/times/host_share.py --nodes 16 --threads 2

Every method that drafts trees runs with trees of --nodes nodes on the embedded models, greedy. If
the target has no shipped head, or with --random-heads, a head with random weights is used: the host
does the same work, and fewer tokens are accepted. All methods decode each prompt, in a rotating
order, with garbage collection off while the timer runs. Host time is the time of a step minus its
forwards. Steps with a smaller tree, as at the end of an output, are left out. The script needs a
quiet machine and does not check for one.
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
from specbench_cli.engine.models.checkpoint import read_checkpoint_facts
from specbench_cli.engine.models.load import load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.models.heads import resolve_head
from specbench_cli.models.resolve import resolve
from specbench_cli.tasks import build_messages, load_task, render_prompt, sample_questions

WARM_UP_TOKENS = 16
WARM_UP_ROUNDS = 2


def build_methods(nodes: int) -> dict[str, Method]:
    """Return the methods with trees of a number of nodes, by label."""
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
class HostShareTimes:
    """Times in ns of the steps of a method whose trees have their full size."""

    steps: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    committed: int = 0
    all_steps: int = 0

    def run(self, method: Method, workspace: Workspace, request: Request, nodes: int) -> None:
        """Decode one prompt and add its times."""
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

    def summarise(self) -> dict[str, Any]:
        """Return medians over steps in us, and the host share of all steps."""
        host = [step - forward for step, forward in zip(self.steps, self.forwards, strict=True)]
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


def load_models(target: str, random_heads: bool) -> tuple[Workspace, Any, frozenset[int], set[str]]:
    """Load the models as `specbench run` does.

    Returns:
        (workspace, tokenizer, EOS ids, kinds of heads with random weights).
    """
    checkpoint = resolve(target)
    names = {"target": target, "draft": checkpoint.draft or target}
    cpu = torch.device("cpu")
    decoders = {
        role: load_decoder(resolve(name).path, name=role, device=cpu, dtype=torch.float32)
        for role, name in names.items()
    }
    random_kinds: set[str] = set()

    def make(artifact: ArtifactSpec) -> Any:
        kind = artifact.kind
        if random_heads or kind.kind not in checkpoint.shipped_heads:
            random_kinds.add(kind.kind)
            return kind.random(decoders)
        files = resolve_head(artifact.source, kind.kind, checkpoint, in_target=kind.inside)
        return kind.load(files.path, decoders)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    workspace = Workspace(decoders, 0, tokenizer=tokenizer, load_artifact=make)
    return workspace, tokenizer, frozenset(read_checkpoint_facts(checkpoint.path).eos), random_kinds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every method on every prompt."""
    workspace, tokenizer, eos, random_kinds = load_models(args.target, args.random_heads)
    methods = build_methods(args.nodes)
    for artifact in (each for method in methods.values() for each in method.artifacts()):
        workspace.artifact(artifact)
    questions = sample_questions(load_task("mini").questions, args.limit, seed=0)
    prompts = {
        question.prompt_id: tuple(
            render_prompt(tokenizer, build_messages(question.turns[:1], ()), raw=False)
        )
        for question in questions
    }
    workspace.reserve(max(map(len, prompts.values())) + args.max_new_tokens)
    warm_up = Request("warm-up", 1, next(iter(prompts.values())), StopRule(eos, WARM_UP_TOKENS))
    for method in [*methods.values()] * WARM_UP_ROUNDS:
        HostShareTimes().run(method, workspace, warm_up, args.nodes)
    times_by_method = {name: HostShareTimes() for name in methods}
    order = list(methods)
    stop = StopRule(eos, args.max_new_tokens)
    for turn, (prompt_id, ids) in enumerate(prompts.items()):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            request = Request(prompt_id, 1, ids, stop)
            times_by_method[name].run(methods[name], workspace, request, args.nodes)
    rows = {name: times.summarise() for name, times in times_by_method.items() if times.steps}
    return {"random_heads": sorted(random_kinds), "rows": rows}


def print_table(found: dict[str, Any]) -> None:
    """Print a table of the results."""
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
    """Parse the arguments, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--limit", type=int, default=12, help="number of prompts of mini")
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
        print_table(found)


if __name__ == "__main__":
    main()
