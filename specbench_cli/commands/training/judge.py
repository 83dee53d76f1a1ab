"""`specbench train judge`: the head that lets harmless deviations of a draft pass."""

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from specbench_cli import output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.commands.training._shared import Out, Seed, Smoke
from specbench_cli.commands.training.acceptance import Draft, Target
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from specbench_cli.tasks import Family
    from specbench_cli.training.heads.judge import Asked

Count = Annotated[
    int | None,
    typer.Option(
        "--questions",
        metavar="N",
        help="Questions that are mined for labels.",
        show_default="1500",
        min=10,
        rich_help_panel=shared.TRAINING,
    ),
]


def judge(
    out: Out,
    target: Target = "embedded",
    draft: Draft = None,
    questions: Count = None,
    seed: Seed = 0,
    smoke: Smoke = False,
) -> None:
    """Train the judge of Judge Decoding for a target and its draft (embedded-judge).

    Labels are mined: the draft's token takes the place of the target's in the target's own greedy
    answer, the target goes on, and the task's scorer says whether the answer is as good. OUT/judge
    has the head; its config.json says what it is worth on questions held out.
    """
    from methods.judge.training import fit
    from specbench_cli.engine.models.checkpoint import Weights, read_tokenizer
    from specbench_cli.engine.models.load import load_decoder
    from specbench_cli.models import resolve
    from specbench_cli.training.corpus import Encoder
    from specbench_cli.training.heads.judge import N_QUESTIONS, export, mine

    shared.check_model(out, "judge")
    models = resolve(target)
    drafting = draft or models.draft
    if drafting is None:
        raise UsageError(f"{target} has no customary draft", "--draft MODEL")
    other = resolve(drafting)
    tokenizer = read_tokenizer(models.path, models.label)
    asked = _asked(tokenizer, seed, 40 if smoke else questions or N_QUESTIONS)

    def told(done: int) -> None:
        if done % 50 == 0 or done == len(asked):
            output.note(f"{done} of {len(asked)} questions mined")

    mined = mine(
        load_decoder(models.path, name="target"),
        load_decoder(other.path, name="draft"),
        asked,
        Encoder(tokenizer).ends,
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        told,
    )
    if len(set(mined.harmless.tolist())) < 2:
        raise UsageError(
            f"{len(mined.harmless)} tokens were mined, all of one kind: nothing to learn",
            "more --questions, or a --draft that is worse than the target",
        )
    weight, bias, judged = fit(mined)
    facts = {
        "target": models.label,
        "target_sha256": Weights(models.path).sha256(),
        "draft": other.label,
        "questions": len(asked),
        "mined": len(mined.harmless),
        "seed": seed,
    }
    export(out / "judge", weight, bias, judged, facts)
    output.data(
        f"{len(mined.harmless)} tokens mined, {judged.harmless:.0%} of {judged.tokens} held out"
        f" harmless; AUC there {judged.auc:.3f}"
    )
    for threshold, caught in judged.caught.items():
        passed = judged.passed[threshold]
        output.data(f"threshold {threshold}: stops {caught:.0%} of what harms, lets {passed:.0%}"
                    " of the harmless pass")  # fmt: skip
    output.note(f"specbench run -m judge --set judge.head={out / 'judge'}")


def _asked(tokenizer: "PreTrainedTokenizerFast", seed: int, n: int) -> "list[Asked]":
    """First questions of the generated training rows, scored as the task `mini` scores them."""
    from specbench_cli.tasks import Question, load_task
    from specbench_cli.training import generated
    from specbench_cli.training.corpus import Encoder
    from specbench_cli.training.heads.judge import Asked

    encode, like = Encoder(tokenizer), {each.family: each for each in load_task("mini").questions}

    def asked(row: generated.Row) -> Asked:
        family: Family = next(name for name in like if name == row["family"])
        question = Question(
            prompt_id=f"judge/{row['id']}",
            cluster=row["template"],
            task="judge",
            family=family,
            category=row["category"],
            turns=(row["turns"][0],),
            reference=(row["reference"][0],),
            scorer=like[family].scorer,
        )
        return Asked(question, tuple(encode.prompt(row["turns"][0])))

    return [asked(row) for row in islice(generated.stream(seed, "train"), n)]
