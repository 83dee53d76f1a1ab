"""Conversations of several turns whose answers follow from the questions."""

from collections.abc import Callable
from typing import NamedTuple

from specbench_cli.training.generated.template import Draw, Turns


class Workflow(NamedTuple):
    """One form of a conversation of several turns whose answers follow from the questions alone."""

    family: str
    category: str
    name: str
    write: Callable[[Draw], Turns]
