"""Questions of tasks, with the allowed columns, roles and scorers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specbench_cli.store.schema import FAMILIES as FAMILIES
from specbench_cli.store.schema import Family as Family

Column = Literal["id", "turns", "category", "family", "cluster", "reference"]
"""Columns of a row; see `rows.COLUMNS` for their default names."""

Role = Literal["system", "user", "assistant"]
Message = tuple[Role, str]
"""Role and content."""

Scorer = Literal[
    "exact_match",
    "exact_sentences",
    "exact_lines",
    "exact_code",
    "final_number",
    "math",
    "valid_json",
    "unit_tests",
]
"""Scorers, implemented in `specbench_cli.scoring`."""


@dataclass(frozen=True, slots=True)
class Question:
    """Question of a task, with all its turns.

    Attributes:
        prompt_id: Unique id "<task>/<id>". If the prompt is decoded several times, "/<sample>" is
            appended. It is part of the random seed, so samples are independent.
        cluster: Id of a group of questions that are not independent, such as all samples of a
            prompt or all questions of one template. Otherwise the prompt_id.
        family, category: Kind of the question. The family is one of specbench's; the category is
            the dataset's own name.
        turns: Messages of the user, one per turn.
        reference: Reference answers: one per turn, a single one, or None.
        scorer: Scorer of the answers, or None.
        program: Code before and after an answer that is tested by running it.
        sample: Number of the sample from 1. 0 if the prompt is decoded only once.
        before: Messages before the first turn, in recorded traffic.
        max_new_tokens: Maximum number of new tokens of this question, or None.
    """

    prompt_id: str
    cluster: str
    task: str
    family: Family
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] | None = None
    scorer: Scorer | None = None
    program: tuple[str, str] | None = None
    sample: int = 0
    before: tuple[Message, ...] = ()
    max_new_tokens: int | None = None

    @property
    def base_id(self) -> str:
        """The prompt_id without the number of the sample."""
        return self.prompt_id.removesuffix(f"/{self.sample}") if self.sample else self.prompt_id
