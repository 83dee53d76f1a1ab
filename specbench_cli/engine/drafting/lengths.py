"""Draft length rules for chains: a fixed length, or a rule that decides after each token.

A rule decides whether the draft model drafts another token. It may use the draft model's outputs so
far and the outcomes of earlier drafts. It cannot remove a token from the chain. Verification
assumes that each token was drawn from its draft distribution q. Removing tokens by their
probability would break this assumption.
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
"""Initial length of the heuristic, as in transformers when the heuristic was its default."""


@renamed_members(more="should_continue", goes_on="continues_after")
class Length(ABC):
    """Rule for the draft length of chains, for one prompt.

    Attributes:
        drafted: Number of draft tokens in the chain so far.
        most: Maximum length of the current chain, which may be 0.
    """

    drafted = 0
    most = sys.maxsize

    def begin(self) -> None:
        """Start a new chain."""
        self.drafted = 0

    def should_continue(self, out: ModelOutput, pick: Pick) -> bool:
        """Return True if the method should draft another token.

        Args:
            out: Output of the draft model from which the newest token was chosen.
            pick: The newest draft token. It stays in the chain.
        """
        self.drafted += 1
        return self.continues_after(out, pick)

    @abstractmethod
    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """Return True if this rule wants another token. `should_continue` calls it below the
        maximum.

        `drafted` includes the newest token.
        """

    def observe(self, outcome: Outcome) -> None:
        """Update the rule with the verification outcome of the last chain."""


class FixedLength(Length):
    """Rule with the same draft length in every step."""

    def __init__(self, length: int) -> None:
        self._length = length

    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """Return True if the chain is shorter than the fixed length."""
        return self.drafted < self._length


class HeuristicLength(Length):
    """Rule that adds two draft tokens after a fully accepted chain, and else removes one.

    It is the schedule "heuristic_transient" of transformers, which restarts for each prompt.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.length = min(INITIAL_LENGTH, most)

    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """Return True if the chain is shorter than the current length."""
        return self.drafted < self.length

    def observe(self, outcome: Outcome) -> None:
        """Increase the length after a fully accepted chain, else decrease it."""
        all_accepted = len(outcome.path) == self.drafted
        self.length = min(self.length + 2, self._most) if all_accepted else max(1, self.length - 1)


# ---- rules that stop by a signal of the newest token --------------------------------------------

DEFAULT_CONFIDENCE = 0.4
"""Initial confidence threshold of transformers."""
MAX_UNUSABLE_SAMPLES = 5
"""Learning a threshold needs more verified tokens than this."""
DEFAULT_ENTROPY = 1.5
DEFAULT_REJECTION = 0.3

Predictor = Callable[[Tensor], Tensor]
"""Function from the hidden states [n, hidden] of n draft tokens, after the last layer, to their
acceptance probabilities [n]."""


class SignalLength(Length):
    """Base class of rules that compute a number from the newest draft token.

    The number is called the signal. The chain ends if the signal says so, at EOS, or at the maximum
    length.
    """

    def __init__(self, session: Session, most: int) -> None:
        self._session = session
        self._most = most
        self._eos = session.requests[0].stop.eos

    def continues_after(self, out: ModelOutput, pick: Pick) -> bool:
        """Return True if the signal of the newest token allows another token."""
        signal = self.signal(out, pick)  # computed before the sync for the token
        token, *signals = host.to_numbers(pick[0], *(() if signal is None else (signal,)))
        continues = all(map(self.continues_at, signals))
        return continues and self.drafted < self._most and token not in self._eos

    @abstractmethod
    def signal(self, out: ModelOutput, pick: Pick) -> Tensor | None:
        """Return the signal of the newest token, a scalar on the device. None means to continue."""

    @abstractmethod
    def continues_at(self, signal: float) -> bool:
        """Return True if the chain should continue after a token with this signal."""

    def distribution(self, out: ModelOutput, pick: Pick) -> Tensor:
        """Return the distribution [V] that the newest token was drawn from.

        If the token was not drawn, return the distribution of the draft model.
        """
        if pick[1] is not None:
            return pick[1][0]
        assert out.logits is not None
        row = out.logits[0, -1, : self._session.target.vocab_size]
        greedy = self._session.sampling.rule == "greedy"
        return row.float().softmax(-1) if greedy else self._session.warp(row)


