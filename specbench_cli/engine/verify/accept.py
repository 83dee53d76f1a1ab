"""Lossy accept rules, which keep draft tokens that the lossless rule rejects.

The lossless rule of the decoding mode (`chain`, `siblings`) decides first. A draft token that it
keeps is called "accepted". If the lossless rule rejects a token and the accept rule keeps it, the
token is called "relaxed". Verification then continues after this token. If both rules reject a
token, the lossless rule's own token is committed instead. Outputs do not change without an accept
rule, or with a rule that keeps no token (`AcceptRule.is_exact`).

Most accept rules depend only on the target's distributions and the draft tokens. Under rejection
sampling and coupled sampling, the distributions include temperature, top-k and top-p. Under greedy
decoding, they are the softmax of the logits. A rule that needs more information overrides
`relaxed_mask`, which gets a `DraftContext`.

To show that a rule is useful, compare it with its control `RandomAccept`, which keeps tokens at
random.

Code that only plans a run imports this module, so it does not import torch.
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
"""Value of `delta` with which no token passes: its product with exp(-entropy) is always above 1."""

# ---- the rules ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The m draft tokens of a step, with everything that an accept rule may use.

    Attributes:
        tokens: int64 [m].
        parents: Index of each token's parent. `ROOT` means the root.
        p: [m, V], the target's distribution at the position of each token.
        q: [m, V], the distribution that each token was drawn from. None if tokens were not drawn.
        scores: [m, V], the target's scores at the position of each token. The token with the
            highest score is the target's choice. None if the target draws its tokens.
        features: [m, width], captured features of the target's row that predicts each token
            (`session.capture_layers`). None if no layers are captured.
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
    """Base class of accept rules. A rule is a frozen dataclass with its parameters.

    Override `lets_pass`. If the rule needs more than the target's distribution, override
    `relaxed_mask` instead.

    Class attributes:
        name: Name in tables and records.
        guarantee: What the rule still guarantees about the output.
        pure: True if the result depends only on `lets_pass` and `chance`.
    """

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = "quality_only"
    pure: ClassVar[bool] = True

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return which draft tokens are kept if the lossless rule rejects them, [m] bool.

        Args:
            p: [m, V], the target's distribution at the position of each token.
            tokens: int64 [m].
        """
        raise MethodFault(f"the rule {self.name} needs more than p and tokens: see `relaxed_mask`")

    def relaxed_mask(self, context: DraftContext, random: Random) -> Tensor:
        """Return which draft tokens to keep if the lossless rule rejects them, [m] bool.

        By default, each token for which `lets_pass` is True is kept with probability `chance`.
        """
        passes = self.lets_pass(context.p, context.tokens)
        if self.chance == 1:
            return passes
        from specbench_cli.engine.verify.random import draw_per_parent

        return passes & draw_per_parent(self.chance, context.parents, context.p, random)

    @property
    def chance(self) -> float:
        """Probability of keeping a token for which `lets_pass` is True.

        All children of a node share one random draw.
        """
        return 1.0

    @property
    def stricter(self) -> AcceptRule | None:
        """The same rule with stricter parameters, or None if the rule does not define them.

        The stricter rule must not keep a token that this rule rejects. Audits check that.
        """
        return None

    @property
    def is_exact(self) -> bool:
        """True if the rule keeps no token that the lossless rule rejects. The method is then
        lossless.
        """
        return False

    def control(self, rate: float) -> RandomAccept:
        """Return the control rule, which keeps the same share of tokens, but at random.

        Args:
            rate: Measured share (`rule rate` in reports): of the levels that the lossless rule
                rejected, the share that this rule kept.
        """
        return RandomAccept(rate)

    def __str__(self) -> str:
        names = (f.name for f in fields(self) if f.repr)
        numbers = ", ".join(f"{name}={getattr(self, name):g}" for name in names)
        return f"{self.name}({numbers})"


