"""Lossy accept rules: draft tokens that are kept although the lossless rule rejects them.

The lossless rule of the decoding mode (`chain`, `siblings`) decides first, and its tokens are
"accepted". A token that it rejects and an accept rule lets pass is "relaxed", and verification
continues after it. The first token that both reject is replaced by the lossless rule's token.
Without an accept rule, or with one at its off position, tokens and draws are unchanged.

Most accept rules are a pure function of the target's distributions and the draft's tokens. Under
rejection and coupled sampling these are the warped ones; under greedy decoding, which has no
temperature, softmax of the logits. A rule that needs more overrides `relaxed_mask`
(`DraftContext`).

Compare a rule with its control, `RandomAccept`, which lets tokens pass at random.

Planning code imports the rules and parameters, so this module does not import torch.
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
from specbench_cli.former_names import renamed_members

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_cli.engine.verify.random import Random

NEVER = 1e9
"""Number above any vocabulary size, so its product with exp(-entropy) is more than 1."""

# ---- the rules ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Draft tokens with everything that an accept rule may use, m tokens.

    Attributes:
        tokens: [m] int64.
        parents: Index of each token's parent, `ROOT` for the root.
        p: [m, V], the target's distribution in each token's place, at its parent.
        q: [m, V], the distribution that each token was drawn from. None if tokens were chosen.
        scores: [m, V], the scores whose argmax is the target's choice, in each token's place. None
            if it is drawn.
        features: [m, width], captured features of the target's row for each token
            (`session.capture_layers`). None if none are captured.
    """

    tokens: Tensor
    parents: Sequence[int]
    p: Tensor
    q: Tensor | None = None
    scores: Tensor | None = None
    features: Tensor | None = None


@renamed_members(off="is_exact", passing="relaxed_mask")
@dataclass(frozen=True)
class AcceptRule:
    """Base of accept rules: a frozen dataclass with its parameters.

    Override `lets_pass`, or `relaxed_mask` if the rule needs more than the target's distribution.

    Class attributes:
        name: Name in tables and records.
        guarantee: Remaining guarantee of the output.
        pure: True if the result depends only on `lets_pass` and `chance`.
    """

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = "quality_only"
    pure: ClassVar[bool] = True

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return the draft tokens that are kept although the lossless rule rejects them.

        Args:
            p: [m, V], the target's distribution in each token's place, at its parent.
            tokens: [m] int64.

        Returns:
            [m] bool.
        """
        raise MethodFault(f"the rule {self.name} does not decide by p and tokens: see `passing`")

    def relaxed_mask(self, context: DraftContext, random: Random) -> Tensor:
        """Return the draft tokens to keep, [m] bool: those that `lets_pass`, each with probability
        `chance`."""
        passes = self.lets_pass(context.p, context.tokens)
        if self.chance == 1:
            return passes
        from specbench_cli.engine.verify.random import draw_per_parent

        return passes & draw_per_parent(self.chance, context.parents, context.p, random)

    @property
    def chance(self) -> float:
        """Probability that a token which may pass does. Drawn once for all children of a node."""
        return 1.0

    @property
    def stricter(self) -> AcceptRule | None:
        """The same rule with parameters closer to their exact values, or None if the rule does not
        define one.

        It keeps no token that this rule rejects.
        """
        return None

    @property
    def is_exact(self) -> bool:
        """True if no token can pass, so that the method is exact."""
        return False

    def control(self, rate: float) -> RandomAccept:
        """Return the control rule, which keeps the same share of tokens at random.

        Args:
            rate: Share of the levels rejected by the lossless rule that this rule kept, as measured
                (`rule rate` in reports).
        """
        return RandomAccept(rate)

    def __str__(self) -> str:
        names = (f.name for f in fields(self) if f.repr)
        numbers = ", ".join(f"{name}={getattr(self, name):g}" for name in names)
        return f"{self.name}({numbers})"


@dataclass(frozen=True)
class Threshold(AcceptRule):
    """Keeps tokens whose target probability is at least epsilon.

    Every committed token then has at least this probability, or comes from the lossless rule.
    """

    epsilon: float
    name: ClassVar[str] = "threshold"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(x) >= epsilon."""
        return _gather_tokens(p, tokens) >= self.epsilon

    @property
    def is_exact(self) -> bool:
        """True above 1."""
        return self.epsilon > 1

    @property
    def stricter(self) -> AcceptRule:
        """The rule with twice the epsilon."""
        return replace(self, epsilon=2 * self.epsilon)


