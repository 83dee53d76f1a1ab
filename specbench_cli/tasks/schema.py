"""What a question of a task is, and the words for its family, its columns and its scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specbench_cli.store.schema import FAMILIES as FAMILIES
from specbench_cli.store.schema import Family as Family

Column = Literal["id", "turns", "category", "family", "cluster", "reference"]
"""What can be read from a row; see `rows.COLUMNS` for the names looked for by default."""

Role = Literal["system", "user", "assistant"]
Message = tuple[Role, str]
"""Who says what."""

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
"""How an answer is compared with its reference, or judged by itself; each is of a module of
`specbench_cli.scoring`."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a task, all its turns.

    Attributes:
        prompt_id: "<task>/<id>", unique, with "/<sample>" behind it where there are several. All
            noise and draws are keyed by it, so samples are independent.
        cluster: questions that are not independent share one (a generated task's template, all
            samples of a prompt); otherwise the prompt_id.
        family, category: the stratum; `category` keeps the source's word.
        turns: what the user says, turn by turn.
        reference: the dataset's answers, if any (per turn, or one).
        scorer: how answers are scored, None where they are not.
        program: the code before and after an answer that is tested by running it.
        sample: from 1, which of several samples of the same prompt; 0 where it is the only one.
        before: messages that stand before the first turn, as a request of one's own traffic has
            them.
        max_new_tokens: most tokens that this question asks for; None where it does not say.
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
    def asked(self) -> str:
        """What all samples of a prompt share: the prompt_id without the sample."""
        return self.prompt_id.removesuffix(f"/{self.sample}") if self.sample else self.prompt_id
