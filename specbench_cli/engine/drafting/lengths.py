"""How long a chain of draft tokens gets: a fixed length, or a rule that decides on the way.

A rule is asked once a drafted token is kept, or before anything is drafted. It sees what the draft
model said up to there and what became of earlier drafts, so each token's distribution stays the q
that verification is given. To take a token back for its looks would censor q, and no rule can.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbench_cli.engine import host
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import ModelOutput, Outcome
from specbench_cli.engine.verify.choosing import Pick
from specbench_cli.former_names import renamed_members

INITIAL_LENGTH = 5
"""Where the heuristic starts: transformers' number of assistant tokens while it was the default."""


@renamed_members(more="should_continue", goes_on="continues_after")
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

    def should_continue(self, out: ModelOutput, pick: Pick) -> bool:
        """Whether to draft another token.

        Args:
            out: the draft model's forward that the newest token was picked from.
            pick: that token, which stays in the chain whatever the answer.
        """
        self.drafted += 1
        return self.continues_after(out, pick)

    @abstractmethod
    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """See `more`; the newest token is counted."""

    def observe(self, outcome: Outcome) -> None:
        """Learn what was committed of the last chain."""


class FixedLength(Length):
    """The same number of tokens in every step."""

    def __init__(self, length: int) -> None:
        self._length = length

    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """See `Length`."""
        return self.drafted < self._length


class HeuristicLength(Length):
    """Two tokens more after a chain that stood as a whole, one less after any other.

    transformers' schedule "heuristic_transient": it starts anew with each prompt.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.length = min(INITIAL_LENGTH, most)

    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """See `Length`."""
        return self.drafted < self.length

    def observe(self, outcome: Outcome) -> None:
        """Lengthen or shorten."""
        stood = len(outcome.path) == self.drafted
        self.length = min(self.length + 2, self._most) if stood else max(1, self.length - 1)


# ---- rules that stop by what is known of a token ------------------------------------------------

DEFAULT_CONFIDENCE = 0.4
"""transformers' threshold before it has learnt one."""
MAX_UNUSABLE_SAMPLES = 5
"""So many tested tokens, or fewer, teach no threshold."""
DEFAULT_ENTROPY = 1.5
DEFAULT_REJECTION = 0.3

Predictor = Callable[[Tensor], Tensor]
"""From the rows [n, hidden] that leave a draft model's last layer at n tokens to the chances [n]
that these are accepted."""


class SignalLength(Length):
    """Stops by a signal of the newest token; behind an EOS, and at the most tokens, in any case."""

    def __init__(self, session: Session, most: int) -> None:
        self._session = session
        self._most = most
        self._eos = session.requests[0].stop.eos

    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """See `Length`."""
        signal = self.signal(out, pick)  # on its way before the wait for the token
        token, *said = host.to_numbers(pick[0], *(() if signal is None else (signal,)))
        wanted = all(map(self.continues_at, said))
        return wanted and self.drafted < self._most and token not in self._eos

    @abstractmethod
    def signal(self, out: ModelOutput, pick: Pick) -> Tensor | None:
        """What the decision needs to know, one number on the device; None: it is to go on."""

    @abstractmethod
    def continues_at(self, signal: float) -> bool:
        """Whether the signal says to go on."""

    def distribution(self, out: ModelOutput, pick: Pick) -> Tensor:
        """The distribution [V] of the newest token: what it was drawn from, or the draft's if not
        drawn."""
        if pick[1] is not None:
            return pick[1][0]
        assert out.logits is not None
        row = out.logits[0, -1, : self._session.target.vocab_size]
        greedy = self._session.sampling.rule == "greedy"
        return row.float().softmax(-1) if greedy else self._session.warp(row)


class ConfidenceLength(SignalLength):
    """Stops after a token that the draft gave a probability below a threshold.

    transformers' dynamic assisted generation. Without a threshold given it learns one from the
    tokens that were tested, as transformers does where scikit-learn is there.
    """

    def __init__(self, session: Session, most: int, threshold: float | None) -> None:
        super().__init__(session, most)
        self._learns = threshold is None
        self.threshold = DEFAULT_CONFIDENCE if threshold is None else threshold
        self._drafted: list[float] = []
        self._tested: list[tuple[float, bool]] = []  # ascending

    def begin(self) -> None:
        """See `Length`."""
        super().begin()
        self._drafted.clear()

    def signal(self, out: ModelOutput, pick: Pick) -> Tensor:
        """The draft's probability of the token."""
        return self.distribution(out, pick)[pick[0]]

    def continues_at(self, signal: float) -> bool:
        """See `SignalLength`."""
        self._drafted.append(signal)
        return signal >= self.threshold

    def observe(self, outcome: Outcome) -> None:
        """Learn from the tokens that were tested; all but a rejected last one stood."""
        if not self._learns:
            return
        stood = len(outcome.path)
        for at, chance in enumerate(self._drafted[: outcome.tested]):
            insort(self._tested, (chance, at < stood))
        self.threshold = learn_threshold(self._tested) or self.threshold


def learn_threshold(tested: Sequence[tuple[float, bool]]) -> float | None:
    """The threshold that would have erred least: fpr + 3 (1 - tpr), of all on the ROC curve.

    Args:
        tested: the probability that each token had, ascending, and whether it stood.
    Returns:
        None for too few tokens, or where all stood or none did.
    """
    stood = sum(right for _, right in tested)
    fell = len(tested) - stood
    if len(tested) <= MAX_UNUSABLE_SAMPLES or not stood or not fell:
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


class EntropyLength(SignalLength):
    """Stops after a token whose distribution had an entropy above a threshold, in nats."""

    def __init__(self, session: Session, most: int, threshold: float | None) -> None:
        super().__init__(session, most)
        self._threshold = DEFAULT_ENTROPY if threshold is None else threshold

    def signal(self, out: ModelOutput, pick: Pick) -> Tensor:
        """The entropy of the distribution that the token stands for."""
        entropy: Tensor = torch.special.entr(self.distribution(out, pick)).sum()
        return entropy

    def continues_at(self, signal: float) -> bool:
        """See `SignalLength`."""
        return signal <= self._threshold


class AcceptanceHeadLength(SignalLength):
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
        min_length: int = 1,
    ) -> None:
        super().__init__(session, most)
        self._threshold = DEFAULT_REJECTION if threshold is None else threshold
        self._predict = predict
        self._min_length = min_length

    def begin(self) -> None:
        """See `Length`."""
        super().begin()
        self._all_accepted = 1.0

    def signal(self, out: ModelOutput, pick: Pick) -> Tensor | None:
        """The chance of the token before the newest one; nothing for the committed one."""
        return self._predict(out.hidden[0, -1:]) if self.drafted > 1 else None

    def continues_at(self, signal: float) -> bool:
        """See `SignalLength`."""
        self._all_accepted *= signal
        return self.drafted < self._min_length or 1 - self._all_accepted <= self._threshold


class OracleLength(SignalLength):
    """Stops at the first token that will be rejected: it knows vanilla's output.

    No rule that decides after the newest token needs fewer target forwards. Without that output, it
    never stops.
    """

    def begin(self) -> None:
        """See `Length`."""
        super().begin()
        self._at = len(self._session.output())

    def signal(self, out: ModelOutput, pick: Pick) -> Tensor:
        """The token itself."""
        return pick[0]

    def continues_at(self, signal: float) -> bool:
        """See `SignalLength`."""
        reference, at = self._session.harness.reference, self._at + self.drafted - 1
        return reference is None or (at < len(reference) and signal == reference[at])
