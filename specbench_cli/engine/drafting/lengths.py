"""How long a chain of draft tokens gets: a fixed length, or a rule that decides on the way.

A rule is asked once a drafted token is kept, or before anything is drafted. It sees what the draft
model said up to there and what became of earlier drafts, so each token's law stays the q that
verification is given. To take a token back for its looks would censor q, and no rule can.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Self, get_args

import torch
from pydantic import Field, field_validator
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.drafting.goodput import Drafting, Verifying, smartspec, synergy
from specbench_cli.engine.models.meter import Metered
from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Out, Outcome
from specbench_cli.engine.verify.choosing import Pick
from specbench_cli.errors import MethodFault

LengthRule = Literal[
    "heuristic", "confidence", "entropy", "acceptance-head", "oracle", "synergy", "smartspec"
]
RULES: tuple[LengthRule, ...] = get_args(LengthRule)
BY_LOAD = ("synergy", "smartspec")
"""Rules that decide for all sequences of a step at once, by what forwards cost."""

START = 5
"""Where the heuristic starts: transformers' number of assistant tokens while it was the default."""


class Length(ABC):
    """How many tokens a chain gets, for one prompt.

    Attributes:
        drafted: tokens of the chain that were drafted so far.
        most: bound on the chain that was begun; it may be 0.
    """

    drafted = 0
    most = sys.maxsize

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

    length: int | LengthRule = Field(
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

    acceptance: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="share of tested draft tokens that stand, profiled beforehand: synergy goes by"
        " it, smartspec begins with it",
    )

    @property
    def upper_bound(self) -> bool:
        """Whether the length is read from vanilla's output."""
        return self.length == "oracle"

    @property
    def by_load(self) -> bool:
        """Whether a length depends on what is decoded in the same step, and on what that costs."""
        return self.length in BY_LOAD

    @property
    def levels(self) -> int:
        """Most draft tokens a step."""
        return self.length if isinstance(self.length, int) else self.max


# ---- rules that stop by what is known of a token ------------------------------------------------

CONFIDENCE = 0.4
"""transformers' threshold before it has learnt one."""
SAMPLES = 5
"""So many tested tokens, or fewer, teach no threshold."""
ENTROPY = 1.5
REJECTION = 0.3

Predictor = Callable[[Tensor], Tensor]
"""From the rows [n, hidden] that leave a draft model's last layer at n tokens to the chances [n]
that these are accepted."""


class Stopping(Length):
    """Stops by a signal of the newest token; behind an EOS, and at the most tokens, in any case."""

    def __init__(self, session: Session, most: int) -> None:
        self._session = session
        self._most = most
        self._eos = session.requests[0].stop.eos

    def goes_on(self, out: Out, pick: Pick) -> bool:
        """See `Length`."""
        signal = self.signal(out, pick)  # on its way before the wait for the token
        token, *said = host.each(pick[0], *(() if signal is None else (signal,)))
        wanted = all(map(self.accepts, said))
        return wanted and self.drafted < self._most and token not in self._eos

    @abstractmethod
    def signal(self, out: Out, pick: Pick) -> Tensor | None:
        """What the decision needs to know, one number on the device; None: it is to go on."""

    @abstractmethod
    def accepts(self, signal: float) -> bool:
        """Whether the signal says to go on."""

    def law(self, out: Out, pick: Pick) -> Tensor:
        """The law [V] of the newest token: what it was drawn from, or the draft's if not drawn."""
        if pick[1] is not None:
            return pick[1][0]
        assert out.logits is not None
        row = out.logits[0, -1, : self._session.target.vocab_size]
        greedy = self._session.sampling.rule == "greedy"
        return row.float().softmax(-1) if greedy else self._session.warp(row)


class Confidence(Stopping):
    """Stops after a token that the draft gave a probability below a threshold.

    transformers' dynamic assisted generation. Without a threshold given it learns one from the
    tokens that were tested, as transformers does where scikit-learn is there.
    """

    def __init__(self, session: Session, most: int, threshold: float | None) -> None:
        super().__init__(session, most)
        self._learns = threshold is None
        self.threshold = CONFIDENCE if threshold is None else threshold
        self._drafted: list[float] = []
        self._tested: list[tuple[float, bool]] = []  # ascending

    def begin(self) -> None:
        """See `Length`."""
        super().begin()
        self._drafted.clear()

    def signal(self, out: Out, pick: Pick) -> Tensor:
        """The draft's probability of the token."""
        return self.law(out, pick)[pick[0]]

    def accepts(self, signal: float) -> bool:
        """See `Stopping`."""
        self._drafted.append(signal)
        return signal >= self.threshold

    def observe(self, outcome: Outcome) -> None:
        """Learn from the tokens that were tested; all but a rejected last one stood."""
        if not self._learns:
            return
        stood = len(outcome.path)
        for at, chance in enumerate(self._drafted[: outcome.tested]):
            insort(self._tested, (chance, at < stood))
        self.threshold = learnt(self._tested) or self.threshold


