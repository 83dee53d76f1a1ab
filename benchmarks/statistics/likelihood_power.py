"""Compute how many tokens the likelihood test needs to detect a draft with a wrong q.

    python benchmarks/statistics/likelihood_power.py [prompts]

The script prints the table in docs/explanations/audit.md. It simulates decoding with the embedded
pair token by token, with drafts of five tokens. So the distribution of each token is known, both
with the fault and under the target. From these distributions it computes the mean gain per token of
the test martingale (`stats.martingale`), without sampling. The test reports a method as broken when
the best of its martingales (tilts) exceeds a threshold.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from specbench_cli.config.run import RunConfig
from specbench_cli.engine.models.decoder import Decoder, State
from specbench_cli.engine.types import Tokens
from specbench_cli.judge.verdict import MIN_LOG_PROB
from specbench_cli.measure.bench import Bench
from specbench_cli.plan.plan import make_plan
from specbench_cli.stats.martingale import LEVEL, TILTS

LEVELS, TOKENS = 5, 96
Draw = Callable[[Tensor, float], Tensor]
"""Function that returns draft probabilities [V] from the draft's logits and a temperature."""


def top_ten_probs(row: Tensor, temperature: float) -> Tensor:
    """Return the probabilities of the ten likeliest tokens; all others are 0."""
    return row.masked_fill(row < row.topk(10).values[-1], -math.inf).div(temperature).softmax(-1)


FAULTS: dict[str, Draw] = {
    "nothing wrong": lambda row, t: (row / t).softmax(-1),
    "drawn from its top 10, q whole": top_ten_probs,
    "draft at half the temperature": lambda row, t: (row / t / 0.5).softmax(-1),
    "draft at 0.9 of the temperature": lambda row, t: (row / t / 0.9).softmax(-1),
}


def expected_gains(p: Tensor, faulty: Tensor) -> Tensor:
    """Return the mean gain of each tilt's log martingale, then the mean deviation and the variance.

    Args:
        p: probabilities [V] of the target.
        faulty: probabilities [V] that the token is drawn from. The variance is under p.
    """
    steps = p.log().clamp_min(MIN_LOG_PROB)
    steps = steps - (p * steps).sum()
    drift = (faulty * steps).sum()
    found = [t * drift - (p * (t * steps).exp()).sum().log() for t in TILTS]
    return torch.stack([*found, drift, (p * steps * steps).sum()])


def sum_gains(models: tuple[Decoder, Decoder], prompts: list[list[int]], t: float, draw: Draw):
    """Return the sums of `expected_gains`, the number of tokens, and how many were verified."""
    generator = torch.Generator().manual_seed(3)
    total, n, tested = torch.zeros(len(TILTS) + 2, dtype=torch.float64), 0, 0
    for prompt in prompts:
        states: list[State] = [model.new_state(len(prompt) + TOKENS) for model in models]
        ids, level = prompt, 0
        for _ in range(TOKENS):
            rows = [
                model.forward(Tokens(torch.tensor([ids])), state).rows[-1].double()
                for model, state in zip(models, states, strict=True)
            ]
            p, q = ((row / t).softmax(-1) for row in rows)
            if level == LEVELS:  # the bonus
                token, level, faulty = torch.multinomial(p, 1, generator=generator), 0, p
            else:
                draft_probs = draw(rows[1], t)
                accepted_probs = draft_probs * (p / q).clamp_max(1.0)
                residual = (p - q).clamp_min(0.0)
                rejection_rate = 1.0 - accepted_probs.sum()
                faulty = (
                    accepted_probs + rejection_rate * residual / residual.sum()
                    if rejection_rate > 1e-12
                    else accepted_probs
                )
                u = torch.rand((), generator=generator, dtype=torch.float64)
                accepted, tested = bool(u < accepted_probs.sum()), tested + 1
                token = torch.multinomial(
                    accepted_probs if accepted else residual, 1, generator=generator
                )
                level = level + 1 if accepted else 0
            total, n, ids = total + expected_gains(p, faulty), n + 1, token.tolist()
    return total, n, tested


@torch.inference_mode()
def main() -> None:
    """Print the table as Markdown."""
    options = {"methods": [{"name": "vanilla"}, {"name": "sps"}], "threads": 1, "allow_noise": True}
    plan = make_plan(RunConfig.model_validate(options | {"max_new_tokens": TOKENS}))
    bench = Bench(plan)
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    prompts = [list(bench.encode_prompt(each)) for each in plan.questions[:limit]]
    models = tuple(bench.workspace.decoders[name] for name in ("target", "draft"))
    write_line(
        "| temperature | fault | drift a token | standard deviation | tested | tokens it takes |"
    )
    write_line("| --- | --- | --- | --- | --- | --- |")
    for t in (0.8, 1.0, 2.0):
        for name, draw in FAULTS.items():
            total, n, tested = sum_gains(models, prompts, t, draw)
            *gained, drift, variance = (total / n).tolist()
            required_gain = math.log(len(TILTS)) - math.log(LEVEL)
            tokens = f"{required_gain / max(gained):,.0f}" if max(gained) > 1e-9 else "never"
            write_line(
                f"| {t:g} | {name} | {drift:+.4f} | {variance**0.5:.2f} | {tested / n:.0%}"
                f" | {tokens} |"
            )


def write_line(line: str) -> None:
    """Print a line and flush."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
