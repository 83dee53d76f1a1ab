"""Skills, their wordings, and the random choices that fill them in."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

Turns = list[tuple[str, str]]
T = TypeVar("T")

FAMILIES = ("multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True, slots=True)
class Draw:
    """Random choices for one row; `half` 0 or 1 limits words to that half of each lexicon."""

    rng: random.Random
    half: int | None = None

    def _pool(self, words: Sequence[T]) -> Sequence[T]:
        return words if self.half is None else words[self.half :: 2]

    def word(self, words: Sequence[T]) -> T:
        """One entry of a lexicon."""
        return self.rng.choice(self._pool(words))

    def words(self, words: Sequence[T], n: int) -> list[T]:
        """`n` different entries of a lexicon."""
        return self.rng.sample(self._pool(words), n)

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A number from `low` to `high`, both included; numbers are never split into halves."""
        return self.rng.randrange(low, high + 1, step)


class FilledTemplate(NamedTuple):
    """What a skill drew: the words for the gaps of any of its wordings, and each turn's answer."""

    gaps: Mapping[str, Any]
    answers: Sequence[str]


Skill = Callable[[Draw], FilledTemplate]


class QuestionTemplate(NamedTuple):
    """One wording of one skill: the question(s) with gaps."""

    family: str
    category: str
    name: str
    held_out: bool
    wording: tuple[str, ...]
    fill: Skill

    def write(self, draw: Draw) -> Turns:
        """A conversation: turns and their answers."""
        gaps, answers = self.fill(draw)
        questions = (text.format(**gaps) for text in self.wording)
        return list(zip(questions, answers, strict=True))


TEMPLATES: list[QuestionTemplate] = []


def skill(family: str, category: str, *wordings: str | tuple[str, ...]) -> Callable[[Skill], Skill]:
    """Register each wording of the decorated skill as a template; the second one is held out.

    So the skill itself meets every word in training, in its other wordings; it is the pair of
    that wording and half B that training never shows.
    """

    def register(fill: Skill) -> Skill:
        for number, wording in enumerate(wordings):
            turns = (wording,) if isinstance(wording, str) else wording
            name = f"{fill.__name__}_{number}"
            TEMPLATES.append(QuestionTemplate(family, category, name, number == 1, turns, fill))
        return fill

    return register


def with_article(noun: str) -> str:
    """`noun` with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capitalise(text: str) -> str:
    """`text` with its first letter upper-case, the rest as it is."""
    return text[0].upper() + text[1:]
