"""`python -m recipes.studies compare`: heads that are trained at an equal budget."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field

from specbench_cli import files, output, registry
from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training import heads
from specbench_cli.config import options
from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import ARGUMENTS, Option
from specbench_cli.config.train import (
    TRAINING,
    WHAT,
    Data,
    HeadOptions,
    HeadTarget,
    LossOfHead,
    Out,
    Replies,
    Resume,
    Seed,
    Smoke,
    Where,
)

COMPARISON = "comparison.json"
"""File with the table."""


class CompareHeadsOptions(CommandOptions):
    """Options of `compare`."""

    kinds: Annotated[
        list[str],
        Option(ARGUMENTS, "KIND", "Heads or methods that draft with one: medusa hydra ..."),
    ]
    out: Out
    target: HeadTarget = "embedded"
    plugins: Annotated[list[str], Option(WHAT, "FILE", "Python file with further methods.")] = (
        Field([])
    )
    loss: LossOfHead = "ttt"
    replies: Replies = None
    seed: Seed = 0
    resume: Resume = True
    tokens: Annotated[
        int, Field(ge=1), Option(TRAINING, "N", "Tokens that each head is trained on.")
    ] = 2_048_000
    smoke: Smoke = False
    device: Where = "auto"
    data: Data = None


@options.parsed_command("recipes.studies.compare:CompareHeadsOptions")
def compare(asked: CompareHeadsOptions) -> None:
    """Train several heads one after another at an equal budget, and make the table.

    All learn for as many tokens, of the same replies in the same order. The table says MAT as a
    chain on held-out replies, parameters, tokens and seconds; OUT/comparison.json holds it too.
    The seconds are of this machine while nothing else ran on it, if nothing else did.
    """
    shared.check_outputs(asked.out, COMPARISON)
    for file in asked.plugins:
        registry.load_plugin(file)
    own = HeadOptions.model_validate(asked.model_dump(exclude={"kinds", "plugins"}))
    records = []
    for kind in [heads.resolve_kind(name) for name in dict.fromkeys(asked.kinds)]:
        with shared.show_bars() as report:
            trainer = heads.make_trainer(own, report, report.count)
            schedule = trainer.get_schedule(kind)
            result = heads.train_head(trainer, kind, schedule, own)
        records.append(
            {
                "head": schedule.name,
                "MAT": round(result.mat[-1].mat, 3),
                "accepted": result.mat[-1].accepted,
                "parameters": result.parameters,
                "tokens": result.curve[-1].tokens,
                "seconds": round(result.seconds),
            }
        )
    text = json.dumps(records, indent=1) + "\n"
    files.write_listed(asked.out / COMPARISON, text)
    output.rows(records)
