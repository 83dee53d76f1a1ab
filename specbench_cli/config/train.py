"""Options of the commands of `specbench train`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from specbench_cli.config.commands import CommandOptions
from specbench_cli.config.options import ARGUMENTS, OUTPUT, Option

WHAT, TRAINING = "What to train", "Training"
"""Headings in the help."""

Device = Literal["auto", "cpu", "cuda"]
HeadLoss = Literal["ttt", "paper"]
HeadRows = Literal["eagle", "eagle3", "mtp"]
Begin = Literal["first", "last", "ends"]
Samples = Literal["target", "own", "mixed"]
Labels = Literal["sampled", "greedy"]


class DraftLoss(StrEnum):
    """Loss for aligning a draft model with its target.

    It is an enum because typer cannot parse lists of Literals.
    """

    CE = "ce"
    KL = "kl"
    REVERSE_KL = "reverse-kl"
    JSD = "jsd"
    TVD = "tvd"
    TVD_PLUS = "tvd++"
    LK = "lk"


# Options that several training commands share.

Out = Annotated[Path, Option(OUTPUT, "DIR", "Output folder. Checkpoints are stored there too.")]
OutOnly = Annotated[Path, Option(OUTPUT, "DIR", "Output folder.")]
Seed = Annotated[int, Field(ge=0), Option(TRAINING, "N", "Random seed.")]
Resume = Annotated[
    bool,
    Option(
        TRAINING,
        None,
        "Resume from the checkpoints in --out, or start over.",
        name="--resume/--fresh",
    ),
]
StepsScale = Annotated[
    float,
    Option(TRAINING, "X", "Factor for the preset number of training steps of this kind of head."),
]
Tokens = Annotated[
    int | None,
    Field(ge=1),
    Option(
        TRAINING,
        "N",
        "Train on N tokens, whatever --steps-scale is. Use it to train several kinds of heads with"
        " equal budgets.",
    ),
]
Sequences = Annotated[
    int | None,
    Field(ge=1),
    Option(
        TRAINING,
        "N",
        "Batch size in sequences of 512 tokens. The learning rate is tuned for 4.",
        default="the preset of this kind of head",
    ),
]
Rate = Annotated[
    float | None,
    Field(ge=0.0),
    Option(TRAINING, "X", "Peak learning rate.", default="the preset of this kind of head"),
]
Smoke = Annotated[
    bool, Option(TRAINING, None, "Train for a few steps on generated questions, as a smoke test.")
]
SmokeQuestions = Annotated[bool, Option(TRAINING, None, "Use only 40 questions, as a smoke test.")]
Where = Annotated[Device, Option(TRAINING, "auto|cpu|cuda", "Training device.")]
Data = Annotated[
    Path | None,
    Option(
        TRAINING,
        "DIR",
        "Folder that contains gsm8k_train.jsonl.",
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
        "Number of questions that the target answers for the training data.",
        default="3000",
    ),
]
HeadTarget = Annotated[
    str,
    Option(
        WHAT,
        "MODEL",
        "Target model of the head: short name, folder or GGUF file of a Llama-like chat model.",
    ),
]
Verifier = Annotated[str, Option(WHAT, "MODEL", "Target model, a Llama-like chat model.")]
Drafter = Annotated[
    str | None, Option(WHAT, "MODEL", "Draft model.", default="known for the target")
]
LossOfHead = Annotated[
    HeadLoss,
    Option(
        TRAINING,
        "ttt|paper",
        "Training loss. ttt: training-time test, on the head's own drafts of several tokens."
        " paper: the loss of the method's paper.",
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
            "Target model: short name, folder or GGUF file of a Llama-like chat model.",
        ),
    ] = "embedded"
    draft: Annotated[
        str | None,
        Option(
            WHAT,
            "MODEL",
            "Initial draft model. It must have the target's vocabulary.",
            default="known for the target",
        ),
    ] = None
    layers: Annotated[
        int | None,
        Field(ge=1),
        Option(
            WHAT,
            "N",
            "Create a draft model from N layers of the target, its embeddings and output layer.",
            default="no new model",
        ),
    ] = None
    begin: Annotated[
        Begin | None,
        Option(
            WHAT,
            "first|last|ends",
            "With --layers: which layers of the target to copy. ends: half first, half last.",
            default="first",
        ),
    ] = None
    vocabulary: Annotated[
        int | None,
        Field(ge=1),
        Option(
            WHAT,
            "N",
            "Limit the draft's output to the N tokens that the target emits most often.",
            default="all",
        ),
    ] = None
    loss: Annotated[
        list[DraftLoss],
        Option(
            TRAINING,
            "LOSS",
            f"Alignment loss: {', '.join(DraftLoss)}. lk moves from kl to tvd as acceptance grows"
            " (arXiv:2602.23881). Repeat the option to train one draft per loss and compare them.",
        ),
    ] = Field([DraftLoss.KL])
    teacher_samples: Annotated[
        Samples,
        Option(
            TRAINING,
            "target|own|mixed",
            "Train on the target's replies, the draft's own (regenerated every 100 steps), or"
            " both.",
        ),
    ] = "target"
    temperature: Annotated[
        float, Option(TRAINING, "T", "Temperature of both distributions in the loss.")
    ] = 1.0
    pretrain: Annotated[
        int,
        Field(ge=0),
        Option(
            TRAINING,
            "N",
            "Pretrain from random weights for N steps first (only for the small models of"
            " specbench: embedded-...). 0 keeps the"
            " draft's weights.",
        ),
    ] = 0
    exits: Annotated[
        list[Annotated[int, Field(ge=1)]],
        Option(
            TRAINING,
            "N",
            "Also train the first N layers as a draft of their own (S2D). Repeat the option for"
            " several.",
            name="--sorted",
        ),
    ] = Field([])
    steps: Annotated[
        int, Field(ge=1), Option(TRAINING, "N", "Number of training steps of 2,048 tokens.")
    ] = 400
    seeds: Annotated[
        int,
        Field(ge=1),
        Option(
            TRAINING,
            "N",
            "Number of drafts per loss, with seeds 0 to N - 1.",
        ),
    ] = 1
    replies: Replies = None
    resume: Resume = True
    steps_scale: Annotated[float, Option(TRAINING, "X", "Factor for --steps.")] = 1.0
    tokens: Annotated[
        int | None,
        Field(ge=1),
        Option(TRAINING, "N", "Train on N tokens, whatever --steps and --steps-scale are."),
    ] = None
    smoke: Smoke = False
    device: Where = "auto"
    data: Data = None


class RepliesOptions(CommandOptions):
    """Options of `specbench train replies`."""

    out: OutOnly
    target: HeadTarget = "embedded"
    replies: Replies = None
    head: Annotated[
        HeadRows,
        Option(
            WHAT,
            "eagle|eagle3|mtp",
            "Also store the hidden states of the target that this kind of head reads.",
        ),
    ] = "eagle"
    seed: Seed = 0
    smoke: Annotated[
        bool,
        Option(TRAINING, None, "Generate a few replies to generated questions, as a smoke test."),
    ] = False
    device: Where = "auto"
    data: Data = None


class HeadOptions(CommandOptions):
    """Options of a command that trains one kind of head."""

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
    """Options of a command that trains one kind of head, with the loss of the method's paper as
    default.
    """

    loss: LossOfHead = "paper"


class MethodOptions(CommandOptions):
    """Options that select the method whose head is trained."""

    out: Out
    method: Annotated[
        str | None,
        Option(ARGUMENTS, "METHOD", "Method that uses the head.", default="the one of --plugin"),
    ] = None
    plugins: Annotated[list[str], Option(WHAT, "FILE", "Load the method from a Python file.")] = (
        Field([])
    )


class MethodHeadOptions(HeadOptions, MethodOptions):
    """Options of `specbench train head`. The order of the base classes is the order in the help."""


class AcceptanceOptions(CommandOptions):
    """Options of `specbench train specdec++`."""

    out: Out
    target: Verifier = "embedded"
    draft: Drafter = None
    labels: Annotated[
        Labels,
        Option(
            TRAINING,
            "sampled|greedy",
            "Training labels. sampled: acceptance probability min(1, p/q) of a sampled token, as in"
            " the paper. greedy: acceptance of the most likely token.",
        ),
    ] = "sampled"
    mixing: Annotated[
        float,
        Field(ge=0, le=1),
        Option(
            TRAINING,
            "X",
            "Share of positions in the training texts that keep the target's token. The others get"
            " the draft's.",
        ),
    ] = 0.15
    rejection_weight: Annotated[
        float, Field(ge=0), Option(TRAINING, "X", "Weight of rejections in the loss.")
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

    out: OutOnly
    target: Verifier = "embedded"
    draft: Drafter = None
    questions: Annotated[
        int | None,
        Field(ge=10),
        Option(TRAINING, "N", "Number of questions to mine labels from.", default="1500"),
    ] = None
    seed: Seed = 0
    smoke: SmokeQuestions = False


class ExitsOptions(CommandOptions):
    """Options of `specbench train specee`."""

    out: OutOnly
    target: Verifier = "embedded"
    draft: Drafter = None
    questions: Annotated[
        int | None,
        Field(ge=10),
        Option(TRAINING, "N", "Number of questions to train on.", default="1500"),
    ] = None
    seed: Seed = 0
    smoke: SmokeQuestions = False


class DatastoreOptions(CommandOptions):
    """Options of `specbench train rest`."""

    out: OutOnly
    target: Annotated[str, Option(WHAT, "MODEL", "Target model, whose tokenizer is used.")] = (
        "embedded"
    )
    text: Annotated[
        list[Path],
        Option(
            WHAT,
            "FILE",
            'Text to retrieve from: FILE.txt, or FILE.jsonl with {"text": "..."} per line. Repeat '
            "the option for several files.",
            default="replies of the target",
        ),
    ] = Field([])
    replies: Annotated[
        int,
        Field(ge=1),
        Option(TRAINING, "N", "Without --text: number of questions that the target answers."),
    ] = 3000
    seed: Seed = 0
    resume: Resume = True
    smoke: Annotated[
        bool,
        Option(TRAINING, None, "Generate a few replies to generated questions, as a smoke test."),
    ] = False
    device: Where = "auto"
    data: Data = None


class ConvertOptions(CommandOptions):
    """Options of `specbench train convert`."""

    folder: Annotated[
        Path, Option(ARGUMENTS, "DIR", "Folder that contains pytorch_model.bin and config.json.")
    ]
    out: Annotated[Path, Option(OUTPUT, "DIR", "Output folder.")]
    unpickle: Annotated[
        bool,
        Option(
            OUTPUT,
            None,
            "Allow reading the pickle. Only tensors are read; code in the pickle does not run.",
        ),
    ] = False
