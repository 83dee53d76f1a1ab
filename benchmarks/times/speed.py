"""Compare specbench's engine with transformers on the same models: tokens/s, ids and steps.

    SPECBENCH_DATA=DIR python benchmarks/times/speed.py

All methods decode each prompt, in an order that rotates from prompt to prompt, with garbage
collection off while the timer runs. The script needs a quiet machine and does not check for one.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import torch
from transformers import AutoTokenizer

from methods.hf import HfAssisted, HfAssistedParams, HfPromptLookup, HfPromptLookupParams, HfVanilla
from methods.pld import Pld, PldParams
from methods.sps import Sps, SpsParams
from methods.vanilla import Vanilla
from specbench_cli.api import Method, Session, Step
from specbench_cli.engine.models.checkpoint import read_checkpoint_facts
from specbench_cli.engine.models.load import get_module, load_decoder
from specbench_cli.engine.request import Request
from specbench_cli.engine.sequence import StopRule
from specbench_cli.engine.verify.sampling import Sampling
from specbench_cli.engine.workspace import Workspace
from specbench_cli.models.resolve import resolve
from specbench_cli.tasks import build_messages, load_task, render_prompt, sample_questions

PAIRS = (
    (Vanilla(), HfVanilla()),
    (Sps(SpsParams(length=5)), HfAssisted(HfAssistedParams(length=5))),
    (
        Pld(PldParams(rule="transformers", ngram=2, length=10)),
        HfPromptLookup(HfPromptLookupParams(ngram=2, length=10)),
    ),
)
"""Pairs of a specbench method and the same method of transformers, with the same parameters."""

WARM_UP_TOKENS = 16
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class StepTrail:
    """Steps of one output.

    Attributes:
        replaced: positions of the tokens that replace a rejected draft token.
        steps: for each step, the position of its first token and its number of accepted tokens.
    """

    replaced: frozenset[int]
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def from_steps(cls, session: Session, steps: Sequence[Step]) -> Self:
        """Return the trail of a finished output."""
        position, trail = 1, []
        for step in steps:
            trail.append((position, len(step.outcome.path)))
            position += len(step.outcome.committed)
        replaced = (
            at for at, origin in enumerate(session.harness.text.origin) if origin == "recovered"
        )
        return cls(frozenset(replaced), tuple(trail))


def steps_agree(a: StepTrail, b: StepTrail) -> bool | None:
    """Return True if step boundaries and accepted counts agree after the first common replacement.

    None if no position is replaced in both.
    """
    common = a.replaced & b.replaced
    if not common:
        return None
    first = min(common)
    after_a, after_b = ([step for step in trail.steps if step[0] > first] for trail in (a, b))
    return after_a == after_b


@dataclass
class MethodTotals:
    """Outputs and time of a method so far."""

    outputs: list[list[int]] = field(default_factory=list)
    trails: list[StepTrail] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Number of decoded tokens."""
        return sum(len(ids) for ids in self.outputs)

    @property
    def rate(self) -> float:
        """Tokens/s, including prefill."""
        return self.tokens / self.seconds

    @property
    def mat(self) -> float:
        """Mean number of committed tokens per step."""
        steps = sum(len(trail.steps) for trail in self.trails)
        return (self.tokens - len(self.outputs)) / max(steps, 1)

    def run(self, method: Method, workspace: Workspace, request: Request) -> None:
        """Decode one prompt and add its output and time."""
        gc.collect()
        session = Session(workspace, request, Sampling())
        gc.disable()
        session.harness.begin()
        steps = list(method.generate(session))
        gc.enable()
        self.seconds += (session.harness.text.last_ns - session.harness.text.started_ns) / 1e9
        self.outputs.append(list(session.output()))
        self.trails.append(StepTrail.from_steps(session, steps))


