"""`specbench train specee`: train SpecEE's predictors, which decide after which layer to exit
early.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from methods.specee.training import EarlyLogits, PredictorQuality
    from specbench_cli.config.train import ExitsOptions
    from specbench_cli.models.resolve import Checkpoint


@parsed_command("specbench_cli.config.train:ExitsOptions")
def specee(options: ExitsOptions) -> None:
    """Train SpecEE's exit predictors for a target and its draft model.

    They learn from the target's greedy answers, after each layer, whether the layer's most likely
    token is already the target's. They are stored in OUT/exits; its config.json reports their
    quality on held-out questions.
    """
    from methods.specee.training import fit
    from specbench_cli.engine.models.checkpoint import Weights
    from specbench_cli.training.heads.exits import N_QUESTIONS, export

    shared.check_model(options.out, "exits")
    models, other = shared.resolve_pair(options.target, options.draft)
    n = 40 if options.smoke else options.questions or N_QUESTIONS
    early_logits = _read(models, other, n, options.seed)
    try:
        predictors, named, quality = fit(early_logits, options.seed)
    except ValueError as none:
        raise UsageError(
            str(none), "use a --target with more layers, or one trained for early exit"
        ) from None
    facts = {
        "target": models.label,
        "target_sha256": Weights(models.path).sha256(),
        "draft": other.label,
        "questions": n,
        "tokens": len(early_logits.question),
        "seed": options.seed,
    }
    export(options.out / "exits", predictors, named, quality, facts)
    output.data(
        f"{len(early_logits.question)} tokens, {quality.tokens} of them held out; always checked:"
        f" layers {', '.join(map(str, predictors.layers))} of {len(named['down']) + 1}"
    )
    _show(quality)
    output.note(f"specbench run -m specee --set specee.head={options.out / 'exits'}")


def _read(models: Checkpoint, other: Checkpoint, n: int, seed: int) -> EarlyLogits:
    """Return the logits after each layer while the target answers questions greedily."""
    from specbench_cli.engine.models.checkpoint import read_tokenizer
    from specbench_cli.engine.models.load import load_decoder
    from specbench_cli.training import generated
    from specbench_cli.training.corpus import Encoder
    from specbench_cli.training.heads.exits import collect_logits

    encode = Encoder(read_tokenizer(models.path, models.label))
    prompts = [
        encode.encode_prompt(row["turns"][0])
        for row in islice(generated.generate_rows(seed, "train"), n)
    ]

    def report_progress(done: int) -> None:
        if done % 100 == 0 or done == n:
            output.note(f"{done} of {n} answers read")

    return collect_logits(
        load_decoder(models.path, name="target"),
        load_decoder(other.path, name="draft"),
        prompts,
        encode.ends,
        report_progress,
    )


def _show(quality: PredictorQuality) -> None:
    """Print the quality of the predictors on held-out questions."""
    for layer, auc in quality.auc.items():
        output.data(
            f"layer {layer}: correct for {quality.right[layer]:.0%} of tokens; AUC {auc:.3f}"
        )
    for threshold, exits in quality.exits.items():
        output.data(
            f"threshold {threshold}: {exits:.0%} of the tokens exit early,"
            f" {quality.agree[threshold]:.1%} of them equal the target's token;"
            f" {quality.layers[threshold]:.2f} layers on average"
        )
