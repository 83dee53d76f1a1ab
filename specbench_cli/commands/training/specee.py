"""`specbench train specee`: the predictors that tell when a layer says what the target would."""

from itertools import islice
from typing import Annotated

import typer

from specbench_cli import output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training._shared import Out, Seed, Smoke, check_model
from specbench_cli.commands.training.acceptance import Draft, Target
from specbench_cli.errors import UsageError

Count = Annotated[
    int | None,
    typer.Option(
        "--questions",
        metavar="N",
        help="Questions whose answers are read.",
        show_default="1500",
        min=10,
        rich_help_panel=shared.TRAINING,
    ),
]


def specee(
    out: Out,
    target: Target = "embedded",
    draft: Draft = None,
    questions: Count = None,
    seed: Seed = 0,
    smoke: Smoke = False,
) -> None:
    """Train the predictors of SpecEE for a target and its draft (embedded-exits).

    They learn from the target's own greedy answers: behind each layer, whether its likeliest token
    is already the target's. OUT/exits has them; its config.json says what they are worth on
    questions held out.
    """
    from methods.specee.training import fit
    from specbench_cli.engine.models.checkpoint import Weights, read_tokenizer
    from specbench_cli.engine.models.load import load_decoder
    from specbench_cli.models import resolve
    from specbench_cli.training import generated
    from specbench_cli.training.corpus import Encoder
    from specbench_cli.training.heads.exits import N_QUESTIONS, export, read

    check_model(out, "exits")
    models = resolve(target)
    drafting = draft or models.draft
    if drafting is None:
        raise UsageError(f"{target} has no customary draft", "--draft MODEL")
    other, encode = resolve(drafting), Encoder(read_tokenizer(models.path, models.label))
    n = 40 if smoke else questions or N_QUESTIONS
    prompts = [encode.prompt(row["turns"][0]) for row in islice(generated.stream(seed, "train"), n)]

    def told(done: int) -> None:
        if done % 100 == 0 or done == n:
            output.note(f"{done} of {n} answers read")

    had = read(
        load_decoder(models.path, name="target"),
        load_decoder(other.path, name="draft"),
        prompts,
        encode.ends,
        told,
    )
    try:
        made, named, worth = fit(had, seed)
    except ValueError as none:
        raise UsageError(str(none), "a --target with more layers, or that learnt to exit") from None
    facts = {
        "target": models.label,
        "target_sha256": Weights(models.path).sha256(),
        "draft": other.label,
        "questions": n,
        "tokens": len(had.question),
        "seed": seed,
    }
    export(out / "exits", made, named, worth, facts)
    output.data(
        f"{len(had.question)} tokens read, {worth.tokens} of them held out; always looked at:"
        f" layers {', '.join(map(str, made.layers))} of {len(named['down']) + 1}"
    )
    for layer, auc in worth.auc.items():
        output.data(f"layer {layer}: right in {worth.right[layer]:.0%} of looks; AUC {auc:.3f}")
    for threshold, exits in worth.exits.items():
        output.data(
            f"threshold {threshold}: {exits:.0%} of the tokens leave early,"
            f" {worth.agree[threshold]:.1%} of these are the target's own;"
            f" {worth.layers[threshold]:.2f} layers in the mean"
        )
    output.note(f"specbench run -m specee --set specee.head={out / 'exits'}")