def load_models(target: str, draft: str | None) -> tuple[Workspace, Any, frozenset[int]]:
    """Load the models as `specbench run` does; return workspace, tokenizer and EOS ids."""
    checkpoint = resolve(target)
    names = {"target": target, "draft": draft or checkpoint.draft or target}
    decoders = {
        role: load_decoder(
            resolve(name).path, name=role, device=torch.device("cpu"), dtype=torch.float32
        )
        for role, name in names.items()
    }
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    modules = cache(lambda role: get_module(decoders[role]))
    workspace = Workspace(decoders, 0, modules, tokenizer)
    return workspace, tokenizer, frozenset(read_checkpoint_facts(checkpoint.path).eos)


def measure(args: argparse.Namespace) -> dict[str, MethodTotals]:
    """Run every method on every prompt."""
    workspace, tokenizer, eos = load_models(args.target, args.draft)
    questions = sample_questions(load_task(args.task).questions, args.limit, seed=0)
    prompts = {
        question.prompt_id: tuple(
            render_prompt(tokenizer, build_messages(question.turns, ()), raw=False)
        )
        for question in questions
    }
    workspace.reserve(max(map(len, prompts.values())) + args.max_new_tokens)
    methods = [method for pair in PAIRS for method in pair]
    warm_up = Request("warm-up", 1, next(iter(prompts.values())), StopRule(eos, WARM_UP_TOKENS))
    for method in methods * WARM_UP_ROUNDS:
        MethodTotals().run(method, workspace, warm_up)
    totals = {method.name: MethodTotals() for method in methods}
    stop = StopRule(eos, args.max_new_tokens)
    for turn, (prompt_id, ids) in enumerate(prompts.items()):
        first = turn % len(methods)
        for method in methods[first:] + methods[:first]:
            totals[method.name].run(method, workspace, Request(prompt_id, 1, ids, stop))
    return totals


def summarise(totals: dict[str, MethodTotals]) -> dict[str, Any]:
    """Return the results of all methods as a JSON object."""
    reference = totals["vanilla"].outputs
    agreement = [
        steps_agree(*trails)
        for trails in zip(totals["sps"].trails, totals["hf:assisted"].trails, strict=True)
    ]
    return {
        "prompts": len(reference),
        "contestants": {
            name: {
                "tokens_per_second": total.rate,
                "mat": total.mat,
                "tokens": total.tokens,
                "equal_outputs": sum(map(list.__eq__, total.outputs, reference)),
            }
            for name, total in totals.items()
        },
        "ratios": {
            f"{ours.name} / {peer.name}": totals[ours.name].rate / totals[peer.name].rate
            for ours, peer in PAIRS
        },
        "same_steps": {
            "prompts_with_a_token_both_replaced": sum(a is not None for a in agreement),
            "of_these_equal_from_there_on": sum(a is True for a in agreement),
        },
    }


def print_table(found: dict[str, Any]) -> None:
    """Print a table of the results."""
    print(f"{'':18}{'tok/s':>8}{'MAT':>7}{'ids as vanilla':>17}")
    for name, row in found["contestants"].items():
        equal = f"{row['equal_outputs']} of {found['prompts']}"
        print(f"{name:18}{row['tokens_per_second']:8.0f}{row['mat']:7.2f}{equal:>17}")
    print()
    for name, ratio in found["ratios"].items():
        print(f"{name:28}{ratio:6.2f}")
    met, equal = found["same_steps"].values()
    print(
        f"\nsps and hf:assisted: after the first token that both replaced, step boundaries and"
        f" accepted counts\nare equal in {equal} of the {met} prompts that have one"
    )


def main() -> None:
    """Parse the arguments, measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", help="default: the target's own")
    parser.add_argument(
        "--task",
        default="gsm8k" if os.environ.get("SPECBENCH_DATA") else "mini",
        help="default: gsm8k if SPECBENCH_DATA is set, else mini",
    )
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = summarise(measure(args))
    labels = {
        role: resolve(name).label for role in ("target", "draft") if (name := getattr(args, role))
    }
    facts = {"torch": torch.__version__, "load_average": os.getloadavg()[0]} | vars(args) | labels
    if args.json:
        print(json.dumps(facts | found, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
        print_table(found)


if __name__ == "__main__":
    main()
