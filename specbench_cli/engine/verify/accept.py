"""Lossy accept rules: draft tokens that are kept although the lossless rule rejects them.

The lossless rule of the decoding mode (`chain`, `siblings`) decides first, and its tokens are
"accepted". A token that it rejects and an accept rule lets pass is "relaxed", and verification
continues after it. The first token that both reject is replaced by the lossless rule's token.
Without an accept rule, or with one at its off position, tokens and draws are unchanged.

Most accept rules are a pure function of the target's distributions and the draft's tokens. Under
rejection and coupled sampling these are the warped ones; under greedy decoding, which has no
temperature, softmax of the logits. A rule that needs more overrides `passing` (`Places`).

Compare a rule with its control, `RandomAccept`, which lets tokens pass at random.

Plans read the rules and their parameters, so this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from specbench_cli.engine.params import MethodParams
from specbench_cli.engine.types import Guarantee
from specbench_cli.errors import MethodFault

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_cli.engine.verify.random import Random

NEVER = 1e9
"""Times the probability of the least likely token of any vocabulary, it is more than 1."""

# ---- the rules ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Draft tokens with all that an accept rule may ask of their places, m of them.

    tokens: [m] int64. parents: of each, its parent's index, `ROOT` for the root.
    p: [m, V], the target's distribution in each token's place, at its parent.
    q: [m, V], what each was drawn from; None where tokens were chosen.
    scores: [m, V], what the target's choice is the greatest of, in each token's place; None where
        it is drawn.
    features: [m, width], what `session.capture_layers` asked of the target's rows that have read
        each token; None where nothing did.
    """

    tokens: Tensor
    parents: Sequence[int]
    p: Tensor
    q: Tensor | None = None
    scores: Tensor | None = None
    features: Tensor | None = None


@dataclass(frozen=True)
class AcceptRule:
    """Base of accept rules: a frozen dataclass of its numbers, and one function: `lets_pass`, or
    `passing` where the target's distribution does not say it.

    Class attributes:
        name: in tables and records.
        guarantee: what is left of the output's promise.
        pure: whether `lets_pass` alone says what passes, but for `chance`.
    """

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = "quality_only"
    pure: ClassVar[bool] = True

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Which draft tokens stand though the lossless rule rejects them.

        Args:
            p: [m, V], the target's distribution in each token's place, at its parent.
            tokens: [m] int64.
        Returns:
            [m] bool.
        """
        raise MethodFault(f"the rule {self.name} does not decide by p and tokens: see `passing`")

    def relaxed_mask(self, places: DraftContext, random: Random) -> Tensor:
        """Which of some draft tokens pass, [m] bool: those that `lets_pass`, each by `chance`."""
        passes = self.lets_pass(places.p, places.tokens)
        if self.chance == 1:
            return passes
        from specbench_cli.engine.verify.random import toss_per_parent

        return passes & toss_per_parent(self.chance, places.parents, places.p, random)

    @property
    def chance(self) -> float:
        """The chance that a token which may pass does; tossed once for the children of a node."""
        return 1.0

    @property
    def stricter(self) -> AcceptRule | None:
        """The same rule with its numbers nearer to their off position: it lets pass no token that
        this one does not. None where a rule says of none."""
        return None

    @property
    def is_exact(self) -> bool:
        """Whether no token can pass: the method is then exact."""
        return False

    def control(self, rate: float) -> RandomAccept:
        """The rule that lets as many pass, whatever they are.

        Args:
            rate: of the levels that the lossless rule rejected, the share that this rule let pass,
                as measured (`rule rate` in reports).
        """
        return RandomAccept(rate)

    def __str__(self) -> str:
        told = (f.name for f in fields(self) if f.repr)
        numbers = ", ".join(f"{name}={getattr(self, name):g}" for name in told)
        return f"{self.name}({numbers})"


@dataclass(frozen=True)
class Threshold(AcceptRule):
    """Lets pass what the target gives at least a probability of epsilon.

    Every committed token then has that probability at least, or is the lossless rule's.
    """

    epsilon: float
    name: ClassVar[str] = "threshold"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(x) >= epsilon."""
        return _gather_tokens(p, tokens) >= self.epsilon

    @property
    def is_exact(self) -> bool:
        """Above 1."""
        return self.epsilon > 1

    @property
    def stricter(self) -> AcceptRule:
        """Twice the probability."""
        return replace(self, epsilon=2 * self.epsilon)


