"""Seeded, program-generated tasks, without any download: six families that mirror Spec-Bench's,
three tasks in which much is said again, and one of chains of steps.

A *skill* draws words from small closed lexicons and returns the full answer to what it asks, so
every answer can be checked; a *template* is one wording of a skill. Rows are a pure function of
(seed, split, index): `stream(seed, "train")` is what the embedded family learns from, `mini_rows`
is the task `mini`.

**Held out by combination.** Each lexicon is cut into halves A and B (even and odd positions). The
second wording of every skill sees half A only while training; its other wordings see the whole
lexicon. `mini` is made of those second wordings with half B: each word and each template was
trained on, but never the two together, so no prompt of `mini` can occur in training.

To extend: add words to the end of a lexicon, or write another `@skill`. Both change every row drawn
afterwards, so regenerate the files of all tasks (and retrain).

**Said again.** `best-of-n` holds wordings and words like `mini`'s, each prompt to be asked several
times. `agentic` and `repair` are *workflows*: conversations of several turns in which prompts,
tool output and answers return. No model was trained on those, and a change of them changes no row
of another task.

**Chains.** The answers of `chains` are steps, a line each, of which `scoring.right_steps` knows
whether they are right. They are what the embedded family was trained on, in the same wordings and
words: the target makes nearly all of them right, the draft about half.

    python -m specbench_cli.tasks.generate TASK > datasets_cfg/TASK/TASK.jsonl
"""

from specbench_cli.tasks.generate import (
    math_reasoning,
    multi_turn,
    qa,
    rag,
    summarization,
    translation,
)
from specbench_cli.tasks.generate.rows import (
    TASKS,
    Row,
    Split,
    chain_rows,
    lines,
    mini_rows,
    row,
    stream,
)
from specbench_cli.tasks.generate.template import FAMILIES, TEMPLATES, Draw, Template

SKILLS = (multi_turn, translation, summarization, qa, math_reasoning, rag)
"""The modules whose skills fill `TEMPLATES`, in the order of `FAMILIES`."""

__all__ = [
    "FAMILIES",
    "SKILLS",
    "TASKS",
    "TEMPLATES",
    "Draw",
    "Row",
    "Split",
    "Template",
    "chain_rows",
    "lines",
    "mini_rows",
    "row",
    "stream",
]
