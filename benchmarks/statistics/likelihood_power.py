"""Number of tokens after which the likelihood of outputs shows a draft that was drawn from another
distribution than it reports, for docs/explanations/audit.md.

python benchmarks/statistics/likelihood_power.py [prompts]

Decoding with the embedded pair is simulated token by token, drafts of five, so that every token's
distribution is known, as the fault makes it and as the target has it. What the martingale of a tilt
gains a token, in the mean, is a sum over those distributions and no sample; a row is broken once
the best tilt has gained what `stats.martingale` asks for.
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
"""The distribution that a draft token is drawn from, of the draft's logits and the temperature."""


def of_ten(row: Tensor, temperature: float) -> Tensor:
    """The likeliest ten."""
    return row.masked_fill(row < row.topk(10).values[-1], -math.inf).div(temperature).softmax(-1)


FAULTS: dict[str, Draw] = {
    "nothing wrong": lambda row, t: (row / t).softmax(-1),
    "drawn from its top 10, q whole": of_ten,
    "draft at half the temperature": lambda row, t: (row / t / 0.5).softmax(-1),
    "draft at 0.9 of the temperature": lambda row, t: (row / t / 0.9).softmax(-1),
}


def gains(p: Tensor, own: Tensor) -> Tensor:
    """Of a token drawn from `own` where p [V] is right, for each tilt what the logarithm of its
    martingale gains in the mean; then the mean deviation and the variance under p."""
    steps = p.log().clamp_min(MIN_LOG_PROB)
    steps = steps - (p * steps).sum()
    drift = (own * steps).sum()
    found = [t * drift - (p * (t * steps).exp()).sum().log() for t in TILTS]
    return torch.stack([*found, drift, (p * steps * steps).sum()])


def measured(models: tuple[Decoder, Decoder], prompts: list[list[int]], t: float, draw: Draw):
    """Sums of `gains` over all tokens, how many those are, and how many were tested."""
    chance = torch.Generator().manual_seed(3)
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
                token, level, own = torch.multinomial(p, 1, generator=chance), 0, p
            else:
                drawn = draw(rows[1], t)
                stands = drawn * (p / q).clamp_max(1.0)
                rest = (p - q).clamp_min(0.0)
                lost = 1.0 - stands.sum()
                own = stands + lost * rest / rest.sum() if lost > 1e-12 else stands
                u = torch.rand((), generator=chance, dtype=torch.float64)
                kept, tested = bool(u < stands.sum()), tested + 1
                token = torch.multinomial(stands if kept else rest, 1, generator=chance)
                level = level + 1 if kept else 0
            total, n, ids = total + gains(p, own), n + 1, token.tolist()
    return total, n, tested


@torch.inference_mode()
def main() -> None:
    """Print the table, as Markdown."""
    asked = {"methods": [{"name": "vanilla"}, {"name": "sps"}], "threads": 1, "allow_noise": True}
    plan = make_plan(RunConfig.model_validate(asked | {"max_new_tokens": TOKENS}))
    bench = Bench(plan)
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    prompts = [list(bench.prompt(each)) for each in plan.questions[:limit]]
    models = tuple(bench.workspace.decoders[name] for name in ("target", "draft"))
    say("| temperature | fault | drift a token | standard deviation | tested | tokens it takes |")
    say("| --- | --- | --- | --- | --- | --- |")
    for t in (0.8, 1.0, 2.0):
        for name, draw in FAULTS.items():
            total, n, tested = measured(models, prompts, t, draw)
            *gained, drift, variance = (total / n).tolist()
            asked_for = math.log(len(TILTS)) - math.log(LEVEL)
            tokens = f"{asked_for / max(gained):,.0f}" if max(gained) > 1e-9 else "never"
            say(
                f"| {t:g} | {name} | {drift:+.4f} | {variance**0.5:.2f} | {tested / n:.0%}"
                f" | {tokens} |"
            )


def say(line: str) -> None:
    """A line of the table, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