def learnt(tested: Sequence[tuple[float, bool]]) -> float | None:
    """The threshold that would have erred least: fpr + 3 (1 - tpr), of all on the ROC curve.

    Args:
        tested: the probability that each token had, ascending, and whether it stood.
    Returns:
        None for too few tokens, or where all stood or none did.
    """
    stood = sum(right for _, right in tested)
    fell = len(tested) - stood
    if len(tested) <= SAMPLES or not stood or not fell:
        return None
    best, least, kept, passed = tested[-1][0], 4.0, 0, 0
    for at in range(len(tested) - 1, -1, -1):
        chance, right = tested[at]
        kept, passed = kept + right, passed + (not right)
        if at and tested[at - 1][0] == chance:
            continue  # a threshold takes in all tokens of one probability
        cost = passed / fell + 3 * (1 - kept / stood)
        if cost < least:
            best, least = chance, cost
    return best


class Entropy(Stopping):
    """Stops after a token whose law had an entropy above a threshold, in nats."""

    def __init__(self, session: Session, most: int, threshold: float | None) -> None:
        super().__init__(session, most)
        self._threshold = ENTROPY if threshold is None else threshold

    def signal(self, out: Out, pick: Pick) -> Tensor:
        """The entropy of the law that the token stands for."""
        entropy: Tensor = torch.special.entr(self.law(out, pick)).sum()
        return entropy

    def accepts(self, signal: float) -> bool:
        """See `Stopping`."""
        return signal <= self._threshold


class AcceptanceHead(Stopping):
    """Stops once a rejection among the tokens drafted is likelier than a threshold (SpecDec++).

    A token's chance to stand is read off the row that the draft makes of it, which it does with the
    next token: the newest one counts as accepted, and of a first one nothing is known.

    Args:
        predict: a trained head.
        threshold: None for `REJECTION`.
        least: tokens that are drafted in any case.
    """

    def __init__(
        self,
        session: Session,
        most: int,
        threshold: float | None,
        predict: Predictor,
        *,
        least: int = 1,
    ) -> None:
        super().__init__(session, most)
        self._threshold = REJECTION if threshold is None else threshold
        self._predict = predict
        self._least = least

    def begin(self) -> None:
        """See `Length`."""
        super().begin()
        self._all_stand = 1.0

    def signal(self, out: Out, pick: Pick) -> Tensor | None:
        """The chance of the token before the newest one; nothing for the committed one."""
        return self._predict(out.hidden[0, -1:]) if self.drafted > 1 else None

    def accepts(self, signal: float) -> bool:
        """See `Stopping`."""
        self._all_stand *= signal
        return self.drafted < self._least or 1 - self._all_stand <= self._threshold


class Oracle(Stopping):
    """Stops at the first token that will be rejected: it knows vanilla's output.

    No rule that decides after the newest token needs fewer target forwards. Without that output, it
    never stops.
    """

    def begin(self) -> None:
        """See `Length`."""
        super().begin()
        self._at = len(self._session.output())

    def signal(self, out: Out, pick: Pick) -> Tensor:
        """The token itself."""
        return pick[0]

    def accepts(self, signal: float) -> bool:
        """See `Stopping`."""
        reference, at = self._session.harness.reference, self._at + self.drafted - 1
        return reference is None or (at < len(reference) and signal == reference[at])


# ---- lengths for all sequences of a step ---------------------------------------------------------

PROBE = 16
"""Steps without a draft after which one token is drafted, since nothing is learnt from none."""

TRUST = 8.0
"""Tested tokens that what was known beforehand counts as."""

CROWDS = (1, 2, 4, 8, 16, 32, 64)
"""Sequences in a step that `Synergy` looks lengths up for."""


