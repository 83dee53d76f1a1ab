"""`python -m recipes.studies compare`: train heads on equally many tokens and compare MAT."""

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
"""Name of the file with the results."""


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
def compare(options: CompareHeadsOptions) -> None:
    """Train several heads one after another on the same number of tokens, and compare them.

    All heads see the same replies in the same order. The table has MAT of chain drafts on held-out
    replies, parameters, tokens and seconds. OUT/comparison.json contains the same. The seconds are
    only comparable if no other program used the machine.
    """
    shared.check_outputs(options.out, COMPARISON)
    for file in options.plugins:
        registry.load_plugin(file)
    own = HeadOptions.model_validate(options.model_dump(exclude={"kinds", "plugins"}))
    records = []
    for kind in [heads.resolve_kind(name) for name in dict.fromkeys(options.kinds)]:
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
    files.write_listed(options.out / COMPARISON, text)
    output.rows(records)
