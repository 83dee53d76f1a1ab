"""Rules that end a chain of draft tokens by what is known of them."""

from __future__ import annotations

from abc import abstractmethod
from bisect import insort
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbench_cli.engine.choosing import Pick
from specbench_cli.engine.length import Fixed, Heuristic, Length, LengthParams
from specbench_cli.engine.session import Session
from specbench_cli.engine.types import Out, Outcome
from specbench_cli.errors import MethodFault

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
        token = int(pick[0])
        wanted = signal is None or self.accepts(float(signal))
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
        reference, at = self._session.reference, self._at + self.drafted - 1
        return reference is None or (at < len(reference) and signal == reference[at])


def rule_of(params: LengthParams, session: Session, predict: Predictor | None = None) -> Length:
    """The length that a method's parameters ask for.

    Args:
        predict: a trained head, for "acceptance-head".
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
        case length:
            return Fixed(length)
