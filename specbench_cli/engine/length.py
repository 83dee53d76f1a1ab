"""How long a chain of draft tokens gets: a fixed length, or a rule that decides on the way.

A rule is asked once a drafted token is kept. It sees what the draft model said up to there and what
became of earlier drafts, so each token's law stays the q that verification is given. To take a
token back for its looks would censor q, and no rule can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from specbench_cli.engine.choosing import Pick
from specbench_cli.engine.decoder import State
from specbench_cli.engine.meter import Metered
from specbench_cli.engine.method import MethodParams
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Draft, Out, Outcome, Tokens

Rule = Literal["heuristic", "confidence", "entropy", "acceptance-head", "oracle"]
RULES: tuple[Rule, ...] = get_args(Rule)

START = 5
"""Where the heuristic starts: transformers' number of assistant tokens while it was the default."""


class Length(ABC):
    """How many tokens a chain gets, for one prompt.

    Attributes:
        drafted: tokens of the chain that were drafted so far.
    """

    drafted = 0

    def begin(self) -> None:
        """A new chain."""
        self.drafted = 0

    def more(self, out: Out, pick: Pick) -> bool:
        """Whether to draft another token.

        Args:
            out: the draft model's forward that the newest token was picked from.
            pick: that token, which stays in the chain whatever the answer.
        """
        self.drafted += 1
        return self.goes_on(out, pick)

    @abstractmethod
    def goes_on(self, out: Out, pick: Pick) -> bool:
        """See `more`; the newest token is counted."""

    def observe(self, outcome: Outcome) -> None:
        """Learn what was committed of the last chain."""


class Fixed(Length):
    """The same number of tokens in every step."""

    def __init__(self, length: int) -> None:
        self._length = length

    def goes_on(self, out: Out, pick: Pick) -> bool:
        """See `Length`."""
        return self.drafted < self._length


class Heuristic(Length):
    """Two tokens more after a chain that stood as a whole, one less after any other.

    transformers' schedule "heuristic_transient": it starts anew with each prompt.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.length = min(START, most)

    def goes_on(self, out: Out, pick: Pick) -> bool:
        """See `Length`."""
        return self.drafted < self.length

    def observe(self, outcome: Outcome) -> None:
        """Lengthen or shorten."""
        stood = len(outcome.path) == self.drafted
        self.length = min(self.length + 2, self._most) if stood else max(1, self.length - 1)


class LengthParams(MethodParams):
    """Parameters of a method whose draft model drafts chains."""

    length: int | Rule = Field(
        5,
        description="draft tokens a step (gamma in Leviathan et al., K in Chen et al.), or the rule"
        " that decides",
    )
    max: int = Field(20, ge=1, description="most draft tokens a step under a rule")
    threshold: float | None = Field(
        None,
        ge=0,
        description="where a rule stops: below a confidence (learnt online if not given), above an"
        " entropy in nats (1.5) or above a chance of rejection (acceptance-head, 0.3)",
    )

    @field_validator("length", mode="before")
    @classmethod
    def _number_or_rule(cls, value: Any) -> Any:
        if type(value) is not int and value not in RULES:
            raise ValueError(f"must be a whole number, or {', '.join(RULES)}; got {value!r}")
        if type(value) is int and value < 1:
            raise ValueError(f"must be at least 1, got {value}")
        return value

    @property
    def levels(self) -> int:
        """Most draft tokens a step."""
        return self.length if isinstance(self.length, int) else self.max


def draft_chain(
    session: Session, model: Metered, state: State, length: Length, limit: int
) -> Draft:
    """Draft a chain: feed the model what it has not seen, then token by token what it says.

    Args:
        model, state: a draft model that was prefilled.
        length: decides when the chain is long enough.
        limit: most tokens of use.
    """
    picks: list[Pick] = []
    length.begin()
    x = session.since(state.length())
    while len(picks) < limit:
        out = model.forward(x, state)
        picks.append(session.pick(out, len(picks)))
        if not length.more(out, picks[-1]):
            break
        x = Tokens(picks[-1][0][None])
    return session.drawn(picks)
