"""Conversations of several turns in which the questions determine the correct answers."""

from collections.abc import Callable
from typing import NamedTuple

from specbench_cli.training.generated.template import Draw, Turns


class Workflow(NamedTuple):
    """A kind of conversation, with a function that generates an example of it.

    The prompts of the conversation determine each correct answer, so answers can be scored.
    """

    family: str
    category: str
    name: str
    write: Callable[[Draw], Turns]