@dataclass(frozen=True)
class Typical(AcceptRule):
    """Typical acceptance: the threshold decreases with the entropy of the target's distribution.

    Tianle Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
    Heads, ICML 2024, arXiv:2401.10774, section 2.3.1. In the paper it decides all draft tokens, and
    the first one is always accepted. Here it decides only tokens that the lossless rule rejects.
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
        """True if even a token with probability 1 cannot pass.

        The entropy is at most the logarithm of the vocabulary size.
        """
        return self.epsilon >= 1 and self.delta >= NEVER

    @property
    def stricter(self) -> AcceptRule:
        """The rule with twice the epsilon and twice the delta."""
        return replace(self, epsilon=2 * self.epsilon, delta=2 * self.delta)


@dataclass(frozen=True)
class Lenient(AcceptRule):
    """Lenience: a token is accepted as if its target probability were 1 / factor times as high.

    Yaniv Leviathan, Matan Kalman, Yossi Matias: Fast Inference from Transformers via Speculative
    Decoding, ICML 2023, arXiv:2211.17192, appendix A.5: q(x) is multiplied by the factor before it
    is compared with p(x). For tokens chosen without a draw, factor times the best token's p
    replaces q.
    """

    factor: float
    name: ClassVar[str] = "lenient"
    pure: ClassVar[bool] = False

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(x) >= factor max p."""
        return _gather_tokens(p, tokens) >= self.factor * p.amax(-1)

    def relaxed_mask(self, context: DraftContext, random: Random) -> Tensor:
        """Return the draft tokens to keep, [m] bool.

        Drawn tokens: a token that the lossless rule rejects (with probability 1 - min(1, p/q)) is
        kept so often that its total acceptance probability is min(1, p / (factor q)). Chosen
        tokens: a token is kept if its score would be the greatest with p(x) / factor in place of
        p(x).
        """
        if context.scores is not None:
            lead = context.scores.amax(-1) - _gather_tokens(context.scores, context.tokens)
            return lead <= -math.log(self.factor) if self.factor > 0 else lead < math.inf
        p, q = (
            _gather_tokens(context.p, context.tokens),
            1.0 if context.q is None else _gather_tokens(context.q, context.tokens),
        )
        strict = (p / q).clamp_max(1.0)
        lenient = (p / (self.factor * q)).clamp_max(1.0) if self.factor > 0 else (p > 0).to(p)
        # Avoid 0 / 0 where the lossless rule accepts with probability 1.
        return random.bernoulli((lenient - strict) / (1 - strict).clamp_min(1e-12)).bool()

    @property
    def is_exact(self) -> bool:
        """True at factor 1."""
        return self.factor >= 1

    @property
    def stricter(self) -> AcceptRule:
        """The rule with a factor half way to 1."""
        return replace(self, factor=(1 + self.factor) / 2)


@dataclass(frozen=True)
class RandomAccept(AcceptRule):
    """Control of every accept rule: keeps tokens at random with a fixed rate.

    In a tree, one draw decides for all children of a node, so that the share of levels that pass
    does not depend on the number of children.
    """

    rate: float
    name: ClassVar[str] = "random"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return True for all tokens."""
        import torch

        return torch.ones_like(tokens, dtype=torch.bool)

    @property
    def chance(self) -> float:
        """The rate."""
        return self.rate

    @property
    def is_exact(self) -> bool:
        """True at rate 0."""
        return self.rate <= 0


def _gather_tokens(p: Tensor, tokens: Tensor) -> Tensor:
    return p.gather(-1, tokens[:, None])[:, 0]


# ---- parameters ---------------------------------------------------------------------------------


class AcceptParams(MethodParams):
    """Parameters of a method with an accept rule. List it first among the base classes."""

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
        """The accept rule of these parameters. None for "exact"."""
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
    def _serialize_used(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Serialize the parameters without those of other rules."""
        rule = self.rule
        used = set() if rule is None else {"accept", *(f.name for f in fields(rule))}
        if self.accept == "random" and self.like is not None:
            used.add("like")
        unused = {*AcceptParams.model_fields} - used
        return {name: value for name, value in serialize(self).items() if name not in unused}
