"""Question templates, functions that fill them with random words, and the random choices
themselves.

A *skill* is a function that returns random words for a question and the complete answer. A
*template* is one wording of this question.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

Turns = list[tuple[str, str]]
T = TypeVar("T")

FAMILIES = ("multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True, slots=True)
class Draw:
    """Random choices of words and numbers for one generated conversation.

    Attributes:
        half: half of each word list from which words are drawn, 0 or 1. None means all words.
    """

    rng: random.Random
    half: int | None = None

    def _pool(self, words: Sequence[T]) -> Sequence[T]:
        return words if self.half is None else words[self.half :: 2]

    def word(self, words: Sequence[T]) -> T:
        """Return a random entry of a word list."""
        return self.rng.choice(self._pool(words))

    def words(self, words: Sequence[T], n: int) -> list[T]:
        """Return `n` different random entries of a word list."""
        return self.rng.sample(self._pool(words), n)

    def number(self, low: int, high: int, step: int = 1) -> int:
        """Return a random number from `low` to `high`, inclusive.

        Unlike word lists, numbers are not halved.
        """
        return self.rng.randrange(low, high + 1, step)


class FilledTemplate(NamedTuple):
    """Random words and the answers for one generated conversation.

    Attributes:
        gaps: words for the placeholders in the question template.
        answers: answer of each turn.
    """

    gaps: Mapping[str, Any]
    answers: Sequence[str]


Skill = Callable[[Draw], FilledTemplate]


class QuestionTemplate(NamedTuple):
    """One wording of a question, with placeholders for words.

    Attributes:
        held_out: whether the wording is combined with only half of the words in training.
        wording: question of each turn, with placeholders in braces.
        fill: function that returns words for the placeholders, and the answers.
    """

    family: str
    category: str
    name: str
    held_out: bool
    wording: tuple[str, ...]
    fill: Skill

    def write(self, draw: Draw) -> Turns:
        """Return a conversation as turns of (question, answer)."""
        gaps, answers = self.fill(draw)
        questions = (text.format(**gaps) for text in self.wording)
        return list(zip(questions, answers, strict=True))


TEMPLATES: list[QuestionTemplate] = []


def skill(family: str, category: str, *wordings: str | tuple[str, ...]) -> Callable[[Skill], Skill]:
    """Register each wording as a question template of the decorated function.

    The second one is held out.

    Held out means that training never combines this wording with the second half of the words.
    Training combines the other wordings with all words.
    """

    def register(fill: Skill) -> Skill:
        for number, wording in enumerate(wordings):
            turns = (wording,) if isinstance(wording, str) else wording
            name = f"{fill.__name__}_{number}"
            TEMPLATES.append(QuestionTemplate(family, category, name, number == 1, turns, fill))
        return fill

    return register


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capitalise(text: str) -> str:
    """Return a text with its first letter in upper case and the rest unchanged."""
    return text[0].upper() + text[1:]
