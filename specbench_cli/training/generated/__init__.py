"""Synthetic chats in the six task families of Spec-Bench.

The small models that specbench ships are trained on these chats.

A *skill* is a function that draws words from lexicons (short word lists) and returns the words and
the complete answer, so each answer can be checked. A *template* is one wording of a skill's
question. A *row* is a generated conversation. It depends only on the seed, the split and its index.

Combinations of words and wordings are held out from training. Each lexicon has two halves, A and B
(even and odd positions). In training, the second wording of each skill uses only half A, and the
other wordings use all words. The split `mini` combines the second wordings with half B. So no
prompt of `mini` occurs in training, although each of its words and each of its wordings does.

To extend this package, add words to the end of a lexicon, or add a function with `@skill`. Both
change the generated rows, so the files of all tasks must be written again (`recipes/tasks`), and
the models must be trained again.
"""

from specbench_cli.training.generated import (
    math_reasoning,
    multi_turn,
    qa,
    rag,
    summarization,
    translation,
)
from specbench_cli.training.generated.rows import (
    GeneratedConversation,
    Split,
    generate_row,
    generate_rows,
)
from specbench_cli.training.generated.template import FAMILIES, TEMPLATES, Draw, QuestionTemplate

SKILLS = (multi_turn, translation, summarization, qa, math_reasoning, rag)
"""The modules whose skills fill `TEMPLATES`, in the order of `FAMILIES`."""

__all__ = [
    "FAMILIES",
    "SKILLS",
    "TEMPLATES",
    "Draw",
    "GeneratedConversation",
    "QuestionTemplate",
    "Split",
    "generate_row",
    "generate_rows",
]
