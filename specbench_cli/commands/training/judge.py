"""`specbench train judge`: train a Judge Decoding head.

The head predicts which draft tokens are correct although the target would choose other tokens.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from specbench_cli import output
from specbench_cli.commands.training import _shared as shared
from specbench_cli.config.options import parsed_command
from specbench_cli.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from methods.judge.training import JudgeQuality, MinedTokens
    from specbench_cli.config.train import JudgeOptions
    from specbench_cli.models.resolve import Checkpoint
    from specbench_cli.tasks import Family
    from specbench_cli.training.heads.judge import JudgeQuestion


@parsed_command("specbench_cli.config.train:JudgeOptions")
def judge(options: JudgeOptions) -> None:
    """Train a Judge Decoding head for a target and its draft model.

    Labels are mined: a draft token replaces the target's token in a greedy answer, the target
    continues, and the task's scorer decides if the answer is as good. The head is stored in
    OUT/judge; its config.json reports the quality on held-out questions.
    """
    from methods.judge.training import fit
    from specbench_cli.engine.models.checkpoint import Weights, read_tokenizer
    from specbench_cli.training.heads.judge import N_QUESTIONS, export

    shared.check_model(options.out, "judge")
    models, other = shared.resolve_pair(options.target, options.draft)
    tokenizer = read_tokenizer(models.path, models.label)
    questions = make_questions(
        tokenizer, options.seed, 40 if options.smoke else options.questions or N_QUESTIONS
    )
    mined = _mine_labels(models, other, tokenizer, questions)
    weight, bias, quality = fit(mined)
    facts = {
        "target": models.label,
        "target_sha256": Weights(models.path).sha256(),
        "draft": other.label,
        "questions": len(questions),
        "mined": len(mined.harmless),
        "seed": options.seed,
    }
    export(options.out / "judge", weight, bias, quality, facts)
    _show(quality, len(mined.harmless))
    output.note(f"specbench run -m judge --set judge.head={options.out / 'judge'}")


def _mine_labels(
    models: Checkpoint,
    other: Checkpoint,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[JudgeQuestion],
) -> MinedTokens:
    """Generate labelled training tokens from questions.

    Raises:
        UsageError: all tokens have the same label, so the head cannot learn from them.
    """
    from specbench_cli.engine.models.load import load_decoder
    from specbench_cli.training.corpus import Encoder
    from specbench_cli.training.heads.judge import mine_labels

    def report_progress(done: int) -> None:
        if done % 50 == 0 or done == len(questions):
            output.note(f"{done} of {len(questions)} questions mined")

    mined = mine_labels(
        load_decoder(models.path, name="target"),
        load_decoder(other.path, name="draft"),
        questions,
        Encoder(tokenizer).ends,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        report_progress,
    )
    if len(set(mined.harmless.tolist())) < 2:
        raise UsageError(
            f"all {len(mined.harmless)} mined tokens have the same label: nothing to learn",
            "use more --questions, or a --draft that is worse than the target",
        )
    return mined


def _show(quality: JudgeQuality, mined: int) -> None:
    """Print the quality of the head on held-out questions."""
    output.data(
        f"{mined} tokens mined; of {quality.tokens} held-out tokens {quality.harmless:.0%} are"
        f" harmless, AUC {quality.auc:.3f}"
    )
    for threshold, caught in quality.caught.items():
        passed = quality.passed[threshold]
        output.data(
            f"threshold {threshold}: rejects {caught:.0%} of harmful tokens,"
            f" accepts {passed:.0%} of harmless ones"
        )


def make_questions(tokenizer: PreTrainedTokenizerFast, seed: int, n: int) -> list[JudgeQuestion]:
    """Return n generated questions of the task `mini` for training, with their scorers."""
    from specbench_cli.tasks import Question, load_task
    from specbench_cli.training import generated
    from specbench_cli.training.corpus import Encoder
    from specbench_cli.training.heads.judge import JudgeQuestion

    encode, scored = Encoder(tokenizer), {each.family: each for each in load_task("mini").questions}

    def make_question(row: generated.GeneratedConversation) -> JudgeQuestion:
        family: Family = next(name for name in scored if name == row["family"])
        question = Question(
            prompt_id=f"judge/{row['id']}",
            cluster=row["template"],
            task="judge",
            family=family,
            category=row["category"],
            turns=(row["turns"][0],),
            reference=(row["reference"][0],),
            scorer=scored[family].scorer,
        )
        return JudgeQuestion(question, tuple(encode.encode_prompt(row["turns"][0])))

    return [make_question(row) for row in islice(generated.generate_rows(seed, "train"), n)]
