"""Seeded, program-generated chats in six families that mirror those of Spec-Bench.

The embedded family and its heads are trained on them. A *skill* draws words from small closed
lexicons and returns the full answer to the question, so every answer can be checked. A *template*
is one wording of a skill. Rows are a pure function of (seed, split, index).

Combinations are held out. Each lexicon is cut into halves A and B (even and odd positions). During
training, the second wording of every skill sees half A only, and its other wordings see the whole
lexicon. The split `mini` has those second wordings with half B: each word and each template was
trained on, but never the two together, so no prompt of `mini` can occur in training.

To extend, add words to the end of a lexicon, or write another `@skill`. Both change every row drawn
afterwards, so write the files of all tasks again (`recipes/tasks`) and retrain.
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