@dataclass(frozen=True)
class Typical(AcceptRule):
    """Typical acceptance: the less sure the target is, the less a token needs.

    Tianle Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
    Heads, ICML 2024, arXiv:2401.10774, section 2.3.1. There it judges all draft tokens, and the
    first one is taken in any case; here it is asked of those that the lossless rule rejects.
    """

    epsilon: float
    delta: float
    name: ClassVar[str] = "typical"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(x) > min(epsilon, delta exp(-H(p)))."""
        import torch

        entropy: Tensor = torch.special.entr(p).sum(-1)
        return _gather_tokens(p, tokens) > (self.delta * (-entropy).exp()).clamp_max(self.epsilon)

    @property
    def is_exact(self) -> bool:
        """Where not even what is sure can pass: an entropy is at most the log of the vocabulary's
        size."""
        return self.epsilon >= 1 and self.delta >= NEVER

    @property
    def stricter(self) -> AcceptRule:
        """Twice of both."""
        return replace(self, epsilon=2 * self.epsilon, delta=2 * self.delta)


@dataclass(frozen=True)
class Lenient(AcceptRule):
    """Lenience: a token stands as if the target made it so many times as likely.

    Yaniv Leviathan, Matan Kalman, Yossi Matias: Fast Inference from Transformers via Speculative
    Decoding, ICML 2023, arXiv:2211.17192, appendix A.5: q(x) is multiplied by the factor before it
    is compared with p(x). Where tokens are chosen, factor times the best one's p takes q's place.
    """

    factor: float
    name: ClassVar[str] = "lenient"
    pure: ClassVar[bool] = False

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(x) >= factor max p."""
        return _gather_tokens(p, tokens) >= self.factor * p.amax(-1)

    def relaxed_mask(self, places: DraftContext, random: Random) -> Tensor:
        """Drawn: a token that the lossless rule rejects, which it does with probability 1 -
        min(1, p/q), passes so often that it stands with probability min(1, p / (factor q)) in all.
        Chosen: if its score would be the greatest, were p(x) 1 / factor times as much."""
        if places.scores is not None:
            lead = places.scores.amax(-1) - _gather_tokens(places.scores, places.tokens)
            return lead <= -math.log(self.factor) if self.factor > 0 else lead < math.inf
        p, q = (
            _gather_tokens(places.p, places.tokens),
            1.0 if places.q is None else _gather_tokens(places.q, places.tokens),
        )
        strict = (p / q).clamp_max(1.0)
        lenient = (p / (self.factor * q)).clamp_max(1.0) if self.factor > 0 else (p > 0).to(p)
        # Where the lossless rule takes all, nothing is left to pass.
        return random.bernoulli((lenient - strict) / (1 - strict).clamp_min(1e-12)).bool()

    @property
    def is_exact(self) -> bool:
        """At factor 1."""
        return self.factor >= 1

    @property
    def stricter(self) -> AcceptRule:
        """Half way to 1."""
        return replace(self, factor=(1 + self.factor) / 2)


@dataclass(frozen=True)
class RandomAccept(AcceptRule):
    """The control of every accept rule: lets a token pass at a fixed rate, whatever it is.

    Of a tree a toss decides for the children of a node together, so that as many levels pass,
    however many children there are.
    """

    rate: float
    name: ClassVar[str] = "random"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """All of them."""
        import torch

        return torch.ones_like(tokens, dtype=torch.bool)

    @property
    def chance(self) -> float:
        """The rate."""
        return self.rate

    @property
    def is_exact(self) -> bool:
        """At rate 0."""
        return self.rate <= 0


def _gather_tokens(p: Tensor, tokens: Tensor) -> Tensor:
    return p.gather(-1, tokens[:, None])[:, 0]


# ---- parameters ---------------------------------------------------------------------------------


class AcceptParams(MethodParams):
    """Parameters of a method that takes an accept rule: the first of the bases of its own."""

    accept: Literal["exact", "threshold", "typical", "lenient", "random"] = Field(
        "exact",
        description="what stands: what the lossless rule takes (exact), and beside it what the"
        " target finds likely enough (threshold, typical, lenient) or any token at a rate (random:"
        " their control)",
    )
    epsilon: float = Field(
        0.09,
        ge=0,
        description="threshold, typical: least probability of what passes; threshold above 1: none",
    )
    delta: float = Field(
        0.3, ge=0, description="typical: least probability, as a part of exp(-entropy)"
    )
    factor: float = Field(
        0.5, ge=0, le=1, description="lenient: so much of q, or of the best token's p, is enough"
    )
    rate: float = Field(
        0.1, ge=0, le=1, description="random: share of the rejected levels that pass"
    )
    like: str | None = Field(
        None, description="random: the row whose rate, as measured, takes the place of `rate`"
    )

    @property
    def rule(self) -> AcceptRule | None:
        """The rule that these stand for."""
        match self.accept:
            case "threshold":
                return Threshold(self.epsilon)
            case "typical":
                return Typical(self.epsilon, self.delta)
            case "lenient":
                return Lenient(self.factor)
            case "random":
                return RandomAccept(self.rate)
        return None

    @model_serializer(mode="wrap")
    def _serialize_used(self, written: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without the parameters of rules that are not asked."""
        rule = self.rule
        asked = set() if rule is None else {"accept", *(f.name for f in fields(rule))}
        if self.accept == "random" and self.like is not None:
            asked.add("like")
        unasked = {*AcceptParams.model_fields} - asked
        return {name: value for name, value in written(self).items() if name not in unasked}
