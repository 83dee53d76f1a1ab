"""Conversations of several turns whose answers follow from the questions."""

from collections.abc import Callable
from typing import NamedTuple

from specbench_cli.training.generated.template import Draw, Turns


class Workflow(NamedTuple):
    """A kind of conversation, with a function that generates one.

    Each answer follows from the prompts of the conversation, so it can be scored.
    """

    family: str
    category: str
    name: str
    write: Callable[[Draw], Turns]
