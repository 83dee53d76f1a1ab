"""Options of the commands of `specbench train`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import ARGUMENTS, OUTPUT, Option

WHAT, TRAINING = "What to train", "Training"
"""Panels of the help."""

Device = Literal["auto", "cpu", "cuda"]
HeadLoss = Literal["ttt", "paper"]
HeadRows = Literal["eagle", "eagle3", "mtp"]
Begin = Literal["first", "last", "ends"]
Samples = Literal["target", "own", "mixed"]
Labels = Literal["sampled", "greedy"]


class DraftLoss(StrEnum):
    """Loss for aligning a draft model. An enum, because typer parses no lists of Literals."""

    CE = "ce"
    KL = "kl"
    REVERSE_KL = "reverse-kl"
    JSD = "jsd"
    TVD = "tvd"
    TVD_PLUS = "tvd++"
    LK = "lk"


# Options that several commands have.

Out = Annotated[Path, Option(OUTPUT, "DIR", "Folder for the models and the work in progress.")]
Seed = Annotated[int, Field(ge=0), Option(TRAINING, "N", "Seed of weights and data.")]
Resume = Annotated[
    bool,
    Option(
        TRAINING,
        None,
        "Continue what OUT holds, or start this model over.",
        name="--resume/--fresh",
    ),
]
StepsScale = Annotated[
    float,
    Option(TRAINING, "X", "Factor on the steps of the recipe; 1 made the shipped models."),
]
Tokens = Annotated[
    int | None,
    Field(ge=1),
    Option(
        TRAINING,
        "N",
        "Tokens to train on, in place of --steps-scale: as many for several heads are an"
        " equal budget.",
    ),
]
Sequences = Annotated[
    int | None,
    Field(ge=1),
    Option(
        TRAINING,
        "N",
        "Texts of 512 tokens an update; the learning rate is for 4. More of them fill a GPU:"
        " there are as many updates less.",
        default="the recipe's",
    ),
]
Rate = Annotated[
    float | None,
    Field(ge=0.0),
    Option(TRAINING, "X", "Peak learning rate.", default="the recipe's"),
]
Smoke = Annotated[
    bool, Option(TRAINING, None, "A few steps on generated text: does it run at all?")
]
Where = Annotated[Device, Option(TRAINING, None, "Where to train.")]
Data = Annotated[
    Path | None,
    Option(
        TRAINING,
        "DIR",
        "Folder with gsm8k_train.jsonl.",
        default="downloaded",
        env="SPECBENCH_DATA",
    ),
]
Replies = Annotated[
    int | None,
    Field(ge=8),
    Option(
        TRAINING,
        "N",
        "Questions that the target answers; more of them go on from fewer.",
        default="3000",
    ),
]
HeadTarget = Annotated[
    str,
    Option(
        WHAT,
        "MODEL",
        "Model that the head drafts for: a short name, a folder or a GGUF file; one of"
        " Llama's kind that answers chats.",
    ),
]
Verifier = Annotated[
    str, Option(WHAT, "MODEL", "Model that verifies: one of Llama's kind that answers chats.")
]
Drafter = Annotated[str | None, Option(WHAT, "MODEL", "Model that drafts.", default="the target's")]
LossOfHead = Annotated[
    HeadLoss,
    Option(
        TRAINING,
        None,
        "ttt: the target's distribution over several tokens, drafted in training; paper: the"
        " loss of the publication. Schedules around a loss (Falcon's glancing) are not made.",
    ),
]


class DraftOptions(CommandOptions):
    """Options of `specbench train draft`."""

    out: Out
    target: Annotated[
        str,
        Option(
            WHAT,
            "MODEL",
            "Model that the draft is to agree with: a short name, a folder or a GGUF file; one"
            " of Llama's kind that answers chats.",
        ),
    ] = "embedded"
    draft: Annotated[
        str | None,
        Option(
            WHAT,
            "MODEL",
            "Model that the draft begins as; it has the target's vocabulary.",
            default="the target's own",
        ),
    ] = None
    layers: Annotated[
        int | None,
        Field(ge=1),
        Option(
            WHAT,
            "N",
            "Make a new draft: so many layers of the target, its embeddings and its output.",
            default="--draft",
        ),
    ] = None
    begin: Annotated[
        Begin | None,
        Option(
            WHAT,
            None,
            "Which of the target's layers those are to begin with: the first, the last, or"
            " half of each.",
            default="first",
        ),
    ] = None
    vocabulary: Annotated[
        int | None,
        Field(ge=1),
        Option(
            WHAT,
            "N",
            "Cut the draft's output to the N tokens that the target answers with most.",
            default="all",
        ),
    ] = None
    loss: Annotated[
        list[DraftLoss],
        Option(
            TRAINING,
            "LOSS",
            f"By what it is aligned: {', '.join(DraftLoss)}; given several times, each makes a"
            " draft, and they are compared.",
        ),
    ] = Field([DraftLoss.KL])
    teacher_samples: Annotated[
        Samples,
        Option(
            TRAINING,
            None,
            "Whose replies it reads: the target's, its own (new ones every 100 updates), or"
            " both in turn.",
        ),
    ] = "target"
    temperature: Annotated[
        float, Option(TRAINING, "T", "At which both distributions are taken.")
    ] = 1.0
    pretrain: Annotated[
        int,
        Field(ge=0),
        Option(
            TRAINING,
            "N",
            "Updates on text first, from random weights of the draft's shape, once a seed; 0:"
            " it begins with its own weights. For the embedded models alone.",
        ),
    ] = 0
    exits: Annotated[
        list[Annotated[int, Field(ge=1)]],
        Option(
            TRAINING,
            "N",
            "Its first N layers learn to draft by themselves too, for s2d; may be repeated.",
            default="the whole draft alone",
            name="--sorted",
        ),
    ] = Field([])
    steps: Annotated[int, Field(ge=1), Option(TRAINING, "N", "Updates, of 2,048 tokens each.")] = (
        400
    )
    seeds: Annotated[
        int,
        Field(ge=1),
        Option(
            TRAINING,
            "N",
            "Drafts of each loss, each with data of its own: seeds 0 to N - 1.",
        ),
    ] = 1
    replies: Replies = None
    resume: Resume = True
    steps_scale: StepsScale = 1.0
    tokens: Tokens = None
    smoke: Smoke = False
    device: Where = "auto"
    data: Data = None


class RepliesOptions(CommandOptions):
    """Options of `specbench train replies`."""

    out: Out
    target: HeadTarget = "embedded"
    replies: Replies = None
    head: Annotated[
        HeadRows,
        Option(WHAT, None, "Kind of head whose rows of the target are kept meanwhile."),
    ] = "eagle"
    seed: Seed = 0
    smoke: Smoke = False
    device: Where = "auto"
    data: Data = None


class HeadOptions(CommandOptions):
    """Options of the commands that train the head of one kind."""

    out: Out
    target: HeadTarget = "embedded"
    loss: LossOfHead = "ttt"
    replies: Replies = None
    seed: Seed = 0
    resume: Resume = True
    steps_scale: StepsScale = 1.0
    tokens: Tokens = None
    sequences: Sequences = None
    lr: Rate = None
    smoke: Smoke = False
    device: Where = "auto"
    data: Data = None


class PaperHeadOptions(HeadOptions):
    """Options of a head kind that is trained with the loss of its paper."""

    loss: LossOfHead = "paper"


class MethodOptions(CommandOptions):
    """Options that name the method whose head is trained."""

    out: Out
    method: Annotated[
        str | None,
        Option(
            ARGUMENTS, "METHOD", "The method that drafts with it.", default="the one of --plugin"
        ),
    ] = None
    plugins: Annotated[list[str], Option(WHAT, "FILE", "Python file with the method.")] = Field([])


class MethodHeadOptions(HeadOptions, MethodOptions):
    """Options of `specbench train head`; the help lists those of `MethodOptions` first."""


class AcceptanceOptions(CommandOptions):
    """Options of `specbench train specdec++`."""

    out: Out
    target: Verifier = "embedded"
    draft: Drafter = None
    labels: Annotated[
        Labels,
        Option(
            TRAINING,
            None,
            "sampled: the chance min(1, p/q) that a drawn token stands, as published; greedy:"
            " whether the likeliest token does.",
        ),
    ] = "sampled"
    mixing: Annotated[
        float,
        Field(ge=0, le=1),
        Option(TRAINING, "X", "Share of positions that hold the target's own token."),
    ] = 0.15
    rejection_weight: Annotated[
        float, Field(ge=0), Option(TRAINING, "X", "How much a rejection weighs in the loss.")
    ] = 6.0
    replies: Replies = None
    seed: Seed = 0
    resume: Resume = True
    steps_scale: StepsScale = 1.0
    smoke: Smoke = False
    device: Where = "auto"
    data: Data = None


class JudgeOptions(CommandOptions):
    """Options of `specbench train judge`."""

    out: Out
    target: Verifier = "embedded"
    draft: Drafter = None
    questions: Annotated[
        int | None,
        Field(ge=10),
        Option(TRAINING, "N", "Questions that are mined for labels.", default="1500"),
    ] = None
    seed: Seed = 0
    smoke: Smoke = False


class ExitsOptions(CommandOptions):
    """Options of `specbench train specee`."""

    out: Out
    target: Verifier = "embedded"
    draft: Drafter = None
    questions: Annotated[
        int | None,
        Field(ge=10),
        Option(TRAINING, "N", "Questions whose answers are read.", default="1500"),
    ] = None
    seed: Seed = 0
    smoke: Smoke = False


class DatastoreOptions(CommandOptions):
    """Options of `specbench train rest`."""

    out: Out
    target: Annotated[str, Option(WHAT, "MODEL", "Model whose tokens the datastore is in.")] = (
        "embedded"
    )
    text: Annotated[
        list[Path],
        Option(
            WHAT,
            "FILE",
            'Text to retrieve from: FILE.txt, or FILE.jsonl with {"text": "..."} a line; repeat '
            "it for several.",
            default="the target's own replies",
        ),
    ] = Field([])
    replies: Annotated[
        int,
        Field(ge=1),
        Option(TRAINING, "N", "Without --text: questions that the target answers."),
    ] = 3000
    seed: Seed = 0
    resume: Resume = True
    smoke: Annotated[
        bool, Option(TRAINING, None, "A few replies on generated text: does it run at all?")
    ] = False
    device: Where = "auto"
    data: Data = None


class ConvertOptions(CommandOptions):
    """Options of `specbench train convert`."""

    folder: Annotated[
        Path, Option(ARGUMENTS, "DIR", "Folder with pytorch_model.bin and config.json.")
    ]
    out: Annotated[Path, Option(OUTPUT, "DIR", "Folder for model.safetensors and config.json.")]
    unpickle: Annotated[
        bool,
        Option(OUTPUT, None, "Read the pickle; its tensors alone, running no code of it."),
    ] = False