@dataclass(frozen=True)
class Threshold(AcceptRule):
    """Rule that keeps tokens whose target probability is at least epsilon.

    Every committed token then has at least this target probability, or comes from the lossless
    rule.
    """

    epsilon: float
    name: ClassVar[str] = "threshold"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return True for each token x with p(x) >= epsilon."""
        return _gather_tokens(p, tokens) >= self.epsilon

    @property
    def is_exact(self) -> bool:
        """True if epsilon is above 1. No probability reaches it, so the rule keeps no token."""
        return self.epsilon > 1

    @property
    def stricter(self) -> AcceptRule:
        """The rule with twice the epsilon."""
        return replace(self, epsilon=2 * self.epsilon)


@dataclass(frozen=True)
class Typical(AcceptRule):
    """Typical acceptance: the threshold decreases with the entropy of the target's distribution.

    Tianle Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
    Heads, ICML 2024, arXiv:2401.10774, section 2.3.1. In the paper, typical acceptance decides
    about all draft tokens, and the first one is always accepted. Here it decides only about tokens
    that the lossless rule rejects.
    """

    epsilon: float
    delta: float
    name: ClassVar[str] = "typical"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return True for each token x with p(x) > min(epsilon, delta exp(-H(p))), where H is the
        entropy.
        """
        import torch

        entropy: Tensor = torch.special.entr(p).sum(-1)
        return _gather_tokens(p, tokens) > (self.delta * (-entropy).exp()).clamp_max(self.epsilon)

    @property
    def is_exact(self) -> bool:
        """True if the rule rejects even a token with probability 1.

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
    Decoding, ICML 2023, arXiv:2211.17192, appendix A.5. The draft probability q(x) is multiplied by
    the factor before it is compared with p(x). For tokens that were not drawn, q(x) is replaced by
    factor times the highest target probability.
    """

    factor: float
    name: ClassVar[str] = "lenient"
    pure: ClassVar[bool] = False

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return True for each token x with p(x) >= factor max p."""
        return _gather_tokens(p, tokens) >= self.factor * p.amax(-1)

    def relaxed_mask(self, context: DraftContext, random: Random) -> Tensor:
        """Return which draft tokens to keep if the lossless rule rejects them, [m] bool.

        A drawn token is kept with such a probability that its total acceptance probability is
        min(1, p / (factor q)) instead of min(1, p / q). A token that was not drawn is kept if its
        score would be the highest with p(x) / factor in place of p(x).
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
        # If the lossless rule accepts with probability 1, the denominator is 0. The clamp avoids 0
        # / 0.
        return random.bernoulli((lenient - strict) / (1 - strict).clamp_min(1e-12)).bool()

    @property
    def is_exact(self) -> bool:
        """True if the factor is 1, because the rule then equals the lossless rule."""
        return self.factor >= 1

    @property
    def stricter(self) -> AcceptRule:
        """The rule with a factor halfway between this factor and 1."""
        return replace(self, factor=(1 + self.factor) / 2)


@dataclass(frozen=True)
class RandomAccept(AcceptRule):
    """Random baseline that other accept rules are compared with.

    It keeps a rejected token with a fixed probability. If all children of a tree node are rejected,
    one random draw decides whether one of them is kept. So the probability to keep a level does not
    depend on the number of children.
    """

    rate: float
    name: ClassVar[str] = "random"

    def lets_pass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return True for all tokens. The probability `chance` then decides."""
        import torch

        return torch.ones_like(tokens, dtype=torch.bool)

    @property
    def chance(self) -> float:
        """Probability of keeping a token: the parameter `rate`."""
        return self.rate

    @property
    def is_exact(self) -> bool:
        """True if the rate is 0."""
        return self.rate <= 0


def _gather_tokens(p: Tensor, tokens: Tensor) -> Tensor:
    return p.gather(-1, tokens[:, None])[:, 0]


# ---- parameters ---------------------------------------------------------------------------------


class AcceptParams(MethodParams):
    """Parameters of a method with an accept rule. List this class first among the base classes."""

    accept: Literal["exact", "threshold", "typical", "lenient", "random"] = Field(
        "exact",
        description="how to treat draft tokens that the lossless rule rejects: drop them (exact),"
        " keep those with a high enough target probability (threshold, typical, lenient), or keep"
        " some at random, as a control (random)",
    )
    epsilon: float = Field(
        0.09,
        ge=0,
        description="threshold, typical: minimum target probability of a token that is kept. With"
        " threshold, a value above 1 keeps none",
    )
    delta: float = Field(
        0.3,
        ge=0,
        description="typical: keep a token if its target probability exceeds epsilon or"
        " delta * exp(-entropy), whichever is smaller",
    )
    factor: float = Field(
        0.5,
        ge=0,
        le=1,
        description="lenient: divide a draft token's target probability by this factor in the"
        " acceptance test. 1 is lossless",
    )
    rate: float = Field(
        0.1, ge=0, le=1, description="random: probability of keeping a rejected draft token"
    )
    like: str | None = Field(
        None,
        description="random: label of a method in the run. The rate at which it keeps rejected"
        " tokens is measured and replaces `rate`",
    )

    @property
    def rule(self) -> AcceptRule | None:
        """The accept rule that these parameters select. None for "exact"."""
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
        """Leave out parameters that the chosen rule does not use, when the parameters are
        serialized.
        """
        rule = self.rule
        used = set() if rule is None else {"accept", *(f.name for f in fields(rule))}
        if self.accept == "random" and self.like is not None:
            used.add("like")
        unused = {*AcceptParams.model_fields} - used
        return {name: value for name, value in serialize(self).items() if name not in unused}