class ByLoad(Length):
    """A number of tokens that a policy sets for every sequence of a step at once.

    Args:
        target, draft: what verifying and drafting cost.
        most: bound on the length.
        acceptance: share of tested draft tokens that stand, as far as it is known beforehand.

    Attributes:
        learns: whether it goes by what became of earlier drafts.
    """

    learns = False

    def __init__(
        self, session: Session, most: int, acceptance: float, target: Verifying, draft: Drafting
    ) -> None:
        self._session, self._bound, self._known = session, most, acceptance
        self._target, self._draft = target, draft
        self._stood = self._tested = 0
        self._idle = 0  # steps without a draft, one after another
        session.harness.policy = self

    def begin(self) -> None:
        """See `Length`: the first sequence of a step decides for all."""
        super().begin()
        beside: list[Self] = [session.harness.policy for session in self._session.harness.beside]
        if beside[0] is self:
            for policy, length in zip(beside, self.lengths(beside), strict=True):
                policy.most = length
        self._idle = 0 if self.most else self._idle + 1
        if self.learns and self._idle > PROBE:
            self.most, self._idle = min(1, self._session.room()), 0

    @abstractmethod
    def lengths(self, beside: Sequence[Self]) -> list[int]:
        """The length of each sequence of a step, no longer than there is room for."""

    def goes_on(self, out: Out, pick: Pick) -> bool:
        """See `Length`."""
        return self.drafted < self.most

    @property
    def room(self) -> int:
        """Most tokens of use."""
        return min(self._bound, self._session.room())

    def observe(self, outcome: Outcome) -> None:
        """Count: accepted over tested is the maximum-likelihood estimate, since a chain's length
        cuts it off (accepted over drafted is too low)."""
        self._stood += len(outcome.path)
        self._tested += outcome.tested

    def alpha(self, expected: float) -> float:
        """The chance that a token stands, shrunk to what is expected."""
        return (self._stood + TRUST * expected) / (self._tested + TRUST)


class Synergy(ByLoad):
    """The length for so many sequences, looked up: see `synergy`. Between two sizes of the table
    that of the larger one holds."""

    def __init__(
        self, session: Session, most: int, acceptance: float, target: Verifying, draft: Drafting
    ) -> None:
        super().__init__(session, most, acceptance, target, draft)
        self._table: dict[int, int] = {}

    def lengths(self, beside: Sequence[Self]) -> list[int]:
        """See `ByLoad`."""
        crowd = next((size for size in CROWDS if size >= len(beside)), CROWDS[-1])
        if crowd not in self._table:
            known, bound = self._known, self._bound
            self._table[crowd] = synergy(known, crowd, bound, self._target, self._draft)
        return [min(self._table[crowd], each.room) for each in beside]


class SmartSpec(ByLoad):
    """The lengths with the most goodput: see `smartspec`. A sequence's chances are shrunk to those
    of all beside it, and these to what is known beforehand."""

    learns = True

    def lengths(self, beside: Sequence[Self]) -> list[int]:
        """See `ByLoad`."""
        stood, tested = (sum(getattr(each, of) for each in beside) for of in ("_stood", "_tested"))
        shared = (stood + TRUST * self._known) / (tested + TRUST)
        alphas = [each.alpha(shared) for each in beside]
        return smartspec(alphas, [each.room for each in beside], self._target, self._draft)


def rule_of(
    params: LengthParams,
    session: Session,
    predict: Predictor | None = None,
    *,
    model: Metered | None = None,
) -> Length:
    """The length that a method's parameters ask for.

    Args:
        predict: a trained head, for "acceptance-head".
        model: what drafts, for rules that ask what its forwards cost.
    """
    most, threshold = params.max, params.threshold
    match params.length:
        case "heuristic":
            return Heuristic(most)
        case "confidence":
            return Confidence(session, most, threshold)
        case "entropy":
            return Entropy(session, most, threshold)
        case "oracle":
            return Oracle(session, most)
        case "acceptance-head":
            if predict is None:
                raise MethodFault("length 'acceptance-head' needs a trained head")
            return AcceptanceHead(session, most, threshold, predict)
        case "synergy" | "smartspec":
            if model is None:
                raise MethodFault(f"length {params.length!r} needs to know which model drafts")
            rule = Synergy if params.length == "synergy" else SmartSpec
            draft = partial(session.harness.drafting_cost, model)
            return rule(session, most, params.acceptance, session.harness.step_cost, draft)
        case length:
            return Fixed(length)