class ConfidenceLength(SignalLength):
    """Rule that stops after a token whose draft probability is below a threshold.

    It is the dynamic assisted generation of transformers. Without a given threshold, the rule
    learns a threshold from verified tokens. transformers learns it in the same way if scikit-learn
    is installed.
    """

    def __init__(self, session: Session, most: int, threshold: float | None) -> None:
        super().__init__(session, most)
        self._learns = threshold is None
        self.threshold = DEFAULT_CONFIDENCE if threshold is None else threshold
        self._drafted: list[float] = []
        self._tested: list[tuple[float, bool]] = []  # ascending

    def begin(self) -> None:
        """Start a new chain."""
        super().begin()
        self._drafted.clear()

    def signal(self, out: ModelOutput, pick: Pick) -> Tensor:
        """Return the draft probability of the newest token."""
        return self.distribution(out, pick)[pick[0]]

    def continues_at(self, signal: float) -> bool:
        """Return True if the draft probability reaches the threshold."""
        self._drafted.append(signal)
        return signal >= self.threshold

    def observe(self, outcome: Outcome) -> None:
        """Learn the threshold from the verified tokens. Only the last of them can be rejected."""
        if not self._learns:
            return
        accepted = len(outcome.path)
        for at, chance in enumerate(self._drafted[: outcome.tested]):
            insort(self._tested, (chance, at < accepted))
        self.threshold = learn_threshold(self._tested) or self.threshold


def learn_threshold(tested: Sequence[tuple[float, bool]]) -> float | None:
    """Return the threshold on the ROC curve that minimizes fpr + 3 (1 - tpr).

    fpr and tpr are the false and true positive rates of predicting acceptance.

    Args:
        tested: Pairs of a token's draft probability and whether the target accepted it, in
            ascending order of the probability.

    Returns:
        None if there are too few tokens, or if all or none of them were accepted.
    """
    num_accepted = sum(was_accepted for _, was_accepted in tested)
    num_rejected = len(tested) - num_accepted
    if len(tested) <= MAX_UNUSABLE_SAMPLES or not num_accepted or not num_rejected:
        return None
    best, least, kept, passed = tested[-1][0], 4.0, 0, 0
    for at in range(len(tested) - 1, -1, -1):
        chance, was_accepted = tested[at]
        kept, passed = kept + was_accepted, passed + (not was_accepted)
        if at and tested[at - 1][0] == chance:
            continue  # no threshold separates tokens of equal probability
        cost = passed / num_rejected + 3 * (1 - kept / num_accepted)
        if cost < least:
            best, least = chance, cost
    return best


class EntropyLength(SignalLength):
    """Rule that stops after a token whose draft distribution has a high entropy.

    The threshold is in nats.
    """

    def __init__(self, session: Session, most: int, threshold: float | None) -> None:
        super().__init__(session, most)
        self._threshold = DEFAULT_ENTROPY if threshold is None else threshold

    def signal(self, out: ModelOutput, pick: Pick) -> Tensor:
        """Return the entropy of the newest token's draft distribution."""
        entropy: Tensor = torch.special.entr(self.distribution(out, pick)).sum()
        return entropy

    def continues_at(self, signal: float) -> bool:
        """Return True if the entropy does not exceed the threshold."""
        return signal <= self._threshold


class AcceptanceHeadLength(SignalLength):
    """Rule of SpecDec++: stop when the chain probably contains a rejected token.

    A trained head predicts from the hidden state of a token whether the target accepts it. The
    draft model computes this hidden state only when it drafts the next token. So the rule lacks a
    prediction for the newest token, and has no signal after the first token.

    Args:
        predict: The trained head.
        threshold: Maximum probability that any token is rejected. None uses `DEFAULT_REJECTION`.
        min_length: Minimum number of draft tokens.
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
        """Start a new chain."""
        super().begin()
        self._all_accepted = 1.0

    def signal(self, out: ModelOutput, pick: Pick) -> Tensor | None:
        """Return the predicted acceptance probability of the token before the newest one.

        Return None if the newest token is the first draft token.
        """
        return self._predict(out.hidden[0, -1:]) if self.drafted > 1 else None

    def continues_at(self, signal: float) -> bool:
        """Return True unless the probability of any rejection so far exceeds the threshold."""
        self._all_accepted *= signal
        return self.drafted < self._min_length or 1 - self._all_accepted <= self._threshold


class OracleLength(SignalLength):
    """Rule that stops at the first draft token that verification will reject.

    The rule knows this from the output of vanilla decoding. It is an upper bound: no rule that
    decides after the newest token needs fewer target forwards. Without vanilla's output, the rule
    never stops.
    """

    def begin(self) -> None:
        """Start a new chain."""
        super().begin()
        self._at = len(self._session.output())

    def signal(self, out: ModelOutput, pick: Pick) -> Tensor:
        """Return the newest token itself, as the signal."""
        return pick[0]

    def continues_at(self, signal: float) -> bool:
        """Return True if the newest token equals the token in vanilla's output."""
        reference, at = self._session.harness.reference, self._at + self.drafted - 1
        return reference is None or (at < len(reference) and signal == reference[at])
